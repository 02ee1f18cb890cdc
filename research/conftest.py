"""What tests/conftest.py does for every test of tests/, for those of research/."""

from pathlib import Path

import pytest

import commands


def pytest_runtest_setup(item: pytest.Item) -> None:
    commands.may_be_slow = item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own cache of decoded images."""
    monkeypatch.setenv("CDTRANS_CACHE", str(tmp_path / "cache"))
