"""Another model is handed over, by everything that reads the run, and back again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdtrans import load
from cdtrans.measure.evaluate import evaluate
from cdtrans.record.run import lock_folder
from cdtrans.reporting.page import write_report
from cdtrans.run.choose import choose, confirmation, explanation
from cdtrans.run.pipeline import finished_result
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import predictions_of
from support import error_says, says

QUIET = Screen(quiet=True)


@pytest.fixture
def run(finished, tmp_path: Path) -> Path:
    return shutil.copytree(finished.run, tmp_path / "a run")


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def refuse(run: Path) -> None:
    """As if the guard had refused the adapted model."""
    found = result(run)
    guard = found["guard"] | {"verdict": "harm", "paragraph": "Harm.", "findings": [{"name": "n", "sentence": "s"}]}
    found |= {"chosen_model": "source", "chosen_epoch": 0, "guard": guard, "estimate": found["estimates"]["source"]}
    (run / "result.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    (run / "predictions.csv").write_bytes(predictions_of(run, "source"))


def test_everything_follows_the_choice_and_it_can_be_taken_back(run: Path, finished) -> None:
    refuse(run)
    evaluate(run, finished.answers, screen=QUIET, device="cpu")
    write_report(run, QUIET)
    files = ("result.json", "predictions.csv", "report.html", "evaluation.json")
    before = {name: (run / name).read_bytes() for name in files}
    epoch = result(run)["judged_epoch"]
    accuracy = {model: evaluate(run, finished.answers, screen=QUIET, device="cpu", model=model).scores.accuracy
                for model in ("source", "adapted")}  # fmt: skip
    assert accuracy["source"] != accuracy["adapted"]

    choice = choose(run, "adapted", QUIET)
    assert choice == ("adapted", epoch, True)
    found = result(run)
    assert (found["chosen_model"], found["chosen_epoch"], found["chosen_by"]) == ("adapted", epoch, "person")
    assert found["guard"] == json.loads(before["result.json"])["guard"], "what the guard said stays"
    assert found["estimate"] == found["estimates"]["adapted"] != found["estimates"]["source"]
    files_of_target = sorted(finished.task.target.iterdir())
    labels = [p.label for p in load(run, device="cpu").predict(files_of_target)]
    table = dict(line.split(",")[:2] for line in (run / "predictions.csv").read_text().splitlines()[1:])
    assert [table[f.name] for f in files_of_target] == labels
    page = (run / "report.html").read_text()
    assert says(page, "chosen by hand", f"The adapted model is right on {accuracy['adapted']:.0%} of the target images")
    assert (run / "evaluation.json").read_bytes() == before["evaluation.json"], "it knows both models"
    assert evaluate(run, finished.answers, screen=QUIET, device="cpu").scores.accuracy == accuracy["adapted"]
    told = finished_result(run)
    assert (told.harm, told.chosen_epoch) == (False, epoch)
    assert says(told.explanation, "Harm.", "by hand")

    choose(run, "source", QUIET)
    (run / "evaluation.json").write_bytes(before["evaluation.json"])
    assert {name: (run / name).read_bytes() for name in files if name != "report.html"} == {
        name: content for name, content in before.items() if name != "report.html"
    }
    assert says((run / "report.html").read_text(), "harm found", "cdtrans choose")


def test_a_choice_against_a_guard_that_kept_the_adapted_model(run: Path) -> None:
    choose(run, "source", QUIET)
    assert result(run)["chosen_by"] == "person"
    assert finished_result(run).harm is False
    assert not (run / "report.html").exists(), "there was none"
    choose(run, "adapted", QUIET)
    assert result(run)["chosen_by"] == "run"


def test_the_sentences(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert confirmation(run, choose(run, "adapted", QUIET)).endswith(
        "already uses the adapted model; nothing was changed."
    )
    (run / "model.onnx").touch()
    sentence = confirmation(run, choose(run, "source", QUIET))
    assert says(sentence, "source-only model", f"cdtrans choose '{run}' adapted")
    assert says(capsys.readouterr().err, "model.onnx'", "export it again")
    assert says(confirmation(run, choose(run, "adapted", QUIET)), "adapted model of epoch 4")


def test_after_a_refusal_the_commands_are_there(run: Path) -> None:
    assert explanation(run, result(run)) == result(run)["guard"]["paragraph"]
    refuse(run)
    assert explanation(run, result(run)) == (
        f"Harm. To use the adapted model anyway: 'cdtrans choose '{run}' adapted', or just once: 'cdtrans predict "
        f"'{run}' IMAGES --model adapted'."
    )
    assert finished_result(run).harm
    stopped = result(run) | {"judged_epoch": 0}
    assert explanation(run, stopped) == "Harm.", "there is no adapted model"


def test_a_kill_in_between_is_mended_by_either_command(run: Path) -> None:
    """The predictions come before the result."""
    before = (run / "predictions.csv").read_bytes()
    (run / "predictions.csv").write_bytes(predictions_of(run, "source"))
    assert choose(run, "adapted", QUIET).changed
    assert (run / "predictions.csv").read_bytes() == before
    assert not choose(run, "adapted", QUIET).changed


def test_wrong_states_are_one_sentence_each(run: Path, tmp_path: Path) -> None:
    with error_says("does not exist", "nowhere"):
        choose(tmp_path / "nowhere", "adapted", QUIET)
    with error_says("no finished run", str(tmp_path)):
        choose(tmp_path, "adapted", QUIET)
    with error_says("'adopted'", "did you mean 'adapted'"):
        choose(run, "adopted", QUIET)
    with lock_folder(run), error_says("another process", str(run)):
        choose(run, "source", QUIET)
    (run / "logits.npz").rename(run / "kept.npz")
    with error_says("logits.npz", str(run)):
        choose(run, "source", QUIET)
    (run / "kept.npz").rename(run / "logits.npz")
    shutil.rmtree(run / "adapted")
    with error_says("no adapted model", "nothing to choose"):
        choose(run, "source", QUIET)
    (run / "result.json").unlink()
    with error_says("no finished run"):
        choose(run, "source", QUIET)
