"""Another model is handed over, by everything that reads the run, and back again."""

import shutil
from pathlib import Path

import pytest

from cdtrans import load
from cdtrans.measure.measured import evaluate
from cdtrans.record.record import RunRecord
from cdtrans.record.run import lock_folder, predictions_of
from cdtrans.reporting.page import write_report
from cdtrans.run.choose import choose
from cdtrans.run.pipeline import Result
from cdtrans.runtime.screen import Screen
from run_folders import refused
from support import raises, says

QUIET = Screen(quiet=True)


@pytest.fixture
def run(finished, tmp_path: Path) -> Path:
    return shutil.copytree(finished.run, tmp_path / "a run")


def result(run: Path) -> Result:
    return Result(run, RunRecord(run).outcome)


def test_everything_follows_the_choice_and_it_can_be_taken_back(run: Path, finished) -> None:
    refused(run)
    evaluate(run, finished.answers, screen=QUIET, device="cpu")
    write_report(RunRecord(run), QUIET)
    files = ("result.json", "predictions.csv", "report.html", "evaluation.json")
    before, outcome = {name: (run / name).read_bytes() for name in files}, result(run).outcome
    epoch = outcome.adapted_epoch
    assert result(run).harm

    chosen = choose(run, "adapted", screen=QUIET)
    assert chosen.summary() == {"run": str(run), "chosen_model": "adapted", "chosen_epoch": epoch, "changed": True}
    now = result(run)
    assert (now.outcome.choice.model, now.chosen_epoch, now.outcome.choice.by) == ("adapted", epoch, "person")
    assert now.outcome.verdict == outcome.verdict, "the verdict stays"
    assert now.estimate is not None
    assert not now.harm
    files_of_target = sorted(finished.task.target.iterdir())
    labels = [p.label for p in load(run, device="cpu").predict(files_of_target)]
    table = dict(line.split(",")[:2] for line in (run / "predictions.csv").read_text().splitlines()[1:])
    assert [table[f.name] for f in files_of_target] == labels
    assert says((run / "report.html").read_text(), "chosen by hand")
    assert (run / "evaluation.json").read_bytes() == before["evaluation.json"], "it knows both models"

    choose(run, "source", screen=QUIET)
    same = [name for name in files if name != "report.html"]
    assert {name: (run / name).read_bytes() for name in same} == {name: before[name] for name in same}
    assert says((run / "report.html").read_text(), "harm found", "cdtrans choose")


def test_a_choice_against_a_guard_that_kept_the_adapted_model(run: Path) -> None:
    choose(run, "source", screen=QUIET)
    assert (result(run).outcome.choice.by, result(run).harm) == ("person", False)
    assert not (run / "report.html").exists(), "there was none"
    choose(run, "adapted", screen=QUIET)
    assert result(run).outcome.choice.by == "run"


def test_the_screen_says_what_is_used_now_and_the_way_back(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert says(str(choose(run, "adapted", screen=QUIET)), "already uses")
    (run / "model.onnx").touch()
    assert says(str(choose(run, "source", screen=QUIET)), "source-only model", f"cdtrans choose '{run}' adapted")
    assert says(capsys.readouterr().err, "model.onnx'", "export it again")


def test_a_kill_in_between_is_mended_by_either_command(run: Path) -> None:
    """The predictions come before the outcome."""
    before = (run / "predictions.csv").read_bytes()
    (run / "predictions.csv").write_bytes(predictions_of(RunRecord(run), "source"))
    assert choose(run, "adapted", screen=QUIET).changed
    assert (run / "predictions.csv").read_bytes() == before
    assert not choose(run, "adapted", screen=QUIET).changed


def test_wrong_states_are_refused(run: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", tmp_path):
        with raises("no-run"):
            choose(place, "adapted", screen=QUIET)
    with raises("argument-choice"):
        choose(run, "adopted", screen=QUIET)
    with lock_folder(run), raises("run-locked"):
        choose(run, "source", screen=QUIET)
    (run / "logits.npz").rename(run / "kept.npz")
    with raises("run-damaged"):
        choose(run, "source", screen=QUIET)
    (run / "kept.npz").rename(run / "logits.npz")
    shutil.rmtree(run / "adapted")
    with raises("model-missing"):
        choose(run, "source", screen=QUIET)
    (run / "result.json").unlink()
    with raises("run-unfinished"):
        choose(run, "source", screen=QUIET)
