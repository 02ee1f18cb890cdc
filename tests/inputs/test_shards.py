"""Images cut into chunks: all of them, in order, and recognised when they or their place have changed."""

import os
from pathlib import Path

import pytest

from cdtrans.inputs import shards as module
from cdtrans.inputs.shards import chunks, find_shards, share
from support import make_tar


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)


def folder(tmp_path: Path, count: int) -> Path:
    for n in range(count):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{n:02}.png").write_bytes(b"x")
    return tmp_path / "images"


def digests(where: Path) -> list[str]:
    return [chunk.digest for chunk in chunks(find_shards(where, None), 0)]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])])
def test_every_image_is_in_one_chunk(tmp_path: Path, count: int, sizes: list[int]) -> None:
    cut = list(chunks(find_shards(folder(tmp_path, count), None), 0))
    assert [len(chunk.images) for chunk in cut] == sizes
    assert [image.name for chunk in cut for image in chunk.images] == [f"{n:02}.png" for n in range(count)]
    assert [chunk.number for chunk in cut] == list(range(len(sizes)))
    assert [chunk.last for chunk in cut] == [False] * (len(sizes) - 1) + [True]
    for processes in (1, 2, 3):
        assert share(count, processes) == sum(sizes[::processes])


def test_a_chunk_is_another_when_its_images_change(tmp_path: Path) -> None:
    images = folder(tmp_path, 11)
    before = digests(images)
    assert digests(images) == before
    (images / "05.png").write_bytes(b"longer")
    assert [a == b for a, b in zip(before, digests(images), strict=True)] == [True, False, True]
    (images / "05.png").write_bytes(b"x")
    os.utime(images / "05.png", ns=(0, 0))
    assert [a == b for a, b in zip(before, digests(images), strict=True)] == [True, False, True]
    (images / "00.png").rename(images / "00a.png")
    assert digests(images)[0] != before[0]


def test_a_chunk_that_is_no_longer_the_last_is_another(tmp_path: Path) -> None:
    """Else a resumed command would end there."""
    images = folder(tmp_path, 8)
    first, last = digests(images)
    (images / "99.png").write_bytes(b"x")
    after = digests(images)
    assert (after[0], len(after)) == (first, 3)
    assert after[1] != last


def test_the_chunks_of_tars(tmp_path: Path) -> None:
    make_tar(tmp_path / "t" / "a.tar", *(f"{n}.jpg" for n in range(5)))
    make_tar(tmp_path / "t" / "b.tar", "x.txt")
    found = find_shards(tmp_path / "t", None)
    assert [[len(chunk.images) for chunk in chunks(found, place)] for place in (0, 1)] == [[4, 1], [0]]
    before = [chunk.digest for place in (0, 1) for chunk in chunks(found, place)]
    assert len(set(before)) == 3
    make_tar(tmp_path / "t" / "a.tar", *(f"{n}.jpg" for n in range(9)))
    after = [chunk.digest for place in (0, 1) for chunk in chunks(found, place)]
    assert (after[0] != before[0], after[1] != before[1], after[-1] == before[-1]) == (True, True, True)
