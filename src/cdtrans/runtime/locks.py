"""Locks between processes, on any system: a file that one process holds until it closes the lock or ends."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Lock:
    """A lock held by this process."""

    def __init__(self, held: "BaseFileLock") -> None:
        self._held = held

    def close(self) -> None:
        self._held.release(force=True)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def try_lock(file: Path) -> Lock | None:
    """None if the lock is taken, even by this process."""
    from filelock import FileLock, Timeout  # takes a tenth of a second, which a wrong flag need not wait for

    held = FileLock(file, thread_local=False)
    try:
        held.acquire(blocking=False)
    except Timeout:
        return None
    except BaseException:  # an interruption may come when it has been taken
        held.release(force=True)
        raise
    return Lock(held)
