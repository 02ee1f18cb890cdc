"""Every picture at a size at which two of them can be compared in no time, made from the pixels that are there."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod

import numpy as np

from cdtrans.data.stream import StreamedPixels

SIDE = 16  # small enough to forget compression, large enough to tell two mugs apart
BLOCK_BYTES = 2**23  # of a store, summed up at a time: long enough in numpy that threads do not wait for the GIL
STREAMED_IMAGES = 256  # decoded at a time, so that memory stays flat


def make_thumbnails(pixels: np.ndarray | StreamedPixels, rows: np.ndarray) -> np.ndarray:
    """uint8 [N, SIDE, SIDE, 3]: each pixel the mean of what it stands for. About 0.1 ms an image and thread from a
    store; streamed pixels are decoded once more."""
    if isinstance(pixels, StreamedPixels):
        small = [_shrink(pixels.fetch(block.tolist())) for block in _blocks(rows, STREAMED_IMAGES)]
    else:
        blocks = _blocks(rows, max(1, BLOCK_BYTES // prod(pixels.shape[1:])))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            small = list(pool.map(lambda block: _shrink(pixels[block]), blocks))
    return np.concatenate(small) if small else np.empty((0, SIDE, SIDE, 3), np.uint8)


def _blocks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _shrink(images: np.ndarray) -> np.ndarray:
    """uint8 [B, size, size, 3] -> [B, SIDE, SIDE, 3]"""
    edges = np.arange(SIDE + 1) * images.shape[1] // SIDE
    windows = [slice(begin, max(end, begin + 1)) for begin, end in pairwise(edges)]
    rows = np.stack([images[:, w].sum(axis=1, dtype=np.uint32) for w in windows], axis=1)  # [B, SIDE, size, 3]
    sums = np.stack([rows[:, :, w].sum(axis=2, dtype=np.uint32) for w in windows], axis=2)  # [B, SIDE, SIDE, 3]
    lengths = np.array([w.stop - w.start for w in windows])
    return np.rint(sums / np.outer(lengths, lengths)[..., None]).astype(np.uint8)
