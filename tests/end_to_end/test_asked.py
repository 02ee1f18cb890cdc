"""A target that lacks a class and shows something strange: questions before any run, answers, a run that uses them."""

import csv
import shutil
from pathlib import Path

import pytest
import yaml

import cdtrans
from cdtrans.measure.matching import read_target
from cdtrans.record.outcome import NO_CLASS
from cdtrans.record.record import RunRecord
from commands import Ended, warm
from labelled_runs import truth
from support import says
from tiny_task import TINY, draw, make_source, make_target, tree

pytestmark = pytest.mark.slow

KEPT = ("backbone", "backbone_args", "pretrained", "crop", "resize", "device", "report", "guard", "seed", "save_every")
SETTINGS = {name: TINY[name] for name in KEPT} | {"recipe": "best", "taps": 2}
STRANGE = 6


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source/, target/ without the class red and with images of another kind, and tiny.yaml."""
    folder = tmp_path_factory.mktemp("asked")
    make_source(folder / "source")
    for path in make_target(folder / "target", each=10).iterdir():
        if truth(path.name) == "red":
            path.unlink()
    for n in range(STRANGE):
        draw(folder / "target" / f"strange-{n}.png", 0, seed=900 + n, shift=6.0)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS | {"cache": str(folder / "cache")}))
    return folder


def run(task: Path, *words: str, **how: object) -> Ended:
    return warm().run([*words], task / "logs", folder=task, **how)  # type: ignore[arg-type]


def answered_by_a_person(questions: Path, answers: Path) -> None:
    with open(questions, newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        strange = row["path"].startswith("strange")
        if not row["path"]:
            row["part"] = "absent" if row["label"] == "red" else "occurs"
        elif row["part"] == "belongs":
            row["label"] = f"{'none' if strange else 'one'} of these classes"
        else:
            row["label"] = "none of these classes" if strange else truth(row["path"])
    with open(answers, "w", newline="") as file:
        out = csv.DictWriter(file, ("path", "label", "part"))
        out.writeheader()
        out.writerows(rows)


@pytest.fixture(scope="module")
def answers(task: Path) -> Path:
    """The file of a person who was asked before any run."""
    ended = run(task, "ask", "source", "target", "--config", "tiny.yaml", "--out", "first", "--budget", "10")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("First a run in 'first' that trains nothing")
    assert says(ended.out, "6 of 10 images to label measure", "whether 3 classes occur", "whether 24 images show one")
    assert not (task / "first" / "report.html").exists()
    answered_by_a_person(task / "first" / "ask" / "labels.csv", task / "answers.csv")
    return task / "answers.csv"


@pytest.fixture(scope="module")
def adapted(task: Path, answers: Path) -> Path:
    assert run(task, *command("second")).code == 0
    return task / "second"


def command(out: str) -> list[str]:
    return [
        *("adapt", "source", "target", "--config", "tiny.yaml", "--out", out, "--set", "length=0.01"),
        *("--answers", "answers.csv"),
    ]


def test_answers_are_stored_and_say_first_what_contradicts_the_run(task: Path, answers: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "first", tmp_path / "first")
    ended = run(task, "answer", str(tmp_path / "first"), "answers.csv")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("1 class does not occur in the target, and this run took it for granted"), ended.out
    places = f"{task / 'source'} {task / 'target'}"
    assert says(ended.out, "belong to none of the classes", "Accuracy of", f"adapt {places} --answers answers.csv")
    stored = RunRecord(tmp_path / "first").answers
    assert stored.occurs == {"blue": True, "green": True, "red": False}
    assert (len(stored.belongs), len(stored.labels)) == (24, 10)
    assert 0 < stored.curve.share < 1
    again = run(task, "ask", str(tmp_path / "first"), "--budget", "5")
    assert says(again.out, "The page asks what 5 images show")


def test_a_run_uses_all_answers(adapted: Path) -> None:
    record = RunRecord(adapted)
    found, curve = record.outcome.class_set, record.outcome.class_set.curve
    assert (found.absent, found.by, found.others) == (("red",), "asked", True)
    assert 0 < curve.share < 0.9
    assert curve.slope > 0
    assert record.outcome.target_labels == len(record.trained_labels) > 0
    assert record.card("adapted").classes == ("blue", "green")
    with open(adapted / "predictions.csv", newline="") as lines:
        assert "red" not in {row["label"] for row in csv.DictReader(lines)}


def test_its_labels_are_measured_as_its_table_has_them(adapted: Path, tmp_path: Path) -> None:
    record = RunRecord(adapted)
    with open(adapted / "predictions.csv", newline="") as lines:
        labels = {row["path"]: row["label"] for row in csv.DictReader(lines)}
    target, model = read_target(record), record.outcome.choice.model
    named = [*record.classes, NO_CLASS]  # -1 is the last
    assert [labels[path] for path in target.paths] == [named[k] for k in target.predicted[model]]
    assert 0 < target.rejected.sum() < len(target)
    lines = [f"{path} {named[max(k, 0)]}" for path, k in zip(target.paths, target.predicted[model], strict=True)]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    copy = Path(shutil.copytree(adapted, tmp_path / "run"))
    measured = cdtrans.evaluate(copy, tmp_path / "list.txt", root=target.root)
    assert measured.accuracy == pytest.approx(1 - target.rejected.mean()), "a rejected image of a class is wrong"
    kept = record.confidences()[record.views.no_class <= record.outcome.class_set.curve.cut]
    assert record.accuracy_by_share()[0].accuracy == pytest.approx(kept.mean())


def test_killed_and_resumed_it_is_the_same_and_finds_the_same_answers(task: Path, adapted: Path) -> None:
    crash = {"name": "state.pt", "when": "after", "nth": 3}
    assert run(task, *command("third"), crash=crash).code == -9
    kept = (task / "answers.csv").read_text()
    (task / "answers.csv").write_text(kept.replace(",red,absent", ",red,occurs"))
    changed = run(task, *command("third"))
    (task / "answers.csv").write_text(kept)
    assert changed.code == 2
    assert says(changed.err, "the answers of --answers")
    assert run(task, *command("third")).code == 0
    assert tree(task / "third") == tree(adapted)


def test_the_next_run_is_not_asked_what_is_known(task: Path, adapted: Path, tmp_path: Path) -> None:
    shutil.copytree(adapted, tmp_path / "run")
    ended = run(task, "ask", str(tmp_path / "run"), "--budget", "5")
    assert says(ended.out, "The page asks what 5 images show")
