"""The store of decoded images: what it holds, what damages it, who shares it, and how it is listed and cleared."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from cdtrans.config import Config
from cdtrans.inputs import pixels, stream
from cdtrans.inputs.decode import decode_domain
from cdtrans.inputs.images import pixel_digest, thumbnails
from cdtrans.inputs.pixels import cache_folder, clear_stores, list_stores
from cdtrans.inputs.scan import UnlabelledDomain
from stores import SIZE, assert_right, draw, edit_index, expected, make_images, open_store, store_file
from support import Notes, raises

INDEX, PIXELS, LOCK = "index.sqlite", "pixels.u8", "lock"


def test_pixels_are_those_of_torchvisions_resize(files, cache):
    opened = open_store(files, cache)
    assert_right(opened, files)
    assert opened.array.dtype == np.uint8
    assert opened.rows.dtype == np.int64
    assert not opened.array.flags.writeable
    assert opened.array.nbytes == 10 * SIZE * SIZE * 3


def test_equal_images_have_equal_digests_whatever_their_names(files, cache, decoded):
    shutil.copy(files[3], files[0].with_name("zzz.png"))
    files.append(files[0].with_name("zzz.png"))
    opened = open_store(files, cache)
    assert opened.digests == tuple(pixel_digest(expected(file)) for file in files)
    assert opened.digests[10] == opened.digests[3]
    assert len(set(opened.digests)) == 10
    assert sorted(decoded) == [file.name for file in files]
    again = open_store(files[::-1], cache)
    assert (again.digests, again.rows.tolist()) == (opened.digests[::-1], opened.rows.tolist()[::-1])
    assert len(decoded) == len(files), "remembered in the store"


def test_streamed_images_have_the_traces_of_stored_ones(files, cache):
    domain = UnlabelledDomain(files[0].parent, tuple(file.name for file in files))
    files[1].write_bytes(b"")
    files[4].write_bytes(files[4].read_bytes()[:100])
    settings = Config(cache=str(cache), resize=SIZE, crop=SIZE)
    stored, streamed = (decode_domain(domain, replace(settings, pixels=p), Notes(), "") for p in ("store", "stream"))
    assert (stored.domain, stored.digests, stored.skipped) == (streamed.domain, streamed.digests, streamed.skipped)
    assert len(stored.skipped) == 2
    np.testing.assert_array_equal(stored.traces().thumbnails, streamed.traces().thumbnails)
    third = expected(stored.domain.files()[3])
    np.testing.assert_array_equal(stored.traces().thumbnails[3], thumbnails(third[None])[0])


def test_a_store_is_shared_by_all_spellings_of_its_root(files, cache, decoded, monkeypatch, tmp_path):
    open_store(files, cache)
    monkeypatch.chdir(files[0].parent)
    open_store([Path(file.name) for file in files], cache, root=Path("."))
    (tmp_path / "link").symlink_to(files[0].parent)
    open_store([tmp_path / "link" / file.name for file in files], cache, root=tmp_path / "link")
    assert len(decoded) == len(files)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_only_a_changed_file_is_decoded_again(files, cache, decoded, same_bytes):
    before = open_store(files, cache)
    decoded.clear()
    stat = files[3].stat()
    if not same_bytes:
        Image.new("RGB", (5, 5), "red").save(files[3])
    os.utime(files[3], ns=(stat.st_atime_ns, stat.st_mtime_ns + same_bytes))
    after = open_store(files, cache)
    assert decoded == [files[3].name]
    assert_right(after, files)
    assert before.rows[3] == 3
    assert after.rows[3] == 10
    assert_right(open_store(files, cache), files)
    assert decoded == [files[3].name]


def test_bad_files_have_no_row_and_are_tried_again(files, cache, decoded):
    files[1].write_bytes(b"")
    files[4].write_bytes(files[4].read_bytes()[:100])
    opened = open_store(files, cache)
    assert sorted(opened.bad) == [1, 4]
    assert opened.bad[1] == "empty file"
    assert opened.rows.tolist() == [0, -1, 1, 2, -1, 3, 4, 5, 6, 7]
    assert opened.array.nbytes == 8 * SIZE * SIZE * 3
    assert [digest == "" for digest in opened.digests] == [n in (1, 4) for n in range(10)]
    decoded.clear()
    draw(files[1], seed=77)
    files[2].unlink()
    mended = open_store(files, cache)
    assert decoded == [files[1].name, files[4].name]
    assert mended.rows.tolist() == [0, 8, -1, 2, -1, 3, 4, 5, 6, 7]
    assert mended.bad[2] == "No such file or directory"
    np.testing.assert_array_equal(mended.array[8], expected(files[1]))


def test_only_bad_files_and_no_files(files, cache):
    files[0].write_bytes(b"no image")
    assert open_store(files[:1], cache).array.shape == (0, SIZE, SIZE, 3)
    assert len(open_store([], cache, root=files[0].parent).rows) == 0


def test_files_that_are_listed_twice_lie_elsewhere_or_have_odd_names(files, cache, tmp_path, decoded):
    odd = [draw(tmp_path / name, seed=50 + n) for n, name in enumerate(["ü \n.png", os.fsdecode(b"\xff.png")])]
    listed = [*odd, files[0], odd[0]]
    for _ in range(2):
        opened = open_store(listed, cache, root=files[0].parent)
        assert_right(opened, listed)
        assert opened.rows.tolist() == [0, 1, 2, 0]
    assert len(decoded) == 3


# Damage


def test_an_index_of_another_program_or_cut_short_is_begun_anew(files, cache):
    whole = open_store(files, cache)
    index = store_file(cache, INDEX)
    sound = index.read_bytes()
    for damaged in (b"", b"no database", sound[:1000], sound[: len(sound) // 2], bytes(len(sound))):
        index.write_bytes(damaged)
        assert_right(open_store(files[5:], cache), files[5:])
        assert store_file(cache, PIXELS).stat().st_size == 5 * SIZE * SIZE * 3
        assert_right(whole, files)  # a map made before is not disturbed
        assert_right(open_store(files, cache), files)


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("store SET size = size + 1", {f"{n:03d}.png" for n in range(10)}),
        ("store SET root = 'elsewhere'", {f"{n:03d}.png" for n in range(10)}),
        *((f"images SET row = {row} WHERE row = 4", {"004.png"}) for row in (-1, 10, 10**15, "NULL", "'four'", 4.5)),
        ("images SET row = 3 WHERE row = 4", {"003.png", "004.png"}),
    ],
)
def test_a_wrong_index_is_noticed(files, cache, decoded, change, again):
    open_store(files, cache)
    edit_index(cache, f"UPDATE {change}")
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert set(decoded) == again


def test_no_flipped_bit_in_the_index_gives_wrong_pixels(files, cache):
    open_store(files, cache)
    index = store_file(cache, INDEX)
    sound, rng = index.read_bytes(), np.random.default_rng(0)
    used = [n for n, byte in enumerate(sound) if byte]
    for place in rng.choice(used, 60, replace=False):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.integers(8)
        index.write_bytes(damaged)
        assert_right(open_store(files, cache), files)
        index.write_bytes(sound)


def test_pixels_that_are_lost_or_changed_on_the_disk_are_decoded_again(files, cache, decoded):
    open_store(files, cache)
    for lost in (7, 0):
        os.truncate(store_file(cache, PIXELS), lost * SIZE * SIZE * 3 + 5)
        decoded.clear()
        assert_right(open_store(files, cache), files)
        assert sorted(decoded) == [file.name for file in files[lost:]]
    store_file(cache, PIXELS).unlink()
    assert_right(open_store(files, cache), files)
    rows, length = store_file(cache, PIXELS), SIZE * SIZE * 3
    content = bytearray(rows.read_bytes())
    content[3 * length : 5 * length] = bytes(2 * length)  # zeros
    content[-1] ^= 1  # one bit
    rows.write_bytes(content)
    decoded.clear()
    screen = Notes()
    assert_right(open_store(files, cache, screen=screen), files)
    assert set(decoded) == {"003.png", "004.png", "009.png"}
    assert screen.lines == [f"3 source images are damaged in the cache {cache} and will be decoded again."]
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert decoded == []


def test_growing_does_not_disturb_an_open_map(files, cache):
    before = open_store(files[:3], cache)
    draw(files[0], seed=99)
    open_store(files, cache)
    assert before.array.shape[0] == 3
    np.testing.assert_array_equal(before.array[1], expected(files[1]))


# Several processes, and their end


BUILDERS = """
import os, random, signal, sqlite3, sys, time
from pathlib import Path
from cdtrans.config import Config
from cdtrans.inputs import pixels, stream
from cdtrans.inputs.decode import decode_domain
from cdtrans.runtime.screen import Screen

root, cache, task = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
files = sorted(root.iterdir())
decode, fsync, pixels.CHUNK_IMAGES = stream.decode, os.fsync, 2
stream.processor_count = lambda: 1

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
        pixels.open_pixels(files, root=root, size=12, cache=cache, screen=Screen(), name="source")
        os._exit(0)
    return pid

def rows():
    return sum(file.stat().st_size // (12 * 12 * 3) for file in cache.glob("pixels/*/pixels.u8"))

if task == "kill":
    for _ in range(8):
        before, pid = rows(), build()
        while rows() < before + 6:
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
    printed = run_builders(tmp_path / "images", cache, "together")
    assert printed.count("Waiting for another run") == 2
    opened = open_store(files, cache)
    assert decoded == []
    assert opened.array.shape[0] == 60
    assert_right(opened, files)


# Errors of the disk


def test_too_little_space_is_an_error_before_decoding(files, cache, decoded, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with raises("cache-full"):
        open_store(files, cache, size=1024)
    assert decoded == []
    open_store(files[:1], cache, size=8)  # 192 bytes do fit


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_the_store_whole(files, cache, decoded, monkeypatch, code):
    calls: list[int] = []

    def fsync(file: int) -> None:
        calls.append(file)
        if len(calls) == 3:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pixels, "CHUNK_IMAGES", 2)
    monkeypatch.setattr(stream, "processor_count", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with raises("cache-full"):
            open_store(files, cache)
    decoded.clear()
    assert_right(open_store(files, cache), files)
    assert sorted(decoded) == [file.name for file in files[4:]]


def test_a_full_disk_of_the_pixels_or_the_index_is_one_sentence(files, cache, monkeypatch):
    open_store(files[:1], cache)
    store_file(cache, PIXELS).unlink()
    store_file(cache, INDEX).with_name(PIXELS).symlink_to("/dev/full")  # answers every write with ENOSPC
    with raises("cache-full"):
        open_store(files, cache)
    store_file(cache, PIXELS).unlink()
    real = pixels.Store.open

    def full(*arguments) -> pixels.Store:
        store = real(*arguments)
        store.index.execute("PRAGMA max_page_count = 1")
        return store

    many = make_images(files[0].parent, 200)
    with monkeypatch.context() as patch:
        patch.setattr(pixels.Store, "open", full)
        with raises("cache-full"):
            open_store(many, cache)
    assert_right(open_store(many, cache), many)


def test_a_cache_that_cannot_be_used(files, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with raises("cache-unusable"):
        open_store(files, tmp_path / "file")


# All stores


def test_list_and_clear(tmp_path, cache):
    first, second = make_images(tmp_path / "first", 3), make_images(tmp_path / "second", 2)
    assert list_stores(cache) == []
    opened = open_store(first, cache)
    open_store(first, cache, size=8)
    second[0].write_bytes(b"bad")
    open_store(second, cache)
    for lock in cache.glob("pixels/*/lock"):
        os.utime(lock, (1e9, 1e9))
    open_store(second, cache)
    assert list_stores(cache)[0].root == tmp_path / "second", "the last used is the first"
    assert list_stores(cache)[0].last_used.timestamp() == pytest.approx(time.time(), abs=60)
    stores = {(store.root, store.size): store for store in list_stores(cache)}
    assert {key: store.images for key, store in stores.items()} == {
        (tmp_path / "first", SIZE): 3,
        (tmp_path / "first", 8): 3,
        (tmp_path / "second", SIZE): 1,
    }
    assert stores[tmp_path / "first", SIZE].nbytes > 3 * SIZE * SIZE * 3

    freed = clear_stores(cache, tmp_path / "first")
    assert freed == stores[tmp_path / "first", SIZE].nbytes + stores[tmp_path / "first", 8].nbytes
    assert [store.root for store in list_stores(cache)] == [tmp_path / "second"]
    assert_right(opened, first)  # an open map outlives its file
    assert clear_stores(cache) == stores[tmp_path / "second", SIZE].nbytes
    assert list((cache / "pixels").iterdir()) == []


def test_clear_spares_what_is_not_ours_or_in_use(cache, files):
    open_store(files, cache)
    (cache / "pixels" / "holiday").mkdir()
    mine = [cache / "pixels" / "holiday" / INDEX, store_file(cache, LOCK).with_name("notes.txt")]
    for file in mine:
        file.write_text("mine")
    with store_file(cache, LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clear_stores(cache) == 0
    assert_right(open_store(files, cache), files)
    assert clear_stores(cache) > 0
    assert all(file.read_text() == "mine" for file in mine)


def test_clear_removes_a_store_that_cannot_be_read(cache, files):
    open_store(files, cache)
    store_file(cache, INDEX).write_bytes(b"damage")
    assert list_stores(cache) == []
    assert clear_stores(cache) == 10 * SIZE * SIZE * 3 + len("damage")


def test_a_store_cleared_while_waiting_is_begun_anew(cache, files, monkeypatch):
    """The lock that the waiting process gets may be of a file that is no longer there."""
    open_store(files, cache)
    real = fcntl.flock

    def cleared_just_before(lock, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        assert clear_stores(cache) > 0
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", cleared_just_before)
    assert_right(open_store(files, cache), files)
    assert len(list_stores(cache)) == 1


def test_clear_spares_the_lock_of_a_store_that_is_begun_right_after(cache, files, monkeypatch):
    """Without it, two processes could write to that store."""
    open_store(files, cache)
    file, release = store_file(cache, LOCK), FileLock.release

    def begun_right_after(lock: FileLock, force: bool) -> None:
        release(lock, force)
        file.write_text("of the next store")

    monkeypatch.setattr(FileLock, "release", begun_right_after)
    assert clear_stores(cache) > 0
    assert file.exists()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("CDTRANS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/cdtrans")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/cdtrans")
    monkeypatch.setenv("CDTRANS_CACHE", "~/here")
    assert cache_folder() == Path("/home/someone/here")
    assert cache_folder("given") == Path("given")
