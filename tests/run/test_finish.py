"""The last steps of a run."""

from pathlib import Path

from cdtrans.record.record import RunRecord
from cdtrans.record.run import RunWriter
from cdtrans.run.finish import complete
from cdtrans.runtime.screen import Screen


def test_a_rank_that_does_not_write_needs_no_file_of_the_run(finished, tmp_path: Path) -> None:
    """It may be here before the main rank has written them."""
    record = RunRecord(finished.run)
    assert record.outcome.estimate is not None, "what is shown of it comes from files"
    complete(RunWriter(tmp_path, None), record.outcome, record.config, Screen(quiet=True))
