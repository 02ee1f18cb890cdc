"""Images decoded in parallel, in order and few at a time; and those in tars, damaged or not."""

import gzip
import itertools
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cdtrans.inputs.stream as stream
from cdtrans.inputs.images import decode, resized
from cdtrans.inputs.scan import find_tars, stream_images
from cdtrans.inputs.stream import IN_FLIGHT_PER_WORKER, TarMember, decode_batches, decode_in_order, members
from support import add_member, make_tar, raises
from tiny_task import draw

SIZE = 6


def plain(level: int) -> Image.Image:
    return Image.new("RGB", (9, 7), (level, level, level))


def levels(results: Iterator[np.ndarray]) -> list[int]:
    return [int(pixels[0, 0, 0]) for pixels in results]


def test_the_order_is_kept_when_the_first_is_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(image: Image.Image, size: int) -> np.ndarray:
        time.sleep(0.05 if image.getpixel((0, 0))[0] % 4 == 0 else 0)
        return resized(image, size)

    monkeypatch.setattr(stream, "resized", slow)
    monkeypatch.setattr(stream, "processor_count", lambda: 4)
    assert levels(decode_in_order([plain(n) for n in range(24)], SIZE, np.asarray)) == list(range(24))


def test_special_files_are_unreadable_and_never_opened(tmp_path: Path) -> None:
    """A reader would wait forever: nobody writes to the pipe, and the device never ends."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    errors = decode_in_order(stream_images(tmp_path), SIZE, np.asarray)
    assert [str(error) for error in errors] == ["a pipe, device or other special file"] * 2


def test_an_image_of_pil_s_gives_the_pixels_of_its_file(tmp_path: Path) -> None:
    """With alpha, 16 bits, a palette, in grey and in colour; all of them turned."""
    rng, file, exif = np.random.default_rng(0), tmp_path / "image.png", Image.Exif()
    exif[0x0112] = 6
    alpha = Image.fromarray(rng.integers(0, 256, (9, 7, 4), np.uint8))
    deep, colour = Image.fromarray(rng.integers(0, 65536, (9, 7), np.uint16)), alpha.convert("RGB")
    for image in (alpha, deep, colour.quantize(16), alpha.convert("L"), colour):
        image.save(file, exif=exif)
        with Image.open(file) as opened:
            from_image, from_file = decode_in_order([opened, str(file)], SIZE, np.asarray)
        np.testing.assert_array_equal(from_image, from_file)
        assert len(np.unique(from_file)) > 10


class TestBatches:
    def test_they_keep_their_order_and_say_what_cannot_be_read(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.png"
        bad.write_bytes(b"")
        batches = [[plain(1), bad, plain(2)], [bad], [plain(3)]]
        decoded = list(decode_batches(batches, SIZE, lambda shape: np.full(shape, 99, np.uint8)))
        assert [batch.paths for batch in decoded] == [[None, bad, None], [bad], [None]]
        assert [batch.pixels[:, 0, 0, 0].tolist() for batch in decoded] == [[1, 2], [], [3]]
        assert [batch.problems for batch in decoded] == [{1: "empty file"}, {0: "empty file"}, {}]

    def test_a_few_are_decoded_ahead_and_no_thread_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even from a source without end."""
        monkeypatch.setattr(stream, "processor_count", lambda: 2)
        before, taken = threading.active_count(), itertools.count()
        batches = ([plain(next(taken) % 256) for _ in range(4)] for _ in itertools.repeat(None))
        decoded = decode_batches(batches, SIZE, lambda shape: np.empty(shape, np.uint8))
        for n in range(30):
            assert next(decoded).pixels[:, 0, 0, 0].tolist() == [4 * n + k for k in range(4)]
        decoded.close()
        ahead = next(taken) - 4 * 30
        assert 2 * IN_FLIGHT_PER_WORKER <= ahead <= 2 * IN_FLIGHT_PER_WORKER + 4
        assert threading.active_count() <= before  # threads of earlier tests may have ended meanwhile


# Tars


def names(tar: Path) -> list[str]:
    return [str(member.path.relative_to(tar)) for member in members(tar)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_images_of_a_tar_in_its_order(tmp_path: Path, form: int) -> None:
    long = "deep/" * 25 + "x.jpeg"
    listed = ["b.jpg", "b.cls", "b.json", "a/c.PNG", "a/c.txt", "._b.jpg", "__MACOSX/a/c.PNG", "./d.jpg", long]
    tar = make_tar(tmp_path / "s.tar", *listed, form=form)
    with tarfile.open(tar, "a", format=form) as more:
        add_member(more, "folder.jpg", type=tarfile.DIRTYPE)
    assert names(tar) == ["b.jpg", "a/c.PNG", "d.jpg", long]


def test_a_member_has_the_pixels_of_the_file(tmp_path: Path) -> None:
    files = [draw(tmp_path / f"{n}.png", n, seed=n) for n in range(3)]
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for file in files:
            add_member(tar, file.name, file.read_bytes())
            add_member(tar, f"{file.stem}.cls", b"2")
        add_member(tar, "bad.png", b"\x89PNG cut short")
        add_member(tar, "empty.png")
    *good, bad, empty = decode_in_order(members(tmp_path / "s.tar"), 16, np.asarray)
    for file, pixels in zip(files, good, strict=True):
        np.testing.assert_array_equal(pixels, resized(decode(file), 16))
    assert (str(bad), str(empty)) == ("truncated or damaged", "empty file")


def test_where_tars_are_found(tmp_path: Path) -> None:
    one = make_tar(tmp_path / "t" / "1.tar", "a.jpg")
    two = make_tar(tmp_path / "t" / "deep" / "2.tar", "b.jpg", "c.jpg")
    (tmp_path / "t" / "readme.txt").write_text("")
    (tmp_path / "list.txt").write_text("t/deep/2.tar\nt/1.tar\n")
    assert find_tars(one) == [one]
    assert find_tars(tmp_path / "t") == [one, two]
    assert find_tars(tmp_path / "list.txt") == [two, one]
    assert [image.path for image in stream_images(tmp_path / "t")] == [one / "a.jpg", two / "b.jpg", two / "c.jpg"]
    (tmp_path / "list.txt").write_text("t/deep/2.tar\nt/gone.tar\n")
    with raises("listed-file-missing"):
        find_tars(tmp_path / "list.txt")
    image = draw(tmp_path / "t" / "z.png", 0, 0)
    assert find_tars(tmp_path / "t") == [], "beside images, a tar is an archive of them"
    assert list(stream_images(tmp_path / "t")) == [image]
    assert find_tars(image) == []


def test_links_and_names_that_lead_out_of_the_tar_are_not_followed(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "s.tar", "/etc/a.jpg", "../../b.jpg", "\x1b[31mred.jpg")
    with tarfile.open(tar, "a") as more:
        add_member(more, "b.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add_member(more, "c.jpg", type=tarfile.LNKTYPE, linkname="/etc/a.jpg")
    *files, symbolic, hard = members(tar)
    assert [str(m.path) for m in files] == [f"{tar}/etc/a.jpg", f"{tar}/../../b.jpg", f"{tar}/\x1b[31mred.jpg"]
    assert all(m.read() == b"x" * 700 for m in files)
    assert symbolic.problem == hard.problem == "a link or another special file in the tar"


BLOCK = tarfile.BLOCKSIZE
EACH = 3 * BLOCK  # a header, and 700 bytes in two blocks
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], int]] = {  # -> the images before the damage
    "within an image": (lambda all_: all_[: 3 * EACH - BLOCK], 2),
    "within a header": (lambda all_: all_[: 2 * EACH + 100], 2),
    "at the end of an image": (lambda all_: all_[: 4 * EACH], 4),
    "a wrong header": (lambda all_: all_[: 2 * EACH] + b"\xff" * BLOCK + all_[2 * EACH + BLOCK :], 2),
    "no tar": (lambda all_: b"words\n" * 500, 0),
    "empty": (lambda all_: b"", 0),
    "another tar behind it": (lambda all_: all_ + all_, 4),
    "compressed": (gzip.compress, 0),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_what_comes_before_it_is_kept(tmp_path: Path, kind: str) -> None:
    damage, kept = DAMAGE[kind]
    tar = make_tar(tmp_path / "s.tar", *(f"{n}.jpg" for n in range(4)), form=tarfile.USTAR_FORMAT)
    assert [m.problem for m in members(tar)] == [""] * 4
    tar.write_bytes(damage(tar.read_bytes()))
    *good, last = members(tar)
    assert [m.path.name for m in good] == [f"{n}.jpg" for n in range(kept)]
    assert not any(m.problem for m in good)
    assert last == TarMember(tar, tar, problem=last.problem)
    assert [("No such file" in m.problem) for m in members(tmp_path / "gone.tar")] == [True]
    assert ("decompress" if kind == "compressed" else "damaged or truncated") in last.problem
