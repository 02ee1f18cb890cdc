"""A thumbnail and a digest of every image, to find copies without reading the pixels again."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdtrans.inputs.images import pixel_digest

SIDE = 16  # pixels; small enough that compression does not show, large enough to tell similar objects apart


class Trace(NamedTuple):
    """What identifies an image."""

    digest: str  # of its pixels
    thumbnail: np.ndarray  # uint8 [SIDE, SIDE, 3]


class Traces(NamedTuple):
    """The traces of a domain's images."""

    paths: Sequence[str]
    digests: Sequence[str]
    thumbnails: np.ndarray  # uint8 [N, SIDE, SIDE, 3]


def trace(pixels: np.ndarray) -> Trace:
    """Made by the threads that decode, so that later comparisons do not read the pixels again."""
    return Trace(pixel_digest(pixels), thumbnail(pixels))


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """uint8 [size, size, 3] -> [SIDE, SIDE, 3]: each pixel is the mean of its area. About 0.1 ms."""
    size = len(pixels)
    begins = np.arange(SIDE) * size // SIDE
    lengths = np.maximum(np.diff(begins, append=size), 1)  # in an image smaller than SIDE some pixels count twice
    flat = pixels.reshape(size, -1)
    strips = [flat[i : i + n].sum(axis=0, dtype=np.uint32) for i, n in zip(begins, lengths, strict=True)]
    rows = np.stack(strips).reshape(SIDE, size, 3)
    sums = np.add.reduceat(rows, begins, axis=1)  # [SIDE, SIDE, 3]
    means: np.ndarray = np.rint(sums / np.outer(lengths, lengths)[..., None]).astype(np.uint8)
    return means
