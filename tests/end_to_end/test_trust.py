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
from cdtrans.trust.scores import Scores
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
    assert says(ended.out, "unknown without labels"), "21 images are too few for a range"
    assert "the adapted model is better than the source-only one" in ended.out
    return out


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    mine, theirs = weights(a), weights(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_a_healthy_run_is_better_with_its_best_epoch_by_consensus(healthy: Path) -> None:
    lines = [line for line in log_lines(healthy) if line["event"] == "scores"]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3, 4]
    assert all({*Scores._fields, "consensus"} <= line.keys() for line in lines)
    found = result(healthy)
    best = max(lines[1:], key=lambda line: (line["consensus"], line["epoch"]))
    assert found["chosen_epoch"] == best["epoch"]
    assert (found["chosen_model"], found["selection"]) == ("adapted", "consensus")
    assert found["guard"]["verdict"] == "better"
    assert found["estimate"]["low"] is found["estimate"]["high"] is None


@pytest.mark.parametrize("rule", ["confidence", "density", "last"])
def test_the_chosen_epochs_own_weights_and_predictions_are_kept_and_the_last_ones_too(
    task: Task, healthy: Path, rule: str
) -> None:
    out = task.folder / rule
    assert cdtrans(*task.adapt(out, "--select", rule)).code == 0
    lines = [line for line in log_lines(out) if line["event"] == "scores" and line["epoch"] > 0]
    chosen = max(lines, key=lambda line: (line.get(rule, 0), line["epoch"]))["epoch"]
    assert result(out)["chosen_epoch"] == chosen
    assert equal(out / "last", healthy / "last"), "what is chosen does not change what is trained"
    assert equal(out / "adapted", out / "last") == (chosen == 4)
    with np.load(out / "predictions" / f"epoch-{chosen:03}.npz") as arrays:
        predicted = arrays["predicted"]
    classifier = load(out, device="cpu")
    rows = (out / "images.csv").read_text().splitlines()[1:]
    files = [row.split(",")[2] for row in rows if row.startswith("target,")]
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
    assert result(out)["chosen_epoch"] == best
    assert best < 6
    assert scores[6] < 0.9 * scores[best]
    assert not equal(out / "adapted", out / "last")
    assert f"after epoch {best}" in result(out)["guard"]["warning"]
    assert result(healthy)["guard"]["warning"] == ""


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
    (total,) = re.findall(r"<tfoot>.*>([\d.]+) s</td></tr></tfoot>", page)
    assert float(total) == round(timings[-2]["seconds"], 1), "known when the page is written the first time"
    assert says(page, "time to write this page")


def test_harm_ends_with_the_source_only_model_and_exit_code_3(task: Task) -> None:
    out = task.folder / "harm"
    ended = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3"))
    assert ended.code == 3
    assert says(ended.err, "guard", "harm")
    assert says(ended.out, "chosen", "source-only model")
    found = result(out)
    assert (found["chosen_epoch"], found["chosen_model"]) == (0, "source")
    assert found["guard"]["verdict"] == "harm"
    assert found["guard"]["findings"]
    with np.load(out / "predictions" / "epoch-000.npz") as arrays:
        predicted = arrays["predicted"].tolist()
    classifier = load(out, device="cpu")
    assert all(torch.equal(x, weights(out / "source")[k]) for k, x in classifier.model.state_dict().items())
    rows = [row.split(",") for row in (out / "images.csv").read_text().splitlines() if row.startswith("target,")]
    table = dict(line.split(",")[:2] for line in (out / "predictions.csv").read_text().splitlines()[1:])
    assert [table[row[2]] for row in rows] == [classifier.classes[k] for k in predicted]
    assert found["judged_epoch"] == json.loads((out / "adapted" / "model.json").read_text())["epoch"] > 0
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
    assert says(chosen.out, f"epoch {found['judged_epoch']}")


def test_without_the_guard_the_adapted_model_is_kept_and_that_is_said(task: Task) -> None:
    out = task.folder / "no-guard"
    ended = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard"))
    assert ended.code == 0
    assert says(ended.err, "guard", "off", "adapted model is kept")
    assert result(out)["chosen_model"] == "adapted"
    assert result(out)["guard"]["verdict"] == "off"
    quiet = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard", "--quiet"))
    assert "estimated" not in quiet.out, "no range can be given after harm, also where it is kept"
    told = cdtrans(*task.adapt(out, "--lr", "30", "--epochs", "3", "--no-guard", "--json"))
    assert json.loads(told.out)["estimate"] is None


def test_a_loss_that_is_not_finite_is_harm(task: Task) -> None:
    out = task.folder / "diverged"
    ended = cdtrans(*task.adapt(out, "--lr", "1e30"))
    assert ended.code == 3
    assert result(out)["guard"]["findings"][0]["name"] == "training broke off"
    assert says(ended.err, "not finite", "guard stopped")
    assert result(out)["judged_epoch"] == 0
    assert not (out / "adapted").exists()
    assert not (out / "state").exists()
    assert "has no adapted model" in cdtrans("predict", str(out), str(task.target), "--model", "adapted").err


def test_a_hopeless_start_ends_before_stage_2(task: Task) -> None:
    out = task.folder / "hopeless"
    ended = cdtrans(*task.adapt(out, "--source-lr", "0"))
    assert ended.code == 3
    assert not [line for line in log_lines(out) if line["event"] == "epoch" and line["stage"] == "adaptation"]
    assert {f["name"] for f in result(out)["guard"]["findings"]} & {"source not learnt", "domains apart"}


class TestHoldout:
    def test_a_part_of_the_source_is_watched_and_not_trained_on(self, task: Task) -> None:
        out = task.folder / "holdout"
        assert cdtrans(*task.adapt(out, "--holdout", "0.25", "--no-guard")).code == 0
        rows = [row.split(",") for row in (out / "images.csv").read_text().splitlines()[1:]]
        source, held = ([row[2] for row in rows if row[0] == domain] for domain in ("source", "holdout"))
        assert (len(source), len(held)) == (18, 6)
        assert not set(source) & set(held)
        with np.load(out / "pairs" / "round-01.npz") as arrays:
            assert arrays["source"].max() < len(source)
        lines = [line for line in log_lines(out) if line["event"] == "scores"]
        assert all(0 <= line["holdout"] <= 1 for line in lines)
        right = [p.label == Path(name).parent.name for name, p in zip(held, self.said(out, task, held), strict=True)]
        assert lines[-1]["holdout"] == pytest.approx(sum(right) / len(right), abs=1e-4)

    @staticmethod
    def said(out: Path, task: Task, files: list[str]) -> list:
        return load(out, model="last", device="cpu").predict([task.source / name for name in files])

    def test_it_can_be_chosen_by_and_must_be_there_then(self, task: Task) -> None:
        ended = cdtrans(*task.adapt(task.folder / "none", "--select", "holdout"))
        assert ended.code == 2
        assert "--holdout 0.1" in ended.err
        assert not (task.folder / "none").exists()

    @pytest.mark.parametrize(
        ("flags", "said", "warned"),
        [
            ([], ["fewer than 50", "--holdout 0.1"], []),
            (["--holdout", "0.0001"], [], ["--holdout 0.0001", "less than one image", "8"]),
            (["--holdout", "0"], [], []),
        ],
    )
    def test_it_is_said_that_there_is_none(
        self, task: Task, tmp_path: Path, flags: list[str], said: list[str], warned: list[str]
    ) -> None:
        ended = cdtrans(*task.adapt(tmp_path / "run", "--epochs", "1", "--source-epochs", "1", "--no-guard", *flags))
        assert ended.code == 0, ended.err
        for text, words in ((ended.out, said), (ended.err, warned)):
            lines = [line for line in text.splitlines() if "held out" in line]
            assert len(lines) == bool(words)
            assert all(says(line, *words) for line in lines)
