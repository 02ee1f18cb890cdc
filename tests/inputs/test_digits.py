"""The built-in task: its folders, the same bytes every time, and writes that were killed."""

import shutil
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits

from cdtrans.inputs import digits as digits_module
from cdtrans.inputs.digits import DONE, IMAGE_SIDE, Digits, write_digits

IMAGES = 60


pytestmark = pytest.mark.slow  # each writes thousands of images


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return write_digits(tmp_path_factory.mktemp("digits"), seed=0, images=IMAGES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def labelled(digits: Digits) -> list[tuple[Path, int]]:
    rows = (line.split() for line in digits.answers.read_text(encoding="utf-8").splitlines())
    return [(digits.answers.parent / path, int(label)) for path, label in rows]


def test_source_has_ten_equal_classes_of_grey_images(digits: Digits) -> None:
    paths = list(digits.source.glob("*/*.png"))
    assert Counter(path.parent.name for path in paths) == {str(digit): IMAGES // 10 for digit in range(10)}
    for path in paths:
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((IMAGE_SIDE, IMAGE_SIDE), "L")
            assert np.asarray(image).max() > 250, path


def test_every_font_draws_ten_different_digits() -> None:
    for font in digits_module.FONTS:
        glyphs = {digits_module._glyph(font, digit).tobytes() for digit in range(10)}
        assert len(glyphs) == 10, font


def test_a_font_that_matplotlib_lacks_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Path("fonts", "ttf", f"{digits_module.STAND_IN}.ttf")
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copy(Path(matplotlib.get_data_path(), name), tmp_path / name)
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    draw = digits_module._glyph.__wrapped__  # without its cache
    assert draw("cmti10", 3).tobytes() == draw(digits_module.STAND_IN, 3).tobytes()


def test_no_filter_has_the_size_that_crashes_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ImageFilter, "MaxFilter", lambda size: sizes.append(size) or ImageFilter.MedianFilter(3))
    write_digits(tmp_path, seed=0, images=IMAGES)
    assert set(sizes) == {3, 5, 7}


def test_target_is_flat_and_its_answers_are_those_of_the_scans(digits: Digits) -> None:
    assert sorted(path for path, _ in labelled(digits)) == sorted(digits.target.iterdir())
    scans = load_digits()
    pixels = (np.pad(scans.images, ((0, 0), (1, 1), (1, 1))) * 255 / 16).round().astype(np.uint8)
    enlarged = [
        Image.fromarray(image).resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).tobytes() for image in pixels
    ]
    written = [(Image.open(path).tobytes(), label) for path, label in labelled(digits)]
    assert sorted(written) == sorted(zip(enlarged, scans.target.tolist(), strict=True))
    assert [label for _, label in written] != scans.target.tolist()  # shuffled


def test_another_seed_gives_other_source_images_and_another_order(digits: Digits, tmp_path: Path) -> None:
    other = write_digits(tmp_path, seed=1, images=IMAGES)
    here, there = contents(digits.source), contents(other.source)
    assert here.keys() == there.keys()
    assert all(here[name] != there[name] for name in here)
    assert contents(digits.target) != contents(other.target)
    assert sorted(contents(digits.target).values()) == sorted(contents(other.target).values())


def test_a_complete_folder_is_left_alone_and_one_of_another_task_replaced(digits: Digits, tmp_path: Path) -> None:
    write_digits(tmp_path, seed=1, images=IMAGES + 20)
    assert write_digits(tmp_path, seed=0, images=IMAGES).source == tmp_path / "source"
    assert contents(tmp_path) == contents(digits.answers.parent)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    write_digits(tmp_path, seed=0, images=IMAGES)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == before


@pytest.mark.parametrize("saved_before_the_kill", [0, 25, IMAGES + 1000])
def test_a_killed_write_is_completed(
    digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before_the_kill: int
) -> None:
    save, saved = digits_module._save, 0

    def save_until_killed(image: Image.Image, path: Path) -> None:
        nonlocal saved
        if saved == saved_before_the_kill:
            path.write_bytes(b"\x89PNG half a fi")
            raise KeyboardInterrupt
        save(image, path)
        saved += 1

    monkeypatch.setattr(digits_module, "_save", save_until_killed)
    with pytest.raises(KeyboardInterrupt):
        write_digits(tmp_path, seed=0, images=IMAGES)
    assert not (tmp_path / DONE).exists()

    monkeypatch.setattr(digits_module, "_save", save)
    write_digits(tmp_path, seed=0, images=IMAGES)
    assert contents(tmp_path) == contents(digits.answers.parent)
