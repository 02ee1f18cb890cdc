"""Many image files, decoded in parallel and handed on in order, a bounded number at a time."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from cdtrans.data.images import UnreadableImage, decode, pixel_digest, resized, upright_rgb
from cdtrans.errors import CdtransError
from cdtrans.screen import Screen

IN_FLIGHT_PER_WORKER = 16

# The file, if it was one, and its pixels, uint8 [size, size, 3], or the reason why there are none.
Decoded = tuple[Path | None, np.ndarray | UnreadableImage]


def decode_in_order(
    images: Iterable[str | Path | Image.Image], size: int, workers: int | None = None
) -> Iterator[Decoded]:
    """Decode and resize, keeping the order. Threads, because PIL does both without the GIL."""
    workers = workers or len(os.sched_getaffinity(0))
    waiting: deque[Future[Decoded]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for image in images:
            waiting.append(pool.submit(_decode, image, size))
            if len(waiting) >= workers * IN_FLIGHT_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class StreamedPixels:
    """Pixels that are decoded every time they are asked for (`--pixels stream`): for sets too large for the disk."""

    def __init__(self, files: list[Path], size: int) -> None:
        self.files, self.size = files, size

    def look(self, screen: Screen, name: str) -> tuple[list[str], dict[int, str]]:
        """One pass over all files, so that training meets no surprise: the digest of each, and position -> cause of
        those that cannot be read."""
        digests, bad = [], {}
        with screen.track(f"check {name}", len(self.files)) as task:
            for n, (_, pixels) in enumerate(decode_in_order(self.files, self.size)):
                if isinstance(pixels, UnreadableImage):
                    bad[n] = str(pixels)
                    digests.append("")
                else:
                    digests.append(pixel_digest(pixels))
                task.advance(1)
        return digests, bad

    def fetch(self, positions: list[int]) -> np.ndarray:
        """uint8 [B, size, size, 3]"""
        decoded = []
        for path, pixels in decode_in_order([self.files[n] for n in positions], self.size):
            if isinstance(pixels, UnreadableImage):
                raise CdtransError(f"'{path}' could be read when the run began and now cannot: {pixels}.")
            decoded.append(pixels)
        return np.stack(decoded)


def _decode(image: str | Path | Image.Image, size: int) -> Decoded:
    path = None if isinstance(image, Image.Image) else Path(image)
    try:
        rgb = upright_rgb(image) if isinstance(image, Image.Image) else decode(Path(image))
        return path, resized(rgb, size)
    except UnreadableImage as error:
        return path, error
    except OSError as error:  # a PIL image is read from its file only now
        return path, UnreadableImage(str(error))
