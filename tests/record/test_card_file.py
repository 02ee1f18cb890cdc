"""The temperature in a model's card."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cdtrans.record.card_file import read_card, set_temperature
from cdtrans.record.run_folder import CARD
from support import error_says

BAD = [0, -1.0, float("nan"), float("inf"), 1e-30, 10**400, True, "2", None, [1.0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CARD).write_text(json.dumps({"classes": ["a", "b"], "epoch": 3}))
    return tmp_path


def test_a_card_without_a_temperature_has_1(folder: Path) -> None:
    assert read_card(folder) == {"classes": ["a", "b"], "epoch": 3, "temperature": 1.0}


def test_it_changes_and_nothing_else_does(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    untouched = (folder / "model.safetensors").stat()
    for value in (2.5, 1):
        set_temperature(folder, value)
        assert read_card(folder) == {"classes": ["a", "b"], "epoch": 3, "temperature": value}
    assert (folder / "model.safetensors").stat() == untouched
    assert {path.name for path in folder.iterdir()} == {CARD, "model.safetensors"}


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:10])
def test_what_is_no_temperature_is_refused(folder: Path, value: Any) -> None:
    before = (folder / CARD).read_bytes()
    with error_says("temperature", f"'{folder}'", "0.001 to 1000"):
        set_temperature(folder, value)
    assert (folder / CARD).read_bytes() == before
    (folder / CARD).write_text(json.dumps({"temperature": value}))
    with error_says("temperature", f"'{folder}'", "0.001 to 1000"):
        read_card(folder)


def test_a_kill_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*anything: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        set_temperature(folder, 2.0)
    assert read_card(folder)["temperature"] == 1.0


def test_no_card(tmp_path: Path) -> None:
    with error_says("no finished model", f"'{tmp_path}'", "restore it", "another --out"):
        set_temperature(tmp_path, 2.0)
