"""Files and folders that are whole or absent."""

import csv
import errno
import os
from pathlib import Path

import pytest
import torch

from cdtrans.errors import CdtransError, DiskFull
from cdtrans.record.files import atomic, csv_lines, disk_full, intact, is_disk_full, replace_folder
from cdtrans.schema import Misfit
from support import error_says


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "a.txt"
    with atomic(file) as draft:
        draft.write(b"new")
        assert not file.exists()
    assert file.read_bytes() == b"new"
    assert names(tmp_path) == {"deep", "deep/er", "deep/er/a.txt"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
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

    with error_says("disk is full", "a.txt'", "same command again"):
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


def test_another_error_of_the_disk_is_passed_on(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic(tmp_path / "a"):
            raise OSError(errno.EIO, "I/O error")

    with pytest.raises(OSError, match="I/O error"):
        fail()


def test_a_finished_folder_replaces_an_older_one(tmp_path: Path) -> None:
    for name in ("draft", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "draft", tmp_path / "final")
    assert names(tmp_path) == {"final", "final/draft"}


def test_the_error_of_a_full_disk_is_a_kind_of_its_own() -> None:
    assert isinstance(disk_full(Path("a")), DiskFull)


@pytest.mark.parametrize("name", ["a", "a,b", 'quo"te', "new\nline", "größe 日本", os.fsdecode(b"\xff\xfe"), ""])
def test_a_line_of_a_table_gives_back_what_went_in(name: str) -> None:
    line = csv_lines([[name, 3, "end"]])
    assert line.endswith(b"\r\n")
    (fields,) = csv.reader([line.decode("utf-8", "surrogateescape")])
    assert fields == [name, "3", "end"]
    assert os.fsencode(name).replace(b'"', b'""') in line


def test_names_stay_names_even_if_a_spreadsheet_takes_them_for_formulas() -> None:
    """The guide says so: whoever reads the CSV must find the files again."""
    assert csv_lines([["=1+1.png", "@SUM(A1)", "-x"]]) == b"=1+1.png,@SUM(A1),-x\r\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("a\nb"), ["x.json' is damaged (ValueError: a b); go home."]),
        (RecursionError("deep"), ["is damaged (RecursionError: deep)"]),
        (PermissionError(13, "Permission denied"), ["cannot be read (Permission denied); go home."]),
        (Misfit("kind", "size", "size is 5"), ["is damaged (size is 5); go home."]),
        (CdtransError("as-it-is", "As it is."), ["As it is."]),
    ],
    ids=str,
)
def test_whatever_goes_wrong_with_a_file_names_it(error: Exception, words: list[str]) -> None:
    with error_says(*words), intact(Path("x.json"), "go home"):
        raise error


def test_too_little_memory_is_not_damage() -> None:
    with pytest.raises(MemoryError), intact(Path("x.json"), "go home"):
        raise MemoryError


def test_a_full_gpu_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    with error_says("GPU", "memory", "state.pt'", "same command again"), intact(tmp_path / "state.pt", "start again"):
        raise torch.OutOfMemoryError("CUDA out of memory")
