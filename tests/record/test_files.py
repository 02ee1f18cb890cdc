"""Files and folders that are whole or absent, and locks between processes."""

import csv
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from cdtrans.errors import CdtransError, DiskFull
from cdtrans.record.files import atomic, csv_lines, intact, is_disk_full, replace_folder, try_lock
from cdtrans.schema import Misfit
from support import raises


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "a.txt"
    with atomic(file) as draft:
        draft.write(b"new")
        assert not file.exists()
    assert file.read_bytes() == b"new"
    assert names(tmp_path) == {"deep", "deep/er", "deep/er/a.txt"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, PermissionError])
def test_a_crash_while_writing_leaves_the_old_file_and_no_draft(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"old")

    def crash() -> None:
        with atomic(file) as draft:
            draft.write(b"new and long" * 10_000)
            raise error

    with pytest.raises(error):
        crash()
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == {"a.txt"}


def test_what_is_put_in_place_has_reached_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("fsync"), sync(number))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    with atomic(tmp_path / "a") as draft:
        draft.write(b"x")
    assert order == ["fsync", "replace"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path, number: int) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"old")

    def fill() -> None:
        with atomic(file) as draft:
            draft.write(b"new")
            raise OSError(number, os.strerror(number))

    with raises("disk-full", DiskFull):
        fill()
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == {"a.txt"}


def test_a_full_disk_is_recognised_behind_the_error_of_a_library_that_cleans_up() -> None:
    def write() -> None:
        try:
            raise OSError(errno.ENOSPC, "full")
        finally:
            raise RuntimeError("unexpected pos 88832 vs 88720")

    with pytest.raises(RuntimeError) as caught:
        write()
    assert is_disk_full(caught.value)
    assert not is_disk_full(RuntimeError("unexpected pos"))
    assert not is_disk_full(PermissionError(errno.EACCES, "no"))


def test_a_finished_folder_replaces_an_older_one(tmp_path: Path) -> None:
    for name in ("draft", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "draft", tmp_path / "final")
    assert names(tmp_path) == {"final", "final/draft"}


@pytest.mark.parametrize("name", ["a", "a,b", 'quo"te', "new\nline", "größe", os.fsdecode(b"\xff\xfe"), "=1+1", ""])
def test_a_line_of_a_table_gives_back_what_went_in(name: str) -> None:
    line = csv_lines([[name, 3, "end"]])
    assert line.endswith(b"\r\n")
    (fields,) = csv.reader([line.decode("utf-8", "surrogateescape")])
    assert fields == [name, "3", "end"]
    assert os.fsencode(name).replace(b'"', b'""') in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a\nb"), "run-damaged"),
        (RecursionError("deep"), "run-damaged"),
        (Misfit("kind", "size", "size is 5"), "run-damaged"),
        (PermissionError(13, "Permission denied"), "run-unreadable"),
        (CdtransError("as-it-is", "As it is."), "as-it-is"),
        (torch.OutOfMemoryError("CUDA out of memory"), "gpu-memory"),
    ],
    ids=str,
)
def test_whatever_goes_wrong_with_a_file_names_it(error: Exception, code: str) -> None:
    with raises(code) as caught, intact(Path("x.json"), "go home"):
        raise error
    assert code == "as-it-is" or "'x.json'" in str(caught.value)


def test_too_little_memory_is_not_damage() -> None:
    with pytest.raises(MemoryError), intact(Path("x.json"), "go home"):
        raise MemoryError


def test_an_interruption_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = FileLock.acquire

    def interrupted(lock: FileLock, **how: object) -> None:
        acquire(lock, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # its traceback keeps the lock's object alive
            try_lock(tmp_path / "lock")
    assert try_lock(tmp_path / "lock") is not None
    assert caught.traceback


def test_one_holder_at_a_time_and_the_next_after_it(tmp_path: Path) -> None:
    first = try_lock(tmp_path / "lock")
    assert first is not None
    assert try_lock(tmp_path / "lock") is None
    with first:
        pass
    second = try_lock(tmp_path / "lock")
    assert second is not None
    second.close()
    assert (tmp_path / "lock").exists()


def test_a_killed_holder_has_let_go(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    code = f"""
import pathlib, time
from cdtrans.record.files import try_lock
held = try_lock(pathlib.Path({str(file)!r}))
print(held is not None, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert try_lock(file) is None
        holder.kill()
    taken = try_lock(file)
    assert taken is not None
    taken.close()
