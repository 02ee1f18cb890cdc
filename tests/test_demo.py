"""The built-in task goes the road of anybody's two folders."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import cdtrans.demo as demo_module
from cdtrans.data.digits import Digits
from cdtrans.demo import demo
from cdtrans.evaluation.evaluate import evaluate
from cdtrans.screen import Screen

QUICK = {"source_epochs": 1, "epochs": 1, "batch_size": 8, "device": "cpu"}


@pytest.fixture
def written(finished, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tiny task in place of the digits, and what was asked for."""
    asked: dict[str, Any] = {}

    def write(folder: Path, *, seed: int) -> Digits:
        asked.update(folder=folder, seed=seed)
        return Digits(finished.task.source, finished.task.target, finished.answers)

    monkeypatch.setattr(demo_module, "write_digits", write)
    return asked


def test_before_and_after_by_the_answers(written: dict[str, Any], finished, tmp_path: Path) -> None:
    result = demo(tmp_path / "run", seed=5, screen=Screen(quiet=True), **QUICK)
    assert result.run == tmp_path / "run"
    assert written == {"folder": tmp_path / "run-data", "seed": 5}
    quiet = Screen(quiet=True)
    for model, accuracy in (("source", result.source_only_accuracy), ("adapted", result.adapted_accuracy)):
        by_itself = evaluate(result.run, finished.answers, model=model, device="cpu", screen=quiet)
        assert by_itself.scores.accuracy == pytest.approx(accuracy)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["seed"], config["epochs"], config["flip"]) == (5, 1, 0)  # the seed, a setting, the preset
    assert config["crop"] == 28


def test_the_current_folder_has_a_name_too(written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    demo(Path("."), seed=0, screen=Screen(quiet=True), **QUICK)
    assert written["folder"] == tmp_path / "here-data"
    assert "result.json" in os.listdir()
