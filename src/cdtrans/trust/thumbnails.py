"""Every picture at a size at which two of them can be compared in no time, made from the pixels that are there."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from cdtrans.data.stream import StreamedPixels

SIDE = 16  # small enough to forget compression, large enough to tell two mugs apart
BLOCK_IMAGES = 256  # fetched at a time, so that memory stays flat


def make_thumbnails(pixels: np.ndarray | StreamedPixels, rows: np.ndarray) -> np.ndarray:
    """uint8 [N, SIDE, SIDE, 3]: each pixel the mean of what it stands for. About 0.1 ms an image and thread from a
    store; streamed pixels are decoded once more."""
    blocks = [rows[begin : begin + BLOCK_IMAGES] for begin in range(0, len(rows), BLOCK_IMAGES)]
    if isinstance(pixels, StreamedPixels):
        small = [_shrink(pixels.fetch(block.tolist())) for block in blocks]
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # PIL shrinks without the GIL
            small = list(pool.map(lambda block: _shrink([pixels[row] for row in block]), blocks))
    return np.concatenate(small) if small else np.empty((0, SIDE, SIDE, 3), np.uint8)


def _shrink(images: list[np.ndarray] | np.ndarray) -> np.ndarray:
    return np.stack(
        [
            np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=1.0))
            for image in images
        ]
    )
