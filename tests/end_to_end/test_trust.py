"""Choosing, guarding and estimating in real runs: what is written, what is restored, and how the command ends."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cdtrans import load
from cdtrans.record.outcome import Choice, Outcome
from cdtrans.record.record import RunRecord
from cdtrans.trust.scores import LabelFreeScores
from commands import Ended, warm
from support import says
from tiny_task import Task, log_lines, make_task

pytestmark = pytest.mark.slow


def cdtrans(*arguments: str) -> Ended:
    with TemporaryDirectory() as logs:
        return warm().run(list(arguments), Path(logs))


EASY = {"source_epochs": 12, "epochs": 4, "rebuild_every": 2, "save_every": 30, "guard": True}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("trust"), **EASY)


@pytest.fixture(scope="module")
def healthy(task: Task) -> Path:
    out = task.folder / "healthy"
    ended = cdtrans(*task.adapt(out))
    assert ended.code == 0, ended.err
    return out


def result(out: Path) -> Outcome:
    return RunRecord(out).outcome


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    mine, theirs = weights(a), weights(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_a_healthy_run_is_better_with_its_best_epoch_by_consensus(healthy: Path) -> None:
    lines = [line for line in log_lines(healthy) if line["event"] == "scores"]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3, 4]
    assert all({*LabelFreeScores._fields, "consensus"} <= line.keys() for line in lines)
    found = result(healthy)
    best = max(lines[1:], key=lambda line: (line["consensus"], line["epoch"]))
    assert found.choice == Choice("adapted", best["epoch"])
    assert (found.verdict.kind, found.selection) == ("better", "consensus")
    assert found.estimate is None, "21 images are too few for a range"


@pytest.mark.parametrize("rule", ["density", "last"])
def test_the_chosen_epochs_own_weights_and_predictions_are_kept_and_the_last_ones_too(
    task: Task, healthy: Path, rule: str
) -> None:
    out = task.folder / rule
    assert cdtrans(*task.adapt(out, "--select", rule)).code == 0
    lines = [line for line in log_lines(out) if line["event"] == "scores" and line["epoch"] > 0]
    chosen = max(lines, key=lambda line: (line.get(rule, 0), line["epoch"]))["epoch"]
    assert result(out).choice.epoch == chosen
    assert equal(out / "last", healthy / "last"), "what is chosen does not change what is trained"
    assert equal(out / "adapted", out / "last") == (chosen == 4)
    with np.load(out / "predictions" / f"epoch-{chosen:03}.npz") as arrays:
        predicted = arrays["predicted"]
    classifier = load(out, device="cpu")
    files = RunRecord(out).images.paths["target"]
    said = classifier.predict([task.target / file for file in files])
    assert [classifier.classes.index(p.label) for p in said] == predicted.tolist()
    table = dict(line.split(",")[:2] for line in (out / "predictions.csv").read_text().splitlines()[1:])
    assert [table[file] for file in files] == [p.label for p in said]


RUINED = """
from cdtrans.methods.cdtrans import CDTrans


class Ruined(CDTrans):
    def after_step(self, batch, progress):
        if float(progress) > 0.6:
            self.network.head.classifier.weight.zero_()
"""


def test_an_earlier_epoch_can_win(task: Task, healthy: Path) -> None:
    """A method that ruins its network late in training: an earlier epoch is the best."""
    file, out = task.folder / "ruined.py", task.folder / "earlier"
    file.write_text(RUINED)
    flags = ("--method", f"{file}:Ruined", "--epochs", "6", "--no-guard")
    assert cdtrans(*task.adapt(out, *flags)).code == 0
    scores = {line["epoch"]: line["consensus"] for line in log_lines(out) if line["event"] == "scores"}
    best = max((value, epoch) for epoch, value in scores.items() if epoch > 0)[1]
    assert result(out).choice.epoch == best
    assert best < 6
    assert scores[6] < 0.9 * scores[best]
    assert not equal(out / "adapted", out / "last")
    assert result(out).setback is not None
    assert result(healthy).setback is None


def test_the_report_is_written_at_the_end_if_wanted(task: Task, healthy: Path) -> None:
    assert not (healthy / "report.html").exists(), "the tiny task leaves it out"
    out = task.folder / "report"
    ended = cdtrans(*task.adapt(out, "--report"))
    assert ended.code == 0, ended.err
    assert f"report: {out / 'report.html'}" in ended.out.replace("\n", "")
    page = (out / "report.html").read_text()
    assert "<html" in page
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in timings][-2:] == ["session", "report"]
    (total,) = re.findall(r">Total</th>.*>([\d.]+) s</td></tr>", page)
    assert float(total) == round(timings[-2]["seconds"], 1), "known when the page is written the first time"
    assert says(page, "time to write this page")


def test_harm_ends_with_the_source_only_model_and_exit_code_3(task: Task) -> None:
    out = task.folder / "harm"
    ended = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3"))
    assert ended.code == 3
    found = result(out)
    assert (found.choice, found.verdict.kind, found.harm) == (Choice("source", 0), "harm", True)
    assert found.verdict.findings
    with np.load(out / "predictions" / "epoch-000.npz") as arrays:
        predicted = arrays["predicted"].tolist()
    classifier = load(out, device="cpu")
    assert all(torch.equal(x, weights(out / "source")[k]) for k, x in classifier.model.state_dict().items())
    table = dict(line.split(",")[:2] for line in (out / "predictions.csv").read_text().splitlines()[1:])
    paths = RunRecord(out).images.paths["target"]
    assert [table[path] for path in paths] == [classifier.classes[k] for k in predicted]
    assert found.adapted_epoch == RunRecord(out).card("adapted").epoch > 0
    kept = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard"))
    assert kept.code == 2
    assert says(kept.err, "guard: True there, False now", "--out")
    again = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3"))
    assert again.code == 3, "a finished run ends as it ended"
    assert says(again.err, "guard", "harm")
    for said in (ended.err, again.err):
        assert says(said, f"'cdtrans choose {out} adapted'", f"'cdtrans predict {out} IMAGES --model adapted'")
    assert cdtrans("choose", str(out), "adapted").code == 0
    chosen = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3"))
    assert chosen.code == 0, "a person has taken responsibility"
    assert says(chosen.err, "harm", "chosen by hand")
    assert says(chosen.out, f"epoch {found.adapted_epoch}")


def test_without_the_guard_the_adapted_model_is_kept_and_that_is_said(task: Task) -> None:
    out = task.folder / "no-guard"
    ended = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard"))
    assert ended.code == 0
    assert says(ended.err, "guard", "off", "adapted model is kept")
    assert (result(out).choice.model, result(out).verdict.kind) == ("adapted", "harm")
    told = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard", "--json"))
    assert json.loads(told.out)["estimate"] is None, "no range can be given after harm, also where it is kept"


def test_a_loss_that_is_not_finite_is_harm(task: Task) -> None:
    out = task.folder / "diverged"
    ended = cdtrans(*task.adapt(out, "--lr", "1e30"))
    assert ended.code == 3
    assert result(out).verdict.findings[0].code == "training-broke-off"
    assert result(out).adapted_epoch == 0
    assert not (out / "adapted").exists()
    assert not (out / "state").exists()
    assert "has no adapted model" in cdtrans("predict", str(out), str(task.target), "--model", "adapted").err


def test_a_hopeless_start_ends_before_stage_2(task: Task) -> None:
    out = task.folder / "hopeless"
    ended = cdtrans(*task.adapt(out, "--source-lr", "0"))
    assert ended.code == 3
    assert not [line for line in log_lines(out) if line["event"] == "epoch" and line["stage"] == "adaptation"]
    assert "source-not-learnt" in {finding.code for finding in result(out).verdict.findings}


def test_a_part_of_the_source_is_watched_and_not_trained_on(task: Task) -> None:
    out = task.folder / "holdout"
    assert cdtrans(*task.adapt(out, "--holdout", "0.25", "--no-guard")).code == 0
    source, held = (RunRecord(out).images.paths[domain] for domain in ("source", "holdout"))
    assert (len(source), len(held)) == (18, 6)
    assert not set(source) & set(held)
    with np.load(out / "pairs" / "round-01.npz") as arrays:
        assert arrays["source"].max() < len(source)
    lines = [line for line in log_lines(out) if line["event"] == "scores"]
    assert all(0 <= line["holdout"] <= 1 for line in lines)
    said = load(out, model="last", device="cpu").predict([task.source / name for name in held])
    right = [p.label == Path(name).parent.name for name, p in zip(held, said, strict=True)]
    assert lines[-1]["holdout"] == pytest.approx(sum(right) / len(right), abs=1e-4)
