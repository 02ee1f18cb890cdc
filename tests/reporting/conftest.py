"""A run folder with everything that a report can show."""

import shutil
from pathlib import Path

import pytest

from cdtrans.record.record import RunRecord
from cdtrans.reporting.page import write_report
from cdtrans.runtime.screen import Screen
from run_folders import complete, stopped


@pytest.fixture(scope="session")
def full(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run with its report; tests must leave it as it is."""
    run = shutil.copytree(finished.run, tmp_path_factory.mktemp("full") / "run")
    write_report(RunRecord(complete(run, finished.answers)), Screen(quiet=True))
    return run


@pytest.fixture
def run(full: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(full, tmp_path / "run")


@pytest.fixture
def stopped_run(finished, tmp_path: Path) -> Path:
    """A run that was stopped before there was an adapted model, and measured; without a report."""
    return complete(stopped(shutil.copytree(finished.run, tmp_path / "stopped")), finished.answers)
