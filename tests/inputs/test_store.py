"""The cache as a whole: what is listed, what is cleared, and who holds a store."""

import fcntl
import os
import time

import pytest

from cdtrans.inputs.store import clear_stores, list_stores
from cdtrans.inputs.thumbnails import SIDE
from cdtrans.runtime.locks import Lock
from stores import SIZE, assert_right, make_images, open_store, store_file


def test_list_and_clear(tmp_path, cache):
    first, second = make_images(tmp_path / "first", 3), make_images(tmp_path / "second", 2)
    assert list_stores(cache) == []
    opened = open_store(first, cache)
    open_store(first, cache, size=8)
    second[0].write_bytes(b"bad")
    open_store(second, cache)
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
    assert_right(opened, first)  # whoever has it open keeps it
    assert clear_stores(cache) == stores[tmp_path / "second", SIZE].nbytes
    assert list((cache / "pixels").iterdir()) == []


def test_the_store_used_last_is_listed_first(tmp_path, cache):
    first, second = make_images(tmp_path / "first", 1), make_images(tmp_path / "second", 1)
    open_store(first, cache)
    open_store(second, cache)
    for lock in cache.glob("pixels/*/lock"):
        os.utime(lock, (1e9, 1e9))
    open_store(first, cache)
    stores = list_stores(cache)
    assert [store.root.name for store in stores] == ["first", "second"]
    assert stores[0].last_used.timestamp() == pytest.approx(time.time(), abs=60)


def test_clear_spares_what_is_not_ours_or_in_use(tmp_path, cache, files):
    open_store(files, cache)
    (cache / "pixels" / "holiday").mkdir()
    mine = [cache / "pixels" / "holiday" / "index.jsonl", store_file(cache, "lock").with_name("notes.txt")]
    for file in mine:
        file.write_text("mine")
    with store_file(cache, "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clear_stores(cache) == 0
    assert_right(open_store(files, cache), files)
    assert clear_stores(cache) > 0
    assert all(file.read_text() == "mine" for file in mine)


def test_a_store_of_an_older_version_is_listed_and_cleared(tmp_path, cache, files):
    """It lies on the disk, whether or not this version can read it."""
    open_store(files, cache)
    index = store_file(cache, "index.jsonl")
    assert [store.outdated for store in list_stores(cache)] == [False]
    index.write_bytes(index.read_bytes().replace(b'"format": 3', b'"format": 2', 1))
    (store,) = list_stores(cache)
    assert (store.root, store.size, store.images, store.outdated) == (files[0].parent, SIZE, 10, True)
    assert clear_stores(cache, tmp_path / "elsewhere") == 0
    assert clear_stores(cache, files[0].parent) == store.nbytes > 0
    assert list_stores(cache) == []


def test_clear_removes_a_store_that_cannot_be_read(cache, files):
    open_store(files, cache)
    store_file(cache, "index.jsonl").write_bytes(b"damage")
    assert list_stores(cache) == []
    assert clear_stores(cache) == 10 * (SIZE * SIZE + SIDE * SIDE) * 3 + len("damage")


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
    file, close = store_file(cache, "lock"), Lock.close

    def begun_right_after(lock: Lock) -> None:
        close(lock)
        file.write_text("of the next store")

    monkeypatch.setattr(Lock, "close", begun_right_after)
    assert clear_stores(cache) > 0
    assert file.exists()
