"""Images one after another, from files and tars: decoded in parallel and in order, a bounded number at a time."""

import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

from cdtrans.errors import DataError
from cdtrans.inputs.images import (
    ARCHIVE_LEFTOVERS,
    THUMBNAIL,
    UnreadableImage,
    decode,
    is_image_name,
    pixel_digest,
    resized,
    thumbnails,
    upright_rgb,
)
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen

IN_FLIGHT_PER_WORKER = 16  # images decoded ahead of the reader; bounds memory and hides slow files
_TAR_NAMES = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class TarMember:
    """An image in a tar, or a placeholder for images that cannot be read."""

    path: Path  # TAR/NAME, for display
    tar: Path
    offset: int = 0
    size: int = 0
    problem: str = ""  # why it cannot be read

    def read(self) -> bytes:
        if self.problem:
            raise UnreadableImage(self.problem)
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def is_tar_name(name: str) -> bool:
    """Also true for compressed tars, which cannot be read: `members` then gives one member that says so."""
    return name.lower().endswith(_TAR_NAMES)


def members(tar: Path) -> Iterator[TarMember]:
    """The images of a tar in its order; other files, such as labels and captions, are left out. If the tar is damaged
    or cut short, the images before the damage are given, then one more member that names the problem."""
    try:
        with open(tar, "rb") as file, tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive:
            length = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all of them in memory
                if member.offset_data + member.size > length:
                    raise tarfile.ReadError("it ends too early")
                if not member.isdir() and _is_image(member.name):
                    plain = member.isreg() and not member.issparse()
                    problem = "" if plain else "a link or another special file in the tar"
                    yield TarMember(Path(f"{tar}/{member.name}"), tar, member.offset_data, member.size, problem)
            file.seek(archive.offset)
            end = file.read(tarfile.RECORDSIZE)
            if any(end[: tarfile.BLOCKSIZE] or b"1"):  # a tar ends with blocks of zeros
                raise tarfile.ReadError("it has no end mark")
            if any(end):
                raise tarfile.ReadError("another tar follows after its end; separate them")
    except Exception as error:  # on damaged headers, tarfile raises almost anything
        yield TarMember(tar, tar, problem=_why(tar, error))


def _is_image(name: str) -> bool:
    *folders, base = name.split("/")
    return is_image_name(base) and not base.startswith(".") and ARCHIVE_LEFTOVERS not in folders


def _why(tar: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    with open(tar, "rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            return "a compressed tar; decompress it first"
    return f"a damaged or truncated tar ({error}); the images after the damage are missing"


ImageSource = str | Path | Image.Image | TarMember


def decode_in_order(
    images: Iterable[ImageSource], size: int, make: Callable[[np.ndarray], _Made]
) -> Iterator[_Made | UnreadableImage]:
    """Decode, resize, and apply `make` to the pixels, uint8 [size, size, 3], keeping the order. Threads are enough,
    because PIL, numpy and hashlib release the GIL."""
    return _in_order(partial(_decode, image, size, make) for image in images)


def _in_order(tasks: Iterable[Callable[[], _Made]]) -> Iterator[_Made]:
    """The results of the tasks; those of a few more are ready or under way."""
    waiting: deque[Future[_Made]] = deque()
    workers = processor_count()
    pool = ThreadPoolExecutor(workers)
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
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


def cut(items: Iterable[_Made], size: int) -> Iterator[list[_Made]]:
    """Batches of this size; the last may be smaller."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def decode_batches(
    batches: Iterable[Sequence[ImageSource]], size: int, allocate: Callable[[tuple[int, ...]], np.ndarray]
) -> Iterator[DecodedBatch]:
    """Decode and resize batch by batch, keeping the order. The threads write the pixels into the arrays [B, size, size,
    3] of `allocate`, and have the next batches to work on while this one is used."""
    begun: deque[tuple[Sequence[ImageSource], np.ndarray]] = deque()

    def tasks() -> Iterator[Callable[[], UnreadableImage | None]]:
        for batch in batches:
            begun.append((batch, allocate((len(batch), size, size, 3))))
            for image, row in zip(*begun[-1], strict=True):
                yield partial(_decode, image, size, partial(np.copyto, row))

    errors = _in_order(tasks())
    for first in errors:
        batch, pixels = begun.popleft()
        problems = {n: str(error) for n, error in enumerate([first, *islice(errors, len(batch) - 1)]) if error}
        readable = np.delete(pixels, list(problems), axis=0) if problems else pixels
        yield DecodedBatch([_path(image) for image in batch], readable, problems)


def _path(image: ImageSource) -> Path | None:
    """None for an image that was not read from a file."""
    if isinstance(image, TarMember):
        return image.path
    return None if isinstance(image, Image.Image) else Path(image)


class StreamedPixels:
    """Pixels that are decoded at every access (`--pixels stream`), for sets too large for the disk."""

    def __init__(self, files: list[Path], size: int) -> None:
        self.files, self.size = files, size

    def look(self, screen: Screen, name: str) -> tuple[list[str], dict[int, str]]:
        """One pass over all files before training, for the thumbnails: the digest of each, and position -> cause of
        those that cannot be read."""
        digests, bad = [""] * len(self.files), {}
        self.thumbnails = np.zeros((len(self.files), THUMBNAIL, THUMBNAIL, 3), np.uint8)
        traces = decode_in_order(self.files, self.size, lambda x: (pixel_digest(x), thumbnails(x[None])[0]))
        with screen.track(f"check {name}", len(self.files)) as task:
            for n, result in enumerate(traces):
                if isinstance(result, UnreadableImage):
                    bad[n] = str(result)
                else:
                    digests[n], self.thumbnails[n] = result
                task.advance(1)
        return digests, bad

    def fetch(self, positions: list[int]) -> np.ndarray:
        """uint8 [B, size, size, 3]"""
        files = [self.files[n] for n in positions]
        (batch,) = decode_batches([files], self.size, partial(np.empty, dtype=np.uint8))
        for n, cause in batch.problems.items():
            problem = "was readable when the run began and cannot be read any more"
            raise DataError("image-lost", f"'{files[n]}' {problem}: {cause}.")
        return batch.pixels


def _decode(image: ImageSource, size: int, make: Callable[[np.ndarray], _Made]) -> _Made | UnreadableImage:
    try:
        if isinstance(image, Image.Image):
            rgb = upright_rgb(image)
        else:
            rgb = decode(image.read() if isinstance(image, TarMember) else Path(image))
        return make(resized(rgb, size))
    except UnreadableImage as error:
        return error
    except OSError as error:  # a lazily opened PIL image reads its file only here
        return UnreadableImage(str(error))
