"""A run's record of its target images, and what another temperature makes of it."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from cdtrans.record.model import read_card
from cdtrans.record.record import RunRecord
from cdtrans.record.run import recalibrate
from cdtrans.run import finish
from cdtrans.run.pipeline import adapt
from cdtrans.serving.classifier import load
from run_folders import refused
from support import raises
from tiny_task import make_task


@pytest.fixture
def run(finished, tmp_path: Path) -> Path:
    """As a run without calibration would have left it."""
    run = shutil.copytree(finished.run, tmp_path / "run")
    recalibrate(RunRecord(run), 1.0)
    return run


def confidences(run: Path, model: str = "chosen") -> np.ndarray:
    return RunRecord(run).confidences(model)


def table(run: Path) -> dict[str, dict[str, str]]:
    with open(run / "predictions.csv", newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def agrees(run: Path, target: Path, model: str = "chosen") -> None:
    """The recorded predictions are those of the saved model."""
    classifier = load(run, model=model, device="cpu")
    said = classifier.predict(target)
    sure = np.sort([p.probability for p in said])
    np.testing.assert_allclose(np.sort(confidences(run, model)), sure, atol=2e-6)
    if model == "chosen":
        rows = table(run)
        for p in said:
            assert p.path is not None
            row = rows[p.path.name]
            assert row["label"] == p.label
            assert float(row["probability"]) == pytest.approx(p.probability, abs=2e-6)


def test_what_is_recorded_is_what_the_models_say(run: Path, finished) -> None:
    for model in ("chosen", "adapted", "source"):
        agrees(run, finished.task.target, model)


def test_another_temperature_changes_probabilities_and_no_label(run: Path, finished) -> None:
    before, sure = table(run), confidences(run)
    weights = (run / "adapted" / "model.safetensors").read_bytes()
    recalibrate(RunRecord(run), 2.5)
    assert read_card(run / "adapted").temperature == 2.5
    assert (run / "adapted" / "model.safetensors").read_bytes() == weights
    after = table(run)
    assert {path: row["label"] for path, row in after.items()} == {path: row["label"] for path, row in before.items()}
    assert (confidences(run) < sure).all()
    assert all(float(after[path]["probability"]) < float(before[path]["probability"]) for path in before)
    agrees(run, finished.task.target)
    with np.load(run / "views.npz") as views, np.load(finished.run / "views.npz") as old:
        assert {*views.files} == {*old.files}
        np.testing.assert_allclose(views["confidence_after"], confidences(run), atol=1e-3)
        np.testing.assert_array_equal(views["confidence_before"], old["confidence_before"])
        assert (views["changed"] != old["changed"]).any()
    recalibrate(RunRecord(run), 1.0)
    assert table(run) == before


def test_the_chosen_model_is_the_one_that_is_recalibrated(run: Path) -> None:
    refused(run)
    recalibrate(RunRecord(run), 2.0)
    assert (read_card(run / "source").temperature, read_card(run / "adapted").temperature) == (2.0, 1.0)
    assert {row["label"] for row in table(run).values()} <= set(read_card(run / "source").classes)


@pytest.mark.slow
def test_a_run_gives_its_models_their_temperatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(tmp_path / "task", source_epochs=1, epochs=1)
    monkeypatch.setattr(finish, "temperature", lambda logits, accuracy: 2.0)
    run = adapt(source=task.source, target=task.target, out=tmp_path / "run", config=task.config, quiet=True).run
    read = {model: read_card(run / model).temperature for model in ("source", "adapted", "last")}
    assert read == {"source": 1.0, "adapted": 2.0, "last": 2.0}
    for model in ("chosen", "adapted", "source"):
        agrees(run, task.target, model)
    with np.load(run / "views.npz") as views:
        np.testing.assert_allclose(views["confidence_before"], confidences(run, "source"), atol=1e-3)
        np.testing.assert_allclose(views["confidence_after"], confidences(run, "adapted"), atol=1e-3)


def test_without_logits_nothing_is_changed(run: Path) -> None:
    (run / "logits.npz").unlink()
    for ask in (lambda: RunRecord(run).calibrated_logits(), lambda: recalibrate(RunRecord(run), 2.0)):
        with raises("run-damaged"):
            ask()
    assert read_card(run / "adapted").temperature == 1.0
