import shutil
from pathlib import Path

import pytest

from cdtrans.record.outcome import ClassSet
from labelled_runs import make_run, write_outcome


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("labelling"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change; the target is shared."""
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def doubtful(run: Path) -> Path:
    """The same run, if nobody has said which classes occur: `ask` has all three pages for it."""
    write_outcome(run, class_set=ClassSet())
    return run
