"""Images decoded in parallel, handed on in order, few at a time."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cdtrans.inputs.stream as stream
from cdtrans.inputs.images import UnreadableImage, decode, resized
from cdtrans.inputs.stream import IN_FLIGHT_PER_WORKER, decode_batches, decode_in_order

SIZE = 6


def picture(level: int) -> Image.Image:
    return Image.new("RGB", (9, 7), (level, level, level))


def levels(results: Iterator[stream.Decoded]) -> list[int]:
    return [int(pixels[0, 0, 0]) for _, pixels in results]


def test_files_come_back_in_order_with_their_paths_and_resized_pixels(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.png" for n in (3, 1, 2)]
    for n, file in enumerate(files):
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (9, 7, 3), np.uint8)).save(file)
    results = list(decode_in_order([files[0], str(files[1]), files[2]], SIZE))
    assert [path for path, _ in results] == files
    for file, (_, pixels) in zip(files, results, strict=True):
        assert pixels.shape == (SIZE, SIZE, 3)
        np.testing.assert_array_equal(pixels, resized(decode(file), SIZE))


def test_the_order_is_kept_when_the_first_is_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(image: Image.Image, size: int) -> np.ndarray:
        time.sleep(0.05 if image.getpixel((0, 0))[0] % 4 == 0 else 0)
        return resized(image, size)

    monkeypatch.setattr(stream, "resized", slow)
    assert levels(decode_in_order([picture(n) for n in range(24)], SIZE, workers=4)) == list(range(24))


def test_no_more_than_a_few_are_taken_ahead() -> None:
    """Even from a source without end."""
    taken = itertools.count()
    results = decode_in_order((picture(next(taken) % 256) for _ in itertools.repeat(None)), SIZE, workers=2)
    assert levels(itertools.islice(results, 50)) == list(range(50))
    results.close()
    assert next(taken) <= 50 + 2 * IN_FLIGHT_PER_WORKER


def test_stopping_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    results = decode_in_order((picture(1) for _ in range(1000)), SIZE, workers=3)
    next(results)
    assert threading.active_count() > before
    results.close()
    assert threading.active_count() == before


def test_an_unreadable_file_is_a_result_and_not_the_end(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    picture(5).save(good)
    bad.write_bytes(b"")
    (first, pixels), (second, error), (third, _) = decode_in_order([good, bad, good], SIZE)
    assert (first, second, third) == (good, bad, good)
    assert isinstance(pixels, np.ndarray)
    assert isinstance(error, UnreadableImage)
    assert str(error) == "empty file"


def test_an_error_of_the_source_comes_through() -> None:
    def broken() -> Iterator[Image.Image]:
        yield picture(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        list(decode_in_order(broken(), SIZE))


@pytest.mark.parametrize("kind", ["alpha", "16 bit", "palette", "grey", "turned"])
def test_an_image_of_pil_s_gives_the_pixels_of_its_file(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    options = {}
    if kind == "alpha":
        image = Image.fromarray(rng.integers(0, 256, (9, 7, 4), np.uint8))
    elif kind == "16 bit":
        image = Image.fromarray(rng.integers(0, 65536, (9, 7), np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8))
    if kind == "palette":
        image = image.quantize(16)
    if kind == "grey":
        image = image.convert("L")
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        options = {"exif": exif}
    file = tmp_path / "image.png"
    image.save(file, **options)
    with Image.open(file) as opened:
        ((path, from_image),) = decode_in_order([opened], SIZE)
        ((_, from_file),) = decode_in_order([file], SIZE)
    assert path is None
    np.testing.assert_array_equal(from_image, from_file)
    assert len(np.unique(from_file)) > 10


def test_nothing_in_nothing_out() -> None:
    assert list(decode_in_order([], SIZE)) == []


class TestBatches:
    def test_they_keep_their_order_and_say_what_cannot_be_read(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.png"
        bad.write_bytes(b"")
        batches = [[picture(1), bad, picture(2)], [bad], [picture(3)]]
        found = list(decode_batches(batches, SIZE, lambda shape: np.full(shape, 99, np.uint8)))
        assert [batch.paths for batch in found] == [[None, bad, None], [bad], [None]]
        assert [batch.pixels[:, 0, 0, 0].tolist() for batch in found] == [[1, 2], [], [3]]
        assert [batch.problems for batch in found] == [{1: "empty file"}, {0: "empty file"}, {}]

    def test_a_few_are_decoded_ahead_and_no_thread_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even from a source without end."""
        monkeypatch.setattr(stream, "processor_share", lambda: 2)
        before, taken = threading.active_count(), itertools.count()
        batches = ([picture(next(taken) % 256) for _ in range(4)] for _ in itertools.repeat(None))
        found = decode_batches(batches, SIZE, lambda shape: np.empty(shape, np.uint8))
        for n in range(30):
            assert next(found).pixels[:, 0, 0, 0].tolist() == [4 * n + k for k in range(4)]
        found.close()
        ahead = next(taken) - 4 * 30
        assert 2 * IN_FLIGHT_PER_WORKER <= ahead <= 2 * IN_FLIGHT_PER_WORKER + 4
        assert threading.active_count() == before
