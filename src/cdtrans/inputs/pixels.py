"""Decoded images on disk: every image is decoded once, and later runs map its pixels into memory.

A store is a folder `CACHE/pixels/<hash of root, size and format>/` with three files:

    pixels.u8       rows of size x size x 3 bytes, append-only, so that memory maps of other processes stay valid
    index.sqlite    per image file: its size and time, its row, and the digest of the row's pixels
    lock            held by the process that reads or extends the store; its mtime is the time of last use

The index names a row once its pixels are on disk, so a process may be killed at any moment: rows that are not in the
index are overwritten by the next process. The index is not trusted either: a row beyond the end of the file, or whose
pixels have another digest, is decoded again.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cdtrans.errors import DeviceError, DiskFull, counted
from cdtrans.inputs.images import UnreadableImage, pixel_digest
from cdtrans.inputs.stream import cut, decode_in_order
from cdtrans.record.files import Lock, is_disk_full, try_lock
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen

FORMAT = 4  # raise it when the layout changes, or when the same file would give another row
PIXELS, INDEX, STORE_LOCK = "pixels.u8", "index.sqlite", "lock"
CONTENT = (PIXELS, INDEX, f"{INDEX}-journal")
SCHEMA = """
CREATE TABLE store (root BLOB, size INTEGER);
CREATE TABLE images (path BLOB PRIMARY KEY, state TEXT, row INTEGER, digest TEXT) WITHOUT ROWID;
"""
LOCK_POLL_SECONDS = 0.1  # between attempts to take a lock that another process holds
RESIZE_RATIO = 256 / 224  # the authors' resize to crop
CHUNK_IMAGES = 64  # written at a time; a kill loses at most two chunks, and memory holds at most two


@dataclass(frozen=True)
class StoredPixels:
    """Decoded images: `array[rows[n]]` is the n-th file, unless `bad[n]` says why it cannot be read."""

    array: np.ndarray  # uint8 [rows of the store, size, size, 3], a read-only memory map
    rows: np.ndarray  # int64 [N], -1 where the file could not be read
    digests: tuple[str, ...]  # [N] of the pixels, '' for unreadable files
    bad: dict[int, str]  # position -> cause


class Entry(NamedTuple):
    """An image in the index."""

    state: str  # size and time of the file when it was decoded; they show whether it has changed since
    row: int
    digest: str  # digest of the row's pixels


def resize_for(crop: int) -> int:
    """The size that images are decoded to for this crop, unless `--resize` is set."""
    return round(crop * RESIZE_RATIO)


def cache_folder(cache: str | None = None) -> Path:
    """The folder of the stores: the one given with `--cache`, $CDTRANS_CACHE, or the user's cache folder."""
    if own := cache or os.environ.get("CDTRANS_CACHE"):
        return Path(own).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("cdtrans", appauthor=False)


def open_pixels(
    files: Sequence[Path], *, root: Path, size: int, cache: Path, screen: Screen, name: str
) -> StoredPixels:
    """Decode new and changed `files` into the store of `root` at `size`, and open it. Rows of an earlier process are
    compared with their digests, and decoded again where they are damaged."""
    damaged: set[int] = set()
    while True:
        store, old, bad = fill_store(files, damaged, root=root, size=size, cache=cache, screen=screen, name=name)
        wrong = _verify(store, old, screen, name)
        if not wrong:
            break
        are = counted(len(wrong), f"{name} image is", f"{name} images are")
        screen.warn(f"{are} damaged in the cache {cache} and will be decoded again.")
        damaged |= wrong
    with explained(cache):
        array = store.map()
    keys = _keys(files, root)
    entries = [Entry("", -1, "") if key in bad else store.entries[key] for key in keys]
    rows = np.array([entry.row for entry in entries], dtype=np.int64)
    positions = {n: bad[key] for n, key in enumerate(keys) if key in bad}
    return StoredPixels(array, rows, tuple(entry.digest for entry in entries), positions)


def fill_store(
    files: Sequence[Path],
    damaged: Collection[int] = (),
    *,
    root: Path,
    size: int,
    cache: Path,
    screen: Screen,
    name: str,
) -> tuple["Store", list[Entry], dict[str, str]]:
    """Decode new and changed files, and those whose rows are damaged. Returns the store, the entries that it had
    before, and key -> cause of the unreadable files, which every run tries again."""
    folder, disk = store_folder(cache, root, size), partial(explained, cache, len(files) * image_bytes(size))
    paths, states, bad = dict(zip(_keys(files, root), files, strict=True)), {}, {}
    for key, path in paths.items():
        try:
            stat = os.stat(path)
            states[key] = f"{stat.st_size} {stat.st_mtime_ns}"
        except OSError as error:
            bad[key] = str(error.strerror)
    with ExitStack() as stack:
        stack.enter_context(_locked(folder, disk, screen, name))
        with disk():
            store = Store.open(folder, root, size)
            stack.callback(store.index.close)  # its rows can still be read
            known = ((key, store.entries[key]) for key in states.keys() & store.entries.keys())
            old = {key: e for key, e in known if e.state == states[key] and e.row not in damaged}
            todo = [key for key in states if key not in old]
            if len(todo) * image_bytes(size) > shutil.disk_usage(cache).free:  # known now, not after an hour of work
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if todo:
            task = stack.enter_context(screen.track(f"decode {name}", total=len(states), done=len(old)))
            began, done = time.monotonic(), 0
            images = decode_in_order((paths[key] for key in todo), size, lambda pixels: (pixels, pixel_digest(pixels)))
            for chunk in cut(zip(todo, images, strict=True), CHUNK_IMAGES):  # the next is decoded while one is written
                bad |= {key: str(image) for key, image in chunk if isinstance(image, UnreadableImage)}
                with disk():
                    store.append({key: (states[key], *image) for key, image in chunk if isinstance(image, tuple)})
                done += len(chunk)
                task.advance(len(chunk), f"{done / (time.monotonic() - began):.0f} images/s")
    return store, list(old.values()), bad


def _keys(files: Sequence[Path], root: Path) -> list[str]:
    """Paths below the root are relative to it, so that all spellings of the root share a store; others are absolute."""
    here, prefix = os.getcwd(), f"{root.absolute()}{os.sep}"
    return [os.path.join(here, file).removeprefix(prefix) for file in files]


def _verify(store: "Store", entries: list[Entry], screen: Screen, name: str) -> set[int]:
    """The rows of the entries that are damaged. Outside the lock: rows never change, and ranks verify side by side. It
    takes a core 0.4 ms an image at size 256, and reads what the training reads anyway."""
    if not entries:
        return set()
    chunks = list(cut(sorted(entries, key=lambda entry: entry.row), CHUNK_IMAGES))
    damaged: set[int] = set()
    with screen.track(f"verify {name}", len(entries)) as task, ThreadPoolExecutor(processor_count()) as pool:
        for chunk, rows in zip(chunks, pool.map(store.damaged, chunks), strict=True):
            damaged |= rows
            task.advance(len(chunk))
    return damaged


@dataclass
class Store:
    """A store, read and extended by the process that holds its lock."""

    folder: Path
    size: int
    index: sqlite3.Connection
    entries: dict[str, Entry]
    rows: int  # rows that are in use; the next image is written behind them

    @classmethod
    def open(cls, folder: Path, root: Path, size: int) -> "Store":
        """The part of an existing store whose rows are on disk, or a new store if there is no index of this root and
        size."""
        header = (os.fsencode(os.path.realpath(root)), size)
        index = sqlite3.connect(folder / INDEX)
        with suppress(sqlite3.Error):
            sound = index.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)]
            if sound and index.execute("SELECT root, size FROM store").fetchall() == [header]:
                on_disk = _bytes(folder / PIXELS) // image_bytes(size)
                stored = "typeof(path) = 'blob' AND typeof(row) = 'integer' AND row >= 0 AND row < ?"
                lines = index.execute(f"SELECT path, state, row, digest FROM images WHERE {stored}", (on_disk,))
                entries = {os.fsdecode(path): Entry(*values) for path, *values in lines}
                return cls(folder, size, index, entries, max((entry.row + 1 for entry in entries.values()), default=0))
        index.close()
        for name in CONTENT:  # unlinked, not truncated: another process may have the old file mapped
            (folder / name).unlink(missing_ok=True)
        index = sqlite3.connect(folder / INDEX)
        index.executescript(SCHEMA)
        with index:
            index.execute("INSERT INTO store VALUES (?, ?)", header)
        return cls(folder, size, index, {}, 0)

    def damaged(self, entries: Sequence[Entry]) -> set[int]:
        """The rows of these entries that are not what was written: disks and other programs can change them."""
        pixels = self.map()
        return {entry.row for entry in entries if pixel_digest(pixels[entry.row]) != entry.digest}

    def append(self, images: dict[str, tuple[str, np.ndarray, str]]) -> None:
        """Write the pixels of key -> (state, pixels, digest) to disk first, then their entries."""
        (self.folder / PIXELS).touch()  # a new store has none, nor one whose file was deleted
        with (self.folder / PIXELS).open("r+b") as file:
            file.seek(self.rows * image_bytes(self.size))
            for _, pixels, _ in images.values():
                file.write(pixels.data)
            file.flush()
            os.fsync(file.fileno())
        rows = enumerate(images.items(), self.rows)
        entries = {key: Entry(state, row, digest) for row, (key, (state, _, digest)) in rows}
        with self.index:
            lines = [(os.fsencode(key), *entry) for key, entry in entries.items()]
            self.index.executemany("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?)", lines)
        self.entries |= entries
        self.rows += len(images)

    def map(self) -> np.ndarray:
        """uint8 [rows, size, size, 3]"""
        shape = (self.rows, self.size, self.size, 3)
        if not self.rows:  # an empty file cannot be mapped
            return np.empty(shape, np.uint8)
        return np.memmap(self.folder / PIXELS, np.uint8, mode="r", shape=shape)


@dataclass(frozen=True)
class StoreInfo:
    """The line of `cdtrans cache` on one store."""

    root: Path
    size: int
    images: int
    nbytes: int  # size on disk
    last_used: datetime


def list_stores(cache: Path) -> list[StoreInfo]:
    """Every store with a readable index, the most recently used first."""
    return sorted(filter(None, _stores(cache).values()), key=lambda store: store.last_used, reverse=True)


def clear_stores(cache: Path, root: Path | None = None) -> int:
    """Delete all stores, or those of `root`; one that is being built stays. Returns the bytes freed."""
    real = None if root is None else Path(os.path.realpath(root))
    stores = _stores(cache).items()
    with explained(cache):
        return sum(_clear(folder) for folder, info in stores if real is None or (info and info.root == real))


def _stores(cache: Path) -> dict[Path, StoreInfo | None]:
    """The folder of every store; None if its index cannot be read."""
    with explained(cache):
        return {lock.parent: _info(lock.parent) for lock in (cache / "pixels").glob(f"*/{STORE_LOCK}")}


def _info(folder: Path) -> StoreInfo | None:
    if not (folder / INDEX).exists():
        return None
    with suppress(sqlite3.Error), closing(sqlite3.connect(folder / INDEX)) as index:
        for root, size in index.execute("SELECT root, size FROM store"):
            (images,) = index.execute("SELECT count(*) FROM images").fetchone()
            used = datetime.fromtimestamp((folder / STORE_LOCK).stat().st_mtime)
            return StoreInfo(Path(os.fsdecode(root)), int(size), images, _content_bytes(folder), used)
    return None


def _clear(folder: Path) -> int:
    """Delete only the files of a store, by name, since the cache may be any folder of the user."""
    if (lock := _try_lock(folder)) is None:
        return 0
    with lock:
        freed = _content_bytes(folder)
        for name in CONTENT:
            (folder / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError, PermissionError):  # Windows: the file is open, and stays
            (folder / STORE_LOCK).unlink()  # last and still held, so that nobody starts a new store before
    with suppress(OSError):  # not empty: it has files of the user, or a new store
        folder.rmdir()
    return freed


def _locked(folder: Path, disk: Callable[[], AbstractContextManager], screen: Screen, name: str) -> Lock:
    """The store's lock; closing it, or the end of the process, releases it."""
    with disk():
        lock = _try_lock(folder)
    if lock is None:
        screen.say(f"Waiting for another run to decode the {name} images.")
    while lock is None:
        time.sleep(LOCK_POLL_SECONDS)
        with disk():
            lock = _try_lock(folder)
    return lock


def _try_lock(folder: Path) -> Lock | None:
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another process has just deleted it
        if (lock := try_lock(folder / STORE_LOCK)) is not None:
            os.utime(folder / STORE_LOCK)
        return lock
    return None


@contextmanager
def explained(cache: Path, need: int = 0) -> Iterator[None]:
    """Explain errors of the file system. Wrap only access to the store: a closed terminal is not a full disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if is_disk_full(error) or "disk is full" in str(error):
            full = f"The disk of the cache folder {cache} is too full: the decoded images need {need / 1e9:.3g} GB"
            advice = "free some space there, use a folder on a larger disk with --cache DIR, or use --pixels stream"
            raise DiskFull("cache-full", f"{full}; {advice}.") from error
        cause = (isinstance(error, OSError) and error.strerror) or error
        problem = f"The cache folder {cache} cannot be used ({cause})"
        raise DeviceError("cache-unusable", f"{problem}; use another one with --cache DIR.") from error


def image_bytes(size: int) -> int:
    """Bytes on disk per image."""
    return size * size * 3


def store_folder(cache: Path, root: Path, size: int) -> Path:
    """The folder of a store; one of another format has another name."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(root)) + f"\0{size}\0{FORMAT}".encode()).hexdigest()
    return cache / "pixels" / name[:16]


def _bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _content_bytes(folder: Path) -> int:
    return sum(_bytes(folder / name) for name in CONTENT)
