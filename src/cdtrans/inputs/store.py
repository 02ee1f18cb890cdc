"""A folder of decoded images on disk: rows of pixels, an index of the valid rows, and a lock.

A store is a folder `CACHE/pixels/<hash of root and size>/` with four files:

    pixels.u8       rows of size x size x 3 bytes, append-only, so that memory maps of other processes stay valid
    thumbnails.u8   rows of 16 x 16 x 3 bytes, likewise
    index.jsonl     a header, then a line per image: path, bytes, mtime, and its row or why it has none
    lock            held by the process that reads or extends the store; its mtime is the time of last use

An index line is written after its pixels are on disk, so a process may be killed at any moment: rows that are not in
the index are overwritten by the next process.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from cdtrans.errors import CdtransError, DiskFull
from cdtrans.inputs.images import UnreadableImage, pixel_digest
from cdtrans.inputs.thumbnails import SIDE, Trace, thumbnail
from cdtrans.runtime.locks import Lock, try_lock

FORMAT = 3  # raise it when the same file would give another row: stores of another format are rebuilt
PIXELS, THUMBNAILS, INDEX, LOCK = "pixels.u8", "thumbnails.u8", "index.jsonl", "lock"
CONTENT = (PIXELS, THUMBNAILS, INDEX)
POLL_SECONDS = 0.1  # between attempts to take a lock that another process holds


@dataclass(frozen=True)
class StoreInfo:
    """What `cdtrans cache` shows of one store."""

    root: Path
    size: int
    images: int
    nbytes: int  # on disk
    last_used: datetime
    outdated: bool = False  # of an older format, rebuilt when it is next used


def list_stores(cache: Path) -> list[StoreInfo]:
    """Every store with a readable index, the most recently used first."""
    with explained(cache):
        stores = [_info(folder) for folder in _folders(cache)]
    return sorted((store for store in stores if store), key=lambda store: store.last_used, reverse=True)


def clear_stores(cache: Path, root: Path | None = None) -> int:
    """Delete all stores, or those of `root`; one that is being built stays. Returns the bytes freed."""
    freed = 0
    with explained(cache):
        for folder in _folders(cache):
            info = _info(folder)
            if root is None or (info and info.root == _real(root)):
                freed += _clear(folder)
    return freed


class ImageFile(NamedTuple):
    """A file as it is now; bytes and mtime show whether it has changed since it was decoded."""

    key: str
    path: Path
    nbytes: int
    mtime_ns: int


class Entry(NamedTuple):
    """A line of the index: the file's row, or -1 and why it has none."""

    nbytes: int
    mtime_ns: int
    row: int
    cause: str = ""
    digest: str = ""  # of the pixels


ENTRY_TYPES = get_type_hints(Entry)


class Row(NamedTuple):
    """The pixels, thumbnail and digest of one image."""

    pixels: np.ndarray  # uint8 [size, size, 3]
    trace: Trace


Result = tuple[ImageFile, Row | UnreadableImage]


@dataclass
class Store:
    """A store, read and extended by the process that holds its lock."""

    folder: Path
    root: Path
    size: int
    index_end: int  # bytes of the index that are complete lines
    rows: int = 0  # rows that are in the index
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, root: Path, size: int) -> "Store":
        """The valid part of an existing store, or a new store if there is no header of this format, root and size."""
        if (store := cls.read(folder)) and (store.root, store.size) == (_real(root), size):
            for name in (PIXELS, THUMBNAILS):  # a deleted file counts as empty
                (folder / name).touch()
            return store
        for name in CONTENT:  # unlinked, not truncated: another process may have the old file mapped
            (folder / name).unlink(missing_ok=True)
        for name in (PIXELS, THUMBNAILS):
            (folder / name).touch()
        header = _line({"root": str(_real(root)), "size": size, "format": FORMAT})
        (folder / INDEX).write_bytes(header)
        return cls(folder, _real(root), size, index_end=len(header))

    @classmethod
    def read(cls, folder: Path) -> "Store | None":
        """The index up to the first line that is incomplete or damaged, or whose pixels are missing."""
        records = _records(folder / INDEX)
        header, end = next(records, ({}, 0))
        if header.get("format") != FORMAT or not _is_header(header):
            return None
        store = cls(folder, Path(header["root"]), header["size"], index_end=end)
        sides = {PIXELS: store.size, THUMBNAILS: SIDE}
        rows_on_disk = min(_bytes(folder / name) // row_bytes(side) for name, side in sides.items())
        for record, end in records:
            key, entry = _parsed(record)
            if entry is None or (entry.row >= 0 and not entry.row == store.rows < rows_on_disk):
                break
            store.entries[key] = entry
            store.rows += entry.row >= 0
            store.index_end = end
        return store

    def holds(self, image: ImageFile) -> bool:
        entry = self.entries.get(image.key)
        return entry is not None and (entry.nbytes, entry.mtime_ns) == (image.nbytes, image.mtime_ns)

    def damaged(self, entries: Sequence[Entry]) -> set[int]:
        """The rows of these entries that are not what was written: disks and other programs can change them. Every
        image is compared with its digest. Of the thumbnails, which cost as much and only help to find copies, the
        first is compared; if it is wrong, all are."""
        pixels, first = self.pixels(), entries[0].row
        if not np.array_equal(thumbnail(pixels[first]), self.thumbnails()[first]):
            return {entry.row for entry in entries}
        return {entry.row for entry in entries if pixel_digest(pixels[entry.row]) != entry.digest}

    def append(self, results: list[Result]) -> None:
        """Write pixels and thumbnails to disk first, then their index lines."""
        lines = []
        with (self.folder / PIXELS).open("r+b") as pixels, (self.folder / THUMBNAILS).open("r+b") as thumbnails:
            pixels.seek(self.rows * row_bytes(self.size))
            thumbnails.seek(self.rows * row_bytes(SIDE))
            for image, result in results:
                if isinstance(result, Row):
                    pixels.write(result.pixels.data)
                    thumbnails.write(result.trace.thumbnail.data)
                    entry = Entry(image.nbytes, image.mtime_ns, self.rows, digest=result.trace.digest)
                    permanent = True
                    self.rows += 1
                else:
                    entry = Entry(image.nbytes, image.mtime_ns, row=-1, cause=str(result))
                    permanent = _is_permanent(result)
                self.entries[image.key] = entry
                if permanent:
                    lines.append(_line({"path": image.key, **entry._asdict()}))
            for file in (pixels, thumbnails):
                file.flush()
                os.fsync(file.fileno())
        with (self.folder / INDEX).open("r+b") as index:
            index.truncate(self.index_end)
            index.seek(self.index_end)
            index.write(b"".join(lines))
            self.index_end = index.tell()

    def pixels(self) -> np.ndarray:
        """uint8 [rows, size, size, 3]"""
        return self._map(PIXELS, self.size)

    def thumbnails(self) -> np.ndarray:
        """uint8 [rows, SIDE, SIDE, 3]"""
        return self._map(THUMBNAILS, SIDE)

    def _map(self, name: str, side: int) -> np.ndarray:
        shape = (self.rows, side, side, 3)
        if not self.rows:  # an empty file cannot be mapped
            return np.empty(shape, np.uint8)
        return np.memmap(self.folder / name, np.uint8, mode="r", shape=shape)


def _is_permanent(error: UnreadableImage) -> bool:
    """Whether the file itself is bad. After missing permissions, a lost network drive or too little memory it is tried
    again next time."""
    cause = error.__cause__
    return not isinstance(cause, MemoryError) and getattr(cause, "errno", None) is None


def lock_store(folder: Path, disk: Callable[[], AbstractContextManager], waiting: Callable[[], None]) -> Lock:
    """The store's lock; closing it, or the end of the process, releases it."""
    with disk():
        lock = _try_lock(folder)
    if lock is None:
        waiting()
    while lock is None:
        time.sleep(POLL_SECONDS)
        with disk():
            lock = _try_lock(folder)
    return lock


def _try_lock(folder: Path) -> Lock | None:
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another process has just deleted it
        lock = try_lock(folder / LOCK)
        if lock is not None:
            os.utime(folder / LOCK)
        return lock
    return None


def check_space(cache: Path, missing: int) -> None:
    """Fail before decoding and not after an hour of it."""
    if missing > shutil.disk_usage(cache).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def explained(cache: Path, need: int = 0) -> Iterator[None]:
    """Explain errors of the file system. Wrap only access to the store: a closed terminal is not a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"The disk of the cache folder {cache} is too full: the decoded images need {need / 1e9:.3g} GB; "
                "free some space there, use a folder on a larger disk with --cache DIR, or use --pixels stream."
            ) from error
        raise CdtransError(
            f"The cache folder {cache} cannot be used ({error.strerror or error}); use another one with --cache DIR."
        ) from error


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _is_header(record: dict[str, Any]) -> bool:
    """Of a store of any format."""
    size = record.get("size")
    return isinstance(record.get("root"), str) and isinstance(size, int) and size > 0 and "format" in record


def _parsed(record: dict[str, Any]) -> tuple[str, Entry | None]:
    """A line of the index: the file's key, and None if the line is not one of this format."""
    key = record.pop("path", None)
    known = all(type(value) is ENTRY_TYPES.get(name) for name, value in record.items())
    if not isinstance(key, str) or not known or record.keys() < ENTRY_TYPES.keys():
        return "", None
    return key, Entry(**record)


def _records(index: Path) -> Iterator[tuple[dict, int]]:
    """The lines of an index and where each ends, up to the first incomplete one."""
    end = 0
    with suppress(FileNotFoundError, ValueError, RecursionError), index.open("rb") as lines:
        for line in lines:
            end += len(line)
            record = json.loads(line)
            if not (isinstance(record, dict) and line.endswith(b"\n")):
                return
            yield record, end


def _bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def row_bytes(side: int) -> int:
    return side * side * 3


def image_bytes(size: int) -> int:
    """Bytes on disk per image, thumbnail included."""
    return row_bytes(size) + row_bytes(SIDE)


def _real(root: Path) -> Path:
    return Path(os.path.realpath(root))


def store_folder(cache: Path, root: Path, size: int) -> Path:
    name = hashlib.sha256(os.fsencode(_real(root)) + f"\0{size}".encode()).hexdigest()
    return cache / "pixels" / name[:16]


def _folders(cache: Path) -> list[Path]:
    return [lock.parent for lock in (cache / "pixels").glob(f"*/{LOCK}")]


def _info(folder: Path) -> StoreInfo | None:
    """What the header and index of a store of any format say."""
    records = _records(folder / INDEX)
    header, _ = next(records, ({}, 0))
    if not _is_header(header):
        return None
    rows = {str(record.get("path")): record.get("row") for record, _ in records}
    return StoreInfo(
        root=Path(header["root"]),
        size=header["size"],
        images=sum(isinstance(row, int) and row >= 0 for row in rows.values()),
        nbytes=sum(_bytes(folder / name) for name in CONTENT),
        last_used=datetime.fromtimestamp((folder / LOCK).stat().st_mtime),
        outdated=header["format"] != FORMAT,
    )


def _clear(folder: Path) -> int:
    """Delete only the files of a store, by name, since the cache may be any folder of the user."""
    lock = _try_lock(folder)
    if lock is None:
        return 0
    with lock:
        freed = sum(_bytes(folder / name) for name in CONTENT)
        for name in CONTENT:
            (folder / name).unlink(missing_ok=True)
        if os.name != "nt":  # the lock last and still held, so that no other process starts a new store before
            (folder / LOCK).unlink(missing_ok=True)
    if os.name == "nt":  # an open file cannot be deleted there
        with suppress(OSError):  # another process has taken it
            (folder / LOCK).unlink()
    with suppress(OSError):  # not empty: it has files of the user, or a new store
        folder.rmdir()
    return freed
