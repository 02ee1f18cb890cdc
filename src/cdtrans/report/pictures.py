"""Pixels -> pictures that live inside the page, as data addresses."""

import base64
import io
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from cdtrans.data.images import UnreadableImage
from cdtrans.data.stream import decode_in_order

SIDE = 144  # pixels of a thumbnail: twice what it is shown at, because many screens have two to a point
QUALITY = 80  # of JPEG; a photo of that side then takes about 6 kB
HEAT = np.array(  # matplotlib's "inferno", cold to hot: even in brightness, so it reads in grey and to the colour-blind
    [
        *((0, 0, 4), (23, 11, 59), (66, 10, 104), (107, 23, 110), (147, 38, 103), (187, 55, 85)),
        *((221, 81, 58), (243, 119, 26), (252, 165, 10), (246, 214, 68), (252, 255, 164)),
    ]
)
HEAT_SHARE = 0.6  # of the colours over the picture
KEPT_COLOUR, REJECTED_COLOUR = (43, 138, 107), (194, 80, 74)  # as --kept and --rejected
MATRIX_SIDE = 840  # pixels of a confusion matrix, twice what it is shown at


class Pictures:
    """The images of a domain as the model sees them: squashed to a square, its centre cropped. Files may have vanished
    since the run; they are counted, and asking for one gives None."""

    def __init__(self, root: Path, paths: tuple[str, ...], *, resize: int, crop: int) -> None:
        self.root, self.paths, self.resize, self.crop = root, paths, resize, crop
        self.found: dict[int, np.ndarray | None] = {}  # index -> uint8 [crop, crop, 3], None if there is none

    def fetch(self, indices: Iterable[int]) -> None:
        """Decode many at once, in parallel."""
        new = [i for i in dict.fromkeys(map(int, indices)) if i not in self.found and i < len(self.paths)]
        files = [self.root / self.paths[i] for i in new]
        edge = round((self.resize - self.crop) / 2)
        for i, (_, pixels) in zip(new, decode_in_order(files, self.resize), strict=True):
            whole = None if isinstance(pixels, UnreadableImage) else pixels
            self.found[i] = None if whole is None else whole[edge : edge + self.crop, edge : edge + self.crop]

    def __getitem__(self, index: int) -> np.ndarray | None:
        if index not in self.found:
            self.fetch([index])
        return self.found.get(index)

    def thumbnails(self, indices: Iterable[int]) -> list[str | None]:
        indices = list(indices)
        self.fetch(indices)
        return in_parallel(self._thumbnail, indices)

    def _thumbnail(self, index: int) -> str | None:
        pixels = self[index]
        return None if pixels is None else jpeg(enlarged(pixels))

    @property
    def gone(self) -> int:
        return sum(pixels is None for pixels in self.found.values())


Made = TypeVar("Made")


def in_parallel(make: Callable[..., Made], *columns: Iterable[Any]) -> list[Made]:
    """Threads, because PIL resizes and compresses without the GIL."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(make, *columns))


def enlarged(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def heated(pixels: np.ndarray, weights: np.ndarray) -> Image.Image:
    """The picture in grey under the colours of its patches' weights, [rows, columns], from the least to the largest."""
    low, high = float(weights.min()), float(weights.max())
    scaled = (weights.astype(np.float32) - low) / max(high - low, 1e-12)
    smooth = np.asarray(Image.fromarray(scaled).resize((SIDE, SIDE), Image.Resampling.BILINEAR))  # [SIDE, SIDE]
    colours = np.stack([np.interp(smooth, np.linspace(0, 1, len(HEAT)), channel) for channel in HEAT.T], axis=-1)
    grey = np.asarray(enlarged(pixels).convert("L"), dtype=np.float64)[..., None]
    return Image.fromarray(np.rint(HEAT_SHARE * colours + (1 - HEAT_SHARE) * grey).astype(np.uint8))


def matrix(shares: np.ndarray) -> str:
    """A confusion matrix, [K, K] shares of the true classes, for one too large to be a table: right ones in the colour
    of what is kept, wrong ones in that of what is rejected."""
    colours = np.where(np.eye(len(shares), dtype=bool)[..., None], KEPT_COLOUR, REJECTED_COLOUR)  # [K, K, 3]
    visible = np.sqrt(shares)[..., None] * 255  # the root, so that a few confusions of many images show
    pixels = np.concatenate([colours, visible], axis=2).round().astype(np.uint8)
    side = max(1, MATRIX_SIDE // len(shares))
    large = Image.fromarray(pixels).resize((side * len(shares),) * 2, Image.Resampling.NEAREST)
    file = io.BytesIO()
    large.save(file, "PNG")
    return _address("image/png", file.getvalue())


def jpeg(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return _address("image/jpeg", file.getvalue())


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
