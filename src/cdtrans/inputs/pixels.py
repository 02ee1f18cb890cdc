"""Decode once: the resized images of a folder as uint8 rows of a memory-mapped file that later runs share."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from cdtrans.errors import counted
from cdtrans.inputs.store import (
    Entry,
    ImageFile,
    Result,
    Row,
    Store,
    check_space,
    explained,
    image_bytes,
    lock_store,
    store_folder,
)
from cdtrans.inputs.stream import make_in_order
from cdtrans.inputs.thumbnails import trace
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen

RESIZE_RATIO = 256 / 224  # the authors' resize to crop
CHUNK_IMAGES = 64  # written at a time; a kill loses at most two chunks, and memory holds at most two


@dataclass(frozen=True)
class Pixels:
    """Decoded images: `array[rows[n]]` is the n-th file, unless `bad[n]` says why it cannot be read."""

    array: np.ndarray  # uint8 [rows of the store, size, size, 3], a read-only memory map
    thumbnails: np.ndarray  # uint8 [rows of the store, SIDE, SIDE, 3], likewise
    rows: np.ndarray  # int64 [N], -1 where the file could not be read
    digests: list[str]  # [N] of the pixels, '' for unreadable files
    bad: dict[int, str]  # position -> cause


def resize_for(crop: int) -> int:
    """The size that images are decoded to for this crop, unless `--resize` is set."""
    return round(crop * RESIZE_RATIO)


def default_cache() -> Path:
    """The folder of the stores, unless `--cache` is set."""
    if own := os.environ.get("CDTRANS_CACHE"):
        return Path(own).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("cdtrans", appauthor=False)


def open_pixels(
    files: Sequence[Path],
    *,
    root: Path,
    size: int,
    cache: Path,
    screen: Screen,
    name: str,
    workers: int | None = None,
    verify: bool = True,
) -> Pixels:
    """Decode new and changed `files` into the store of `root` at `size`, and open it. With `verify`, what was decoded
    earlier is compared with its digests, and decoded again where it is damaged."""
    keys = _keys(files, root)
    images, gone = _look_at(dict(zip(keys, files, strict=True)))
    damaged: set[int] = set()
    while True:
        store, old = _fill(images, damaged, root, size, cache, screen, name, workers)
        found = _verify(store, old, screen, name, workers) if verify else set()
        if not found:
            break
        are = counted(len(found), f"{name} image is", f"{name} images are")
        screen.warn(f"{are} damaged in the cache {cache} and will be decoded again.")
        damaged |= found
    with explained(cache):
        array, thumbnails = store.pixels(), store.thumbnails()
    entries = store.entries | gone
    bad = {n: entries[key].cause for n, key in enumerate(keys) if entries[key].row < 0}
    rows = np.array([entries[key].row for key in keys], dtype=np.int64)
    return Pixels(array, thumbnails, rows, [entries[key].digest for key in keys], bad)


def _fill(
    images: list[ImageFile],
    damaged: set[int],
    root: Path,
    size: int,
    cache: Path,
    screen: Screen,
    name: str,
    workers: int | None,
) -> tuple[Store, list[Entry]]:
    """The store with all images in it, and the entries of those that were in it before."""
    folder, need = store_folder(cache, root, size), len(images) * image_bytes(size)
    disk = partial(explained, cache, need)
    with lock_store(folder, disk, waiting=lambda: screen.say(f"Waiting for another run to decode the {name} images.")):
        with disk():
            store = Store.open(folder, root, size)
            held = {image.key for image in images if store.holds(image)}
            held -= {key for key in held if store.entries[key].row in damaged}
            todo = [image for image in images if image.key not in held]
            check_space(cache, len(todo) * image_bytes(size))
        if todo:
            with screen.track(f"decode {name}", total=len(images), done=len(images) - len(todo)) as task:
                began, done = time.monotonic(), 0
                for chunk in _decoded(todo, size, workers):
                    with disk():
                        store.append(chunk)
                    done += len(chunk)
                    task.advance(len(chunk), f"{done / (time.monotonic() - began):.0f} images/s")
    return store, [store.entries[key] for key in held if store.entries[key].row >= 0]


def _verify(store: Store, entries: list[Entry], screen: Screen, name: str, workers: int | None) -> set[int]:
    """The rows of the entries that are damaged. Outside the lock: rows never change, and ranks verify side by side. It
    takes a core 0.4 ms an image at size 256, and reads what the training reads anyway."""
    if not entries:
        return set()
    workers = workers or processor_count()
    entries.sort(key=lambda entry: entry.row)
    chunks = [entries[n : n + CHUNK_IMAGES] for n in range(0, len(entries), CHUNK_IMAGES)]
    damaged: set[int] = set()
    with screen.track(f"verify {name}", len(entries)) as task, ThreadPoolExecutor(workers) as pool:
        for chunk, found in zip(chunks, pool.map(store.damaged, chunks), strict=True):
            damaged |= found
            task.advance(len(chunk))
    return damaged


def _keys(files: Sequence[Path], root: Path) -> list[str]:
    """Paths below the root are relative to it, so that all spellings of the root share a store; others are absolute."""
    here, prefix = os.getcwd(), f"{root.absolute()}{os.sep}"
    return [os.path.join(here, file).removeprefix(prefix) for file in files]


def _look_at(paths: dict[str, Path]) -> tuple[list[ImageFile], dict[str, Entry]]:
    """The files as they are now, and entries for those that cannot be found."""
    images, gone = [], {}
    for key, path in paths.items():
        try:
            stat = os.stat(path)
            images.append(ImageFile(key, path, stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            gone[key] = Entry(0, 0, row=-1, cause=str(error.strerror))
    return images, gone


def _decoded(todo: list[ImageFile], size: int, workers: int | None) -> Iterator[list[Result]]:
    """Chunks in the order of `todo`; the next one is decoded while the caller writes."""
    rows = (result for _, result in make_in_order((image.path for image in todo), size, _row, workers))
    results = zip(todo, rows, strict=True)
    while chunk := list(islice(results, CHUNK_IMAGES)):
        yield chunk


def _row(pixels: np.ndarray) -> Row:
    return Row(pixels, trace(pixels))
