"""Stores of decoded images in the small, for the tests of data/pixels.py and data/store.py."""

from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import Resize

from cdtrans.inputs import pixels
from cdtrans.inputs.pixels import open_pixels
from cdtrans.inputs.thumbnails import thumbnail
from cdtrans.runtime.screen import Screen

SIZE = 12


class Notes(Screen):
    """A screen that remembers what it said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    warn = say


def make_images(root: Path, count: int) -> list[Path]:
    root.mkdir(parents=True, exist_ok=True)
    return [draw(root / f"{n:03d}.png", seed=n) for n in range(count)]


def draw(file: Path, seed: int) -> Path:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (19, 23, 3), np.uint8)).save(file)
    return file


def expected(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(Resize((SIZE, SIZE))(image.convert("RGB")))


def open_store(files: list[Path], cache: Path, *, root: Path | None = None, **options) -> pixels.Pixels:
    options = {"size": SIZE, "screen": Notes(), "name": "source"} | options
    return open_pixels(files, root=root or files[0].parent, cache=cache, **options)


def assert_right(opened: pixels.Pixels, files: list[Path]) -> None:
    assert not opened.bad
    for row, file in zip(opened.rows, files, strict=True):
        np.testing.assert_array_equal(opened.array[row], expected(file), err_msg=file.name)
        np.testing.assert_array_equal(opened.thumbnails[row], thumbnail(expected(file)), err_msg=file.name)


def store_file(cache: Path, name: str) -> Path:
    (file,) = cache.glob(f"pixels/*/{name}")
    return file
