"""Locks between processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from cdtrans.record.files import try_lock


def test_an_interruption_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = FileLock.acquire

    def interrupted(lock: FileLock, **how: object) -> None:
        acquire(lock, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback keeps the lock's object alive
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
