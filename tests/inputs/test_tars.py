"""Images in tars: which members are images, and what becomes of tars that are damaged, cut short or no tars."""

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cdtrans.inputs.domains import find_tars, stream_images
from cdtrans.inputs.images import decode, resized
from cdtrans.inputs.stream import decode_in_order
from cdtrans.inputs.tars import TarMember, members
from support import add_member, error_says, make_tar
from tiny_task import draw


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
    *good, (path, bad), (_, empty) = decode_in_order(members(tmp_path / "s.tar"), 16)
    for file, (_, pixels) in zip(files, good, strict=True):
        np.testing.assert_array_equal(pixels, resized(decode(file), 16))
    assert path == tmp_path / "s.tar" / "bad.png"
    assert (str(bad), str(empty)) == ("truncated or damaged", "empty file")


def test_where_tars_are_found(tmp_path: Path) -> None:
    one, two = (
        make_tar(tmp_path / "t" / "1.tar", "a.jpg"),
        make_tar(tmp_path / "t" / "deep" / "2.tar", "b.jpg", "c.jpg"),
    )
    (tmp_path / "t" / "readme.txt").write_text("")
    (tmp_path / "list.txt").write_text("t/deep/2.tar\nt/1.tar\n")
    assert find_tars(one) == [one]
    assert find_tars(tmp_path / "t") == [one, two]
    assert find_tars(tmp_path / "list.txt") == [two, one]
    assert [image.path for image in stream_images(tmp_path / "t")] == [one / "a.jpg", two / "b.jpg", two / "c.jpg"]
    (tmp_path / "list.txt").write_text("t/deep/2.tar\nt/gone.tar\n")
    with error_says("gone.tar", "line 2"):
        find_tars(tmp_path / "list.txt")
    image = draw(tmp_path / "t" / "z.png", 0, 0)
    assert find_tars(tmp_path / "t") == [], "beside images, a tar is an archive of them"
    assert list(stream_images(tmp_path / "t")) == [image]
    assert find_tars(image) == []


def test_names_that_lead_out_of_the_tar_are_only_names(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "s.tar", "/etc/a.jpg", "../../b.jpg", "\x1b[31mred.jpg")
    assert [str(m.path) for m in members(tar)] == [f"{tar}/etc/a.jpg", f"{tar}/../../b.jpg", f"{tar}/\x1b[31mred.jpg"]
    assert all(m.read() == b"x" * 700 for m in members(tar))


def test_a_link_in_a_tar_is_no_image(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        add_member(tar, "a.jpg", b"x")
        add_member(tar, "b.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add_member(tar, "c.jpg", type=tarfile.LNKTYPE, linkname="a.jpg")
    assert [bool(m.problem) for m in members(tmp_path / "s.tar")] == [False, True, True]


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
    assert ("decompress" if kind == "compressed" else "damaged or truncated") in last.problem


def test_a_tar_that_disappears(tmp_path: Path) -> None:
    (gone,) = members(tmp_path / "gone.tar")
    assert "No such file" in gone.problem
