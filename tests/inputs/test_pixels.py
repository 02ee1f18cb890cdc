import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdtrans.inputs import pixels, store, stream
from cdtrans.inputs.images import UnreadableImage, pixel_digest
from cdtrans.inputs.pixels import default_cache
from cdtrans.inputs.store import list_stores
from cdtrans.inputs.stream import StreamedPixels
from cdtrans.inputs.thumbnails import SIDE
from stores import SIZE, Notes, assert_right, draw, expected, make_images, open_store, store_file
from support import error_says


def test_pixels_are_those_of_torchvisions_resize(files, cache):
    opened = open_store(files, cache)
    assert_right(opened, files)
    assert opened.array.dtype == np.uint8
    assert opened.rows.dtype == np.int64
    assert not opened.array.flags.writeable
    assert opened.array.nbytes == 10 * SIZE * SIZE * 3


def test_digests_tell_pictures_apart_whatever_they_are_called(files, cache, decoded):
    shutil.copy(files[3], files[0].with_name("zzz.png"))
    files.append(files[0].with_name("zzz.png"))
    opened = open_store(files, cache)
    assert opened.digests == [pixel_digest(expected(file)) for file in files]
    assert opened.digests[10] == opened.digests[3]
    assert len(set(opened.digests)) == 10
    decoded.clear()
    assert open_store(files[::-1], cache).digests == opened.digests[::-1]  # remembered in the store
    assert decoded == []


def test_looking_at_every_file_gives_what_a_store_would(files, cache):
    files[1].write_bytes(b"")
    files[4].write_bytes(files[4].read_bytes()[:100])
    opened = open_store(files, cache)
    digests, thumbnails, bad = StreamedPixels(files, SIZE).look(Notes(), "source")
    assert (digests, bad) == (opened.digests, opened.bad)
    good = opened.rows >= 0
    np.testing.assert_array_equal(thumbnails[good], opened.thumbnails[opened.rows[good]])


def test_a_store_of_the_format_before_is_built_anew(files, cache, decoded):
    """It has no thumbnails."""
    open_store(files, cache)
    index = store_file(cache, "index.jsonl")
    header, *lines = [json.loads(line) for line in index.read_text().splitlines()]
    assert header["format"] == store.FORMAT == 3
    older = [header | {"format": 2}, *lines]
    index.write_text("".join(json.dumps(line) + "\n" for line in older))
    store_file(cache, "thumbnails.u8").unlink()
    decoded.clear()
    again = open_store(files, cache)
    assert_right(again, files)
    assert len(decoded) == 10


def test_second_open_decodes_nothing(files, cache, decoded):
    first = open_store(files, cache)
    assert sorted(decoded) == [file.name for file in files]
    again = open_store(files[::-1], cache)
    assert len(decoded) == len(files)
    assert again.rows.tolist() == first.rows.tolist()[::-1]


def test_a_store_is_shared_by_all_spellings_of_its_root(files, cache, decoded, monkeypatch, tmp_path):
    open_store(files, cache)
    monkeypatch.chdir(files[0].parent)
    open_store([Path(file.name) for file in files], cache, root=Path("."))
    (tmp_path / "link").symlink_to(files[0].parent)
    open_store([tmp_path / "link" / file.name for file in files], cache, root=tmp_path / "link")
    assert len(decoded) == len(files)


def test_each_size_has_its_own_store(files, cache):
    open_store(files, cache, size=8)
    assert open_store(files, cache).array.shape == (10, SIZE, SIZE, 3)
    assert open_store(files, cache, size=8).array.shape == (10, 8, 8, 3)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_only_a_changed_file_is_decoded_again(files, cache, decoded, same_bytes):
    before = open_store(files, cache)
    decoded.clear()
    if same_bytes:
        stat = files[3].stat()
        os.utime(files[3], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        stat = files[3].stat()
        Image.new("RGB", (5, 5), "red").save(files[3])
        os.utime(files[3], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = open_store(files, cache)
    assert decoded == [files[3].name]
    assert_right(after, files)
    assert before.rows[3] == 3
    assert after.rows[3] == 10
    assert_right(open_store(files, cache), files)
    assert decoded == [files[3].name]


def test_bad_files_are_remembered_until_they_change(files, cache, decoded):
    files[1].write_bytes(b"")
    files[4].write_bytes(files[4].read_bytes()[:100])
    opened = open_store(files, cache)
    assert sorted(opened.bad) == [1, 4]
    assert opened.bad[1] == "empty file"
    assert opened.rows.tolist() == [0, -1, 1, 2, -1, 3, 4, 5, 6, 7]
    assert opened.array.nbytes == 8 * SIZE * SIZE * 3
    assert [digest == "" for digest in opened.digests] == [n in (1, 4) for n in range(10)]
    decoded.clear()
    assert open_store(files, cache).bad == opened.bad
    assert decoded == []
    draw(files[1], seed=77)
    mended = open_store(files, cache)
    assert decoded == [files[1].name]
    assert mended.rows[1] == 8
    np.testing.assert_array_equal(mended.array[8], expected(files[1]))


def test_a_file_out_of_reach_is_tried_again(files, cache, monkeypatch):
    def out_of_reach(path: Path) -> Image.Image:
        raise UnreadableImage("no permission to read it") from PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "decode", out_of_reach)
        assert set(open_store(files, cache).bad.values()) == {"no permission to read it"}
    assert_right(open_store(files, cache), files)


def test_a_missing_file_is_bad_and_nothing_else_is(files, cache):
    open_store(files, cache)
    files[2].unlink()
    opened = open_store(files, cache)
    assert opened.bad == {2: "No such file or directory"}
    assert opened.rows[2] == -1
    assert_right(open_store(files[3:], cache), files[3:])


def test_only_bad_files_and_no_files(files, cache):
    files[0].write_bytes(b"no image")
    assert open_store(files[:1], cache).array.shape == (0, SIZE, SIZE, 3)
    assert len(open_store([], cache, root=files[0].parent).rows) == 0


def test_rows_follow_the_files_whichever_thread_is_first(files, cache, monkeypatch):
    real = stream.decode

    def last_first(path: Path) -> Image.Image:
        time.sleep(0.002 * (10 - int(path.stem)))
        return real(path)

    monkeypatch.setattr(stream, "decode", last_first)
    opened = open_store(files, cache, workers=10)
    assert opened.rows.tolist() == list(range(10))
    assert_right(opened, files)


def test_duplicates_share_a_row(files, cache, decoded):
    opened = open_store([files[0], files[1], files[0]], cache)
    assert opened.rows.tolist() == [0, 1, 0]
    assert len(decoded) == 2


def test_files_outside_the_root_and_odd_names(files, cache, tmp_path, decoded):
    odd = [draw(tmp_path / name, seed=50 + n) for n, name in enumerate(["ü \n.png", os.fsdecode(b"\xff.png")])]
    for _ in range(2):
        assert_right(open_store([*odd, files[0]], cache, root=files[0].parent), [*odd, files[0]])
    assert len(decoded) == 3


def test_a_bounded_number_of_images_is_decoded_ahead(tmp_path, cache, decoded, monkeypatch):
    files = make_images(tmp_path / "images", 40)
    ahead: list[int] = []
    real = store.Store.append

    def append(store, results) -> None:
        ahead.append(len(decoded) - store.rows)
        real(store, results)

    monkeypatch.setattr(pixels, "CHUNK_IMAGES", 8)
    monkeypatch.setattr(stream, "IN_FLIGHT_PER_WORKER", 4)
    monkeypatch.setattr(store.Store, "append", append)
    assert_right(open_store(files, cache, workers=2), files)
    assert len(ahead) == 5
    assert max(ahead) <= 16


# Damage


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_ignored(files, cache, decoded, kept):
    open_store(files[:5], cache)
    index = store_file(cache, "index.jsonl")
    *whole, last = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(whole) + last[:kept])
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert sorted(decoded) == [file.name for file in files[4:]]
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    assert [line["row"] for line in lines[1:]] == list(range(10))


def test_a_damaged_line_ends_the_index(files, cache, decoded):
    """What came after it would otherwise vouch for rows that are about to be overwritten."""
    open_store(files, cache)
    index = store_file(cache, "index.jsonl")
    lines = index.read_bytes().splitlines(keepends=True)
    lines[6] = bytes(len(lines[6]) - 1) + b"\n"
    index.write_bytes(b"".join(lines))
    open_store(files[9:], cache)
    assert [json.loads(line)["path"] for line in index.read_text().splitlines()[6:]] == ["009.png"]
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert sorted(decoded) == [file.name for file in files[5:9]]


@pytest.mark.parametrize(("name", "side"), [("pixels.u8", SIZE), ("thumbnails.u8", SIDE)])
def test_lost_rows_are_decoded_again(files, cache, decoded, name, side):
    open_store(files, cache)
    os.truncate(store_file(cache, name), 7 * side * side * 3 + 5)
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert sorted(decoded) == [file.name for file in files[7:]]


@pytest.mark.parametrize("name", ["pixels.u8", "thumbnails.u8"])
def test_a_deleted_file_of_rows_is_made_anew(files, cache, decoded, name):
    open_store(files, cache)
    store_file(cache, name).unlink()
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert sorted(decoded) == [file.name for file in files]


@pytest.mark.parametrize("header", [b"", b"{}\n", b"[]\n", b"\x00\xff\n", b'{"root": "/', b'{"format": 0}\n'])
def test_a_broken_or_foreign_header_begins_anew(files, cache, header):
    mapped = open_store(files, cache)
    index = store_file(cache, "index.jsonl")
    index.write_bytes(header + index.read_bytes().split(b"\n", 1)[1])
    assert_right(open_store(files[5:], cache), files[5:])
    assert store_file(cache, "pixels.u8").stat().st_size == 5 * SIZE * SIZE * 3
    assert store_file(cache, "thumbnails.u8").stat().st_size == 5 * SIDE * SIDE * 3
    assert_right(mapped, files)  # a map made before is not disturbed


def test_pixels_that_have_changed_on_the_disk_are_noticed_and_decoded_again(files, cache, decoded):
    open_store(files, cache)
    rows, length = store_file(cache, "pixels.u8"), SIZE * SIZE * 3
    content = bytearray(rows.read_bytes())
    content[3 * length : 5 * length] = bytes(2 * length)  # zeros
    content[-1] ^= 1  # one bit
    rows.write_bytes(content)
    decoded.clear()
    screen = Notes()
    assert_right(open_store(files, cache, screen=screen), files)
    assert set(decoded) == {"003.png", "004.png", "009.png"}
    assert screen.said == [f"3 source images are damaged in the cache {cache} and will be decoded again."]
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert decoded == []


def test_a_file_of_thumbnails_that_has_changed_is_noticed_too(files, cache):
    open_store(files, cache)
    thumbnails = store_file(cache, "thumbnails.u8")
    thumbnails.write_bytes(bytes(thumbnails.stat().st_size))
    assert_right(open_store(files, cache), files)


def test_a_store_of_another_size_or_root_than_its_header_says_begins_anew(files, cache, decoded):
    for before, after in ((b'"size": 12', b'"size": 11'), (b"images", b"smiles")):
        open_store(files, cache)
        index = store_file(cache, "index.jsonl")
        header, *lines = index.read_bytes().splitlines(keepends=True)
        assert before in header
        index.write_bytes(b"".join([header.replace(before, after), *lines]))
        decoded.clear()
        assert_right(open_store(files, cache), files)
        assert len(decoded) == len(files)


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"row": "4"},
        {"row": None},
        {"nbytes": [1]},
        {"path": 7},
        {"digest": 5},
        {"digest": "0"},
        {"row": 5.0},
    ],
)
def test_a_line_with_another_type_or_field_ends_the_index(files, cache, decoded, change):
    open_store(files, cache)
    index = store_file(cache, "index.jsonl")
    lines = index.read_bytes().splitlines(keepends=True)
    lines[5] = json.dumps(json.loads(lines[5]) | change).encode() + b"\n"
    index.write_bytes(b"".join(lines))
    assert list_stores(cache)
    assert_right(open_store(files, cache), files)


def test_growing_does_not_disturb_an_open_map(files, cache):
    before = open_store(files[:3], cache)
    draw(files[0], seed=99)
    open_store(files, cache)
    assert before.array.shape[0] == 3
    np.testing.assert_array_equal(before.array[1], expected(files[1]))


# Several processes, and their end


BUILDERS = """
import os, random, signal, sys, time
from pathlib import Path
from cdtrans.inputs import pixels, stream
from cdtrans.runtime.screen import Screen

root, cache, task = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
files = sorted(root.iterdir())
decode, fsync, pixels.CHUNK_IMAGES = stream.decode, os.fsync, 2

def slow_decode(path):
    time.sleep(0.003)
    return decode(path)

def slow_fsync(file):
    time.sleep(0.004)
    fsync(file)

def build():
    pid = os.fork()
    if pid == 0:
        stream.decode, os.fsync = slow_decode, slow_fsync
        pixels.open_pixels(files, root=root, size=12, cache=cache, screen=Screen(), name="source", workers=1)
        os._exit(0)
    return pid

def rows():
    return sum(index.read_bytes().count(b"row") for index in cache.glob("pixels/*/index.jsonl"))

if task == "kill":
    for _ in range(8):
        before, pid = rows(), build()
        while rows() < before + 2:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:  # it was faster than we are
            break
        print("killed")
else:
    for pid in [build() for _ in range(3)]:
        assert os.waitpid(pid, 0)[1] == 0
"""


def run_builders(root: Path, cache: Path, task: str) -> str:
    command = [sys.executable, "-c", BUILDERS, str(root), str(cache), task]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_builds_add_up_to_an_uninterrupted_one(tmp_path, cache, decoded):
    files = make_images(tmp_path / "images", 200)
    assert run_builders(tmp_path / "images", cache, "kill").count("killed") >= 4
    resumed = open_store(files, cache)
    assert len(decoded) <= 200 - 4 * 2  # every build had added to the one before
    whole = open_store(files, tmp_path / "other cache")
    assert resumed.rows.tolist() == whole.rows.tolist() == list(range(200))
    np.testing.assert_array_equal(resumed.array, whole.array)
    assert_right(resumed, files)


@pytest.mark.slow
def test_processes_side_by_side_build_one_store(tmp_path, cache, decoded):
    files = make_images(tmp_path / "images", 60)
    said = run_builders(tmp_path / "images", cache, "together")
    assert said.count("Waiting for another run") == 2
    opened = open_store(files, cache)
    assert decoded == []
    assert opened.array.shape[0] == 60
    assert_right(opened, files)


# What the disk may answer


def test_too_little_space_is_said_before_decoding(files, cache, decoded, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with error_says("0.0315 GB", str(cache), "--cache"):
        open_store(files, cache, size=1024)
    assert decoded == []
    open_store(files[:1], cache, size=8)  # 192 bytes do fit


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_the_store_whole(files, cache, decoded, monkeypatch, code):
    calls: list[int] = []

    def fsync(file: int) -> None:
        calls.append(file)
        if len(calls) == 5:  # two files for each chunk
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pixels, "CHUNK_IMAGES", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with error_says("full", str(cache)):
            open_store(files, cache, workers=1)
    decoded.clear()
    assert_right(open_store(files, cache, workers=1), files)
    assert sorted(decoded) == [file.name for file in files[4:]]


def test_a_real_write_error_is_one_sentence(files, cache):
    """/dev/full answers every write with ENOSPC."""
    open_store(files[:1], cache)
    store_file(cache, "pixels.u8").unlink()
    store_file(cache, "index.jsonl").with_name("pixels.u8").symlink_to("/dev/full")
    with error_says("full", str(cache)):
        open_store(files, cache)


def test_a_cache_that_cannot_be_used(files, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with error_says(f"{tmp_path / 'file'}", "cannot be used", "--cache"):
        open_store(files, tmp_path / "file")


def test_progress_only_when_there_is_something_to_decode_or_verify(files, cache):
    class Bars(Notes):
        def __init__(self) -> None:
            super().__init__()
            self.bars: list[tuple[str, int, int]] = []

        def track(self, description: str, total: int, done: int = 0):
            self.bars.append((description, total, done))
            return super().track(description, total, done)

    bars = Bars()
    open_store(files[:4], cache, screen=bars)
    open_store(files[:4], cache, screen=bars)
    open_store(files, cache, screen=bars)
    verify = ("verify source", 4, 0)
    assert bars.bars == [("decode source", 4, 0), verify, ("decode source", 10, 4), verify]
    assert bars.said == []


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("CDTRANS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == Path("/home/someone/.cache/cdtrans")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/xdg/cdtrans")
    monkeypatch.setenv("CDTRANS_CACHE", "~/here")
    assert default_cache() == Path("/home/someone/here")
