"""`cdtrans report`. torch is imported only once there is known to be a finished run."""

from pathlib import Path

from cdtrans.config import RunFolder
from cdtrans.record.run_folder import read_result
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import importing
from cdtrans.schema import checked


@checked()
def report(run: RunFolder, *, quiet: bool = False, screen: Screen | None = None) -> Path:
    """Write the one-page report of a finished run: verdict, scores, pairs, images, cost. Returns the file,
    RUN/report.html."""
    read_result(Path(run))
    with importing():
        from cdtrans.reporting.page import write_report

    return write_report(Path(run), screen or Screen(quiet=quiet))
