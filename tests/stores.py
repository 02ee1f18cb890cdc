"""Small stores of decoded images."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import Resize

from cdtrans.inputs.pixels import StoredPixels, open_pixels
from support import Notes

SIZE = 12


def make_images(root: Path, count: int) -> list[Path]:
    root.mkdir(parents=True, exist_ok=True)
    return [draw(root / f"{n:03d}.png", seed=n) for n in range(count)]


def draw(file: Path, seed: int) -> Path:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (19, 23, 3), np.uint8)).save(file)
    return file


def expected(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(Resize((SIZE, SIZE))(image.convert("RGB")))


def open_store(files: list[Path], cache: Path, *, root: Path | None = None, **options) -> StoredPixels:
    options = {"size": SIZE, "screen": Notes(), "name": "source"} | options
    return open_pixels(files, root=root or files[0].parent, cache=cache, **options)


def assert_right(opened: StoredPixels, files: list[Path]) -> None:
    assert not opened.bad
    for row, file in zip(opened.rows, files, strict=True):
        np.testing.assert_array_equal(opened.array[row], expected(file), err_msg=file.name)


def store_file(cache: Path, name: str) -> Path:
    (file,) = cache.glob(f"pixels/*/{name}")
    return file


def edit_index(cache: Path, statement: str, *values: object) -> list[tuple]:
    """The result of an SQL statement on the only store's index."""
    with closing(sqlite3.connect(store_file(cache, "index.sqlite"))) as index, index:
        return index.execute(statement, values).fetchall()
