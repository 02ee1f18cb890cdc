"""Decode many image files in parallel and in order, a bounded number at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

from cdtrans.errors import CdtransError
from cdtrans.inputs.images import SIDE, Trace, UnreadableImage, decode, resized, trace, upright_rgb
from cdtrans.inputs.tars import TarMember
from cdtrans.runtime.ranks import processor_count, processor_share
from cdtrans.runtime.screen import Screen

IN_FLIGHT_PER_WORKER = 16  # images decoded ahead of the reader; bounds memory and hides slow files

Made = TypeVar("Made")
Source = str | Path | Image.Image | TarMember

# The file, if it was one, and its pixels, uint8 [size, size, 3], or why it cannot be read.
Decoded = tuple[Path | None, np.ndarray | UnreadableImage]


def decode_in_order(images: Iterable[Source], size: int, workers: int | None = None) -> Iterator[Decoded]:
    """Decode and resize, keeping the order."""
    return make_in_order(images, size, lambda pixels: pixels, workers)


def make_in_order(
    images: Iterable[Source], size: int, make: Callable[[np.ndarray], Made], workers: int | None = None
) -> Iterator[tuple[Path | None, Made | UnreadableImage]]:
    """Decode, resize, and apply `make` to the pixels, keeping the order. Threads are enough, because PIL, numpy and
    hashlib release the GIL."""
    workers = workers or processor_count()
    waiting: deque[Future[tuple[Path | None, Made | UnreadableImage]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for image in images:
            waiting.append(pool.submit(_decode, image, size, make))
            if len(waiting) >= workers * IN_FLIGHT_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class DecodedBatch(NamedTuple):
    """Some images in order. Only those that can be read have pixels."""

    paths: list[Path | None]
    pixels: np.ndarray  # uint8 [readable, size, size, 3]
    problems: dict[int, str]  # position -> why it cannot be read


def cut(images: Iterable[Source], size: int) -> Iterator[list[Source]]:
    """Batches of this size; the last may be smaller."""
    images = iter(images)
    while batch := list(islice(images, size)):
        yield batch


def decode_batches(
    batches: Iterable[Sequence[Source]], size: int, allocate: Callable[[tuple[int, ...]], np.ndarray]
) -> Iterator[DecodedBatch]:
    """Decode and resize batch by batch, keeping the order. The threads write the pixels into the arrays [B, size, size,
    3] of `allocate`, and have the next batches to work on while this one is used."""
    workers = processor_share()
    waiting: deque[tuple[Sequence[Source], np.ndarray, list[Future[str | None]]]] = deque()
    pool = ThreadPoolExecutor(workers)
    ahead = 0  # images behind the first of `waiting`
    try:
        for batch in batches:
            pixels = allocate((len(batch), size, size, 3))
            futures = [pool.submit(_decode_into, row, image) for row, image in zip(pixels, batch, strict=True)]
            ahead += len(batch) if waiting else 0
            waiting.append((batch, pixels, futures))
            if ahead >= workers * IN_FLIGHT_PER_WORKER:
                yield _gathered(*waiting.popleft())
                ahead -= len(waiting[0][0])
        while waiting:
            yield _gathered(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_into(row: np.ndarray, image: Source) -> str | None:
    """Fill an array of the shape [size, size, 3], or return why the image cannot be read."""
    _, pixels = _decode(image, len(row), lambda pixels: pixels)
    if isinstance(pixels, UnreadableImage):
        return str(pixels)
    row[:] = pixels
    return None


def _gathered(batch: Sequence[Source], pixels: np.ndarray, futures: list[Future[str | None]]) -> DecodedBatch:
    problems = {n: problem for n, future in enumerate(futures) if (problem := future.result()) is not None}
    if problems:
        pixels = np.delete(pixels, list(problems), axis=0)
    return DecodedBatch([_path(image) for image in batch], pixels, problems)


def _path(image: Source) -> Path | None:
    """None for an image that was not read from a file."""
    if isinstance(image, Path | TarMember):
        return image if isinstance(image, Path) else image.path
    return None if isinstance(image, Image.Image) else Path(image)


class StreamedPixels:
    """Pixels that are decoded at every access (`--pixels stream`), for sets too large for the disk."""

    def __init__(self, files: list[Path], size: int) -> None:
        self.files, self.size = files, size

    def look(self, screen: Screen, name: str) -> tuple[list[str], np.ndarray, dict[int, str]]:
        """One pass over all files before training: the digest and the thumbnail of each, [N, SIDE, SIDE, 3], and
        position -> cause of those that cannot be read."""
        digests, bad = [""] * len(self.files), {}
        thumbnails = np.zeros((len(self.files), SIDE, SIDE, 3), np.uint8)
        with screen.track(f"check {name}", len(self.files)) as task:
            for n, (_, result) in enumerate(make_in_order(self.files, self.size, trace)):
                if isinstance(result, Trace):
                    digests[n], thumbnails[n] = result
                else:
                    bad[n] = str(result)
                task.advance(1)
        return digests, thumbnails, bad

    def fetch(self, positions: list[int]) -> np.ndarray:
        """uint8 [B, size, size, 3]"""
        decoded = []
        for path, pixels in decode_in_order([self.files[n] for n in positions], self.size):
            if isinstance(pixels, UnreadableImage):
                raise CdtransError(f"'{path}' was readable when the run began and cannot be read any more: {pixels}.")
            decoded.append(pixels)
        return np.stack(decoded)


def _decode(image: Source, size: int, make: Callable[[np.ndarray], Made]) -> tuple[Path | None, Made | UnreadableImage]:
    path = _path(image)
    try:
        if isinstance(image, TarMember):
            rgb = decode(image.read())
        else:
            rgb = upright_rgb(image) if isinstance(image, Image.Image) else decode(Path(image))
        return path, make(resized(rgb, size))
    except UnreadableImage as error:
        return path, error
    except OSError as error:  # a lazily opened PIL image reads its file only here
        return path, UnreadableImage(str(error))
