"""Write files and folders completely or not at all, and lock them for one process."""

import csv
import errno
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from cdtrans.errors import CdtransError, DeviceError, DiskFull, RunError
from cdtrans.schema import Misfit

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """For writing a file: a full disk is one sentence."""
    try:
        yield
    except BaseException as error:
        if not is_disk_full(error):
            raise
        raise DiskFull(
            "disk-full",
            f"The disk is full: '{path}' could not be written and is as it was; free some space and run the "
            "same command again, which resumes a run.",
        ) from error


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a draft for writing; it replaces `path` when it is complete and on disk."""
    draft = path.with_name(f".{path.name}.draft")
    with named_if_full(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


@contextmanager
def intact(file: Path, advice: str) -> Iterator[None]:
    """For reading a file and checking its content: any error here means that the file is damaged. One rule for all
    files in a run folder; `advice` says what to do."""
    try:
        yield
    except (CdtransError, MemoryError):
        raise
    except OSError as error:
        raise RunError("run-unreadable", f"'{file}' cannot be read ({error.strerror or error}); {advice}.") from error
    except Exception as error:  # libraries raise almost anything on bytes that they did not write
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU that other processes use too
            raise DeviceError(
                "gpu-memory",
                f"The GPU has too little memory for what '{file}' holds; free some and run the same command again.",
            ) from error
        kind = "" if isinstance(error, Misfit) else f"{type(error).__name__}: "
        cause = f"{kind}{' '.join(str(error).split())[:80]}".rstrip(": .")
        raise RunError("run-damaged", f"'{file}' is damaged ({cause}); {advice}.") from error


def is_disk_full(error: BaseException | None) -> bool:
    """Also if a library, such as torch.save, raises another error while it cleans up after the full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return True
        error = error.__context__
    return False


def csv_lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def replace_folder(draft: Path, final: Path) -> None:
    """Put a finished folder in the place of an older one. A kill leaves one of them whole, or neither; never half."""
    older = draft.with_name(f"{draft.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        os.replace(final, older)
    os.replace(draft, final)
    shutil.rmtree(older, ignore_errors=True)


Lock = ExitStack[None]  # held by this process until it is closed


def try_lock(file: Path) -> Lock | None:
    """A lock between processes; None if it is taken, even by this process."""
    from filelock import FileLock, Timeout  # takes a tenth of a second, which a wrong flag need not wait for

    held, lock = FileLock(file, thread_local=False), Lock()
    lock.callback(held.release, force=True)
    try:
        held.acquire(blocking=False)
    except Timeout:
        return None
    except BaseException:  # an interruption may come when it has been taken
        lock.close()
        raise
    return lock
