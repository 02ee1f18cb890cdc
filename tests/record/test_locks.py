"""Locks between processes."""

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
