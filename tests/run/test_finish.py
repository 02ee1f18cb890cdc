"""The last steps of a run."""

from pathlib import Path

import pytest

from cdtrans.record.record import RunRecord
from cdtrans.run import finish
from cdtrans.runtime.screen import Screen


def test_a_rank_that_does_not_write_needs_no_file_of_the_run(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be here before the main rank has written them."""
    config = RunRecord(finished.run).config
    monkeypatch.setattr(finish, "is_main", lambda: False)
    finish.complete(RunRecord(tmp_path), config, Screen(quiet=True))
    assert list(tmp_path.iterdir()) == []
