"""The fixtures and hooks of tests/conftest.py that the tests of research/ need too."""

from pathlib import Path

import pytest

import commands


def pytest_runtest_setup(item: pytest.Item) -> None:
    commands.may_be_slow = item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own cache of decoded images."""
    monkeypatch.setenv("CDTRANS_CACHE", str(tmp_path / "cache"))
