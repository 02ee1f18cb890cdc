"""A finished run against answer keys of every kind."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cdtrans.inputs.scan import LabelledDomain
from cdtrans.measure.comparison import Comparison, wilson
from cdtrans.measure.evaluate import Evaluation, History, choice_sentence, evaluate, match_classes
from cdtrans.measure.metrics import score
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import load
from stores import Notes
from support import error_says, says
from tiny_task import CLASSES, draw

HISTORY = {"source_only_accuracy", "last_epoch_accuracy", "best_by_labels_accuracy", "best_by_labels_epoch"}


class Heard(Screen):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.warnings_heard: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings_heard.append(text)


def scored(run: Path, where: Path, **options) -> Evaluation:
    return evaluate(run, where, screen=options.pop("screen", Screen(quiet=True)), device="cpu", **options)


def write_key(folder: Path, kinds: tuple[int, ...], each: int = 3, names: tuple[str, ...] = CLASSES) -> Path:
    for kind in kinds:
        for n in range(each):
            draw(folder / names[kind] / f"{n}.png", kind, seed=500 + n, shift=1.0)
    return folder


def true_labels(finished) -> list[str]:
    return [line.rsplit(" ", 1)[1] for line in finished.answers.read_text().splitlines()]


def accuracy_by_epoch(finished, lines: list[str]) -> list[float]:
    """By hand, from images.csv and predictions/, of the images that the lines 'target/NAME label' name."""
    with open(finished.run / "images.csv", newline="") as file:
        index = {row["path"]: int(row["index"]) for row in csv.DictReader(file) if row["domain"] == "target"}
    true = [line.removeprefix("target/").rsplit(" ", 1) for line in lines]
    accuracy = []
    for epoch in range(5):
        with np.load(finished.run / "predictions" / f"epoch-{epoch:03}.npz") as arrays:
            accuracy.append(np.mean([CLASSES[arrays["predicted"][index[path]]] == label for path, label in true]))
    return accuracy


def test_the_scores_are_those_of_the_classifier_s_own_labels(finished) -> None:
    true = true_labels(finished)
    labels = [p.label for p in load(finished.run, device="cpu").predict(sorted(finished.task.target.iterdir()))]
    result = scored(finished.run, finished.answers)
    right = [a == b for a, b in zip(true, labels, strict=True)]
    assert result.scores.images == len(true)
    assert result.scores.accuracy == pytest.approx(np.mean(right))
    assert 0.4 < result.scores.accuracy < 1  # else this proves little
    for name in CLASSES:
        of_class = [r for r, t in zip(right, true, strict=True) if t == name]
        assert result.summary()["per_class"][name] == pytest.approx(np.mean(of_class))
    k, j = CLASSES.index("blue"), CLASSES.index("red")
    assert result.scores.confusion[k, j] == sum((t, p) == ("blue", "red") for t, p in zip(true, labels, strict=True))


def test_images_that_the_run_was_trained_on_are_said(finished, tmp_path: Path) -> None:
    """Their accuracy says nothing about the target."""
    heard = Heard()
    result = scored(finished.run, finished.task.source, screen=heard)
    assert result.history is None
    (warning,) = heard.warnings_heard
    assert says(warning, "24 of 24 labelled images", "source images", "labelled target images")
    heard = Heard()
    scored(finished.run, write_key(tmp_path / "key", kinds=(0, 1, 2)), screen=heard)
    scored(finished.run, finished.answers, screen=heard)
    assert heard.warnings_heard == []


def test_every_epoch_is_scored_from_what_it_left_behind(finished) -> None:
    by_hand = accuracy_by_epoch(finished, finished.answers.read_text().splitlines())
    result = scored(finished.run, finished.answers)
    assert result.history is not None
    assert result.history.accuracy == pytest.approx(by_hand)
    summary = result.summary()
    assert summary["accuracy_by_epoch"] == pytest.approx(by_hand)
    assert summary["source_only_accuracy"] == pytest.approx(by_hand[0])
    assert summary["last_epoch_accuracy"] == pytest.approx(by_hand[-1]) == pytest.approx(summary["accuracy"])
    assert summary["best_by_labels_accuracy"] == pytest.approx(max(by_hand[1:]))
    assert summary["best_by_labels_epoch"] == 1 + int(np.argmax(by_hand[1:]))
    assert len(set(by_hand)) > 2  # else a mixed-up order would not show
    assert summary["class_mean_accuracy_by_epoch"] == [s.class_mean_accuracy for s in result.history.scores]
    assert summary["accuracy_interval_by_epoch"] == [list(wilson(round(21 * a), 21)) for a in by_hand]
    per_class = np.array(summary["per_class_by_epoch"])  # [epochs + 1, classes]
    assert per_class.mean(axis=1) == pytest.approx(summary["class_mean_accuracy_by_epoch"])
    assert per_class[-1].tolist() == [summary["per_class"][name] for name in CLASSES]


def test_calibration_is_of_the_classifier_s_own_probabilities(finished) -> None:
    true = true_labels(finished)
    found = load(finished.run, device="cpu").predict(sorted(finished.task.target.iterdir()))
    right = np.array([p.label == t for p, t in zip(found, true, strict=True)])
    told = scored(finished.run, finished.answers).summary()["calibration"]
    assert sum(b["images"] for b in told["bins"]) == len(true)
    confidence = sum(b["images"] * b["confidence"] for b in told["bins"]) / len(true)
    assert confidence == pytest.approx(np.mean([p.probability for p in found]))
    assert sum(b["images"] * b["accuracy"] for b in told["bins"]) == pytest.approx(right.sum())
    assert 0 < told["error"] < 1


def test_epoch_zero_is_the_source_only_model(finished) -> None:
    source = scored(finished.run, finished.answers, model="source")
    assert source.history is not None
    assert source.scores.accuracy == pytest.approx(source.history.accuracy[0])
    assert source.scores.class_mean_accuracy == pytest.approx(source.history.scores[0].class_mean_accuracy)
    adapted = scored(finished.run, finished.answers, model="adapted")
    assert adapted.scores.accuracy == pytest.approx(source.history.accuracy[-1])
    assert adapted.scores.accuracy != source.scores.accuracy


def test_the_best_epoch_is_never_the_source_only_one() -> None:
    scores = [score(np.zeros(10, dtype=int), (np.arange(10) >= right).astype(int), 2) for right in (9, 2, 5, 5)]
    assert History(tuple(scores)).accuracy == (0.9, 0.2, 0.5, 0.5)
    assert History(tuple(scores)).best_epoch == 2


def test_the_order_of_the_key_does_not_matter(finished, tmp_path: Path) -> None:
    lines = finished.answers.read_text().splitlines(keepends=True)
    shuffled = tmp_path / "shuffled.txt"
    shuffled.write_text("".join(lines[::-1]))
    again = scored(finished.run, shuffled, root=finished.task.folder).summary()
    assert again == scored(finished.run, finished.answers).summary()


def test_a_key_through_links_is_still_the_run_s_own_target(finished, tmp_path: Path) -> None:
    for line in finished.answers.read_text().splitlines():
        path, label = line.rsplit(" ", 1)
        (tmp_path / "key" / label).mkdir(parents=True, exist_ok=True)
        os.symlink(finished.task.folder / path, tmp_path / "key" / label / Path(path).name)
    assert scored(finished.run, tmp_path / "key").summary() == scored(finished.run, finished.answers).summary()


@pytest.mark.parametrize("case", ["all but one", "one class", "a few, some twice"])
def test_a_key_of_some_of_the_target_has_a_history_too(finished, tmp_path: Path, case: str) -> None:
    lines = finished.answers.read_text().splitlines()
    chosen = {"all but one": lines[:-1], "one class": lines[::3], "a few, some twice": lines[:6] + lines[2:4]}[case]
    key = tmp_path / "key.txt"
    key.write_text("".join(f"{line}\n" for line in chosen))
    result = scored(finished.run, key, root=finished.task.folder)
    assert result.history is not None
    assert result.history.accuracy == pytest.approx(accuracy_by_epoch(finished, chosen))
    assert result.history.accuracy[-1] == pytest.approx(result.scores.accuracy)


def test_a_larger_evaluation_is_never_lost(finished, tmp_path: Path) -> None:
    run = shutil.copytree(finished.run, tmp_path / "run")
    (run / "evaluation.json").unlink(missing_ok=True)
    lines = finished.answers.read_text().splitlines(keepends=True)
    key = tmp_path / "key.txt"
    key.write_text("".join(lines[:5]))
    said, kept = [], []
    for where in (key, finished.answers, finished.answers, key):
        notes = Notes()
        assert scored(run, where, root=finished.task.folder, screen=notes).scores.images in (5, 21)
        said.append(notes.said)
        kept.append(json.loads((run / "evaluation.json").read_text()))
    assert [len(texts) for texts in said] == [0, 0, 0, 1]
    assert says(said[3][0], "earlier evaluation of 21 images", "this one, of 5,", "delete")
    assert [x["images"] for x in kept] == [5, 21, 21, 21]
    assert [x["whole_target"] for x in kept] == [False, True, True, True]
    (run / "evaluation.json").write_text("{}")
    scored(run, key, root=finished.task.folder)
    assert json.loads((run / "evaluation.json").read_text())["images"] == 5, "what cannot be read is replaced"


def test_intervals_and_both_models_are_in_what_is_kept(finished, tmp_path: Path) -> None:
    """Also if the guard kept the source-only model: the report shows whichever is chosen."""
    run = shutil.copytree(finished.run, tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"chosen_model": "source", "chosen_epoch": 0}))
    evaluation = scored(run, finished.answers)
    kept, summary = json.loads((run / "evaluation.json").read_text()), evaluation.summary()
    assert summary.pop("choice"), "which is not kept: `cdtrans choose` changes it"
    assert {k: v for k, v in kept.items() if k != "models"} == json.loads(json.dumps(summary))
    assert (summary["model"], summary["adapted_epoch"]) == ("source", result["judged_epoch"])
    assert summary["adapted_accuracy"] == summary["accuracy_by_epoch"][result["judged_epoch"]] > summary["accuracy"]
    for name, accuracy in (("source", summary["accuracy"]), ("adapted", summary["adapted_accuracy"])):
        assert kept["models"][name]["accuracy"] == accuracy
        assert kept["models"][name]["accuracy_interval"] == list(wilson(round(21 * accuracy), 21))
        assert sum(map(sum, kept["models"][name]["confusion"])) == 21
    assert summary["per_class_interval"]["red"] == list(wilson(summary["confusion"][2][2], 7))


@pytest.mark.parametrize(
    ("alone", "chosen", "by", "words"),
    [
        ((9, 1), "source", "run", ["guard's choice was wrong", "choose runs/a adapted"]),
        ((9, 1), "source", "person", ["your choice was wrong", "choose runs/a adapted"]),
        ((1, 9), "adapted", "run", ["guard's choice was wrong", "choose runs/a source"]),
        ((9, 1), "adapted", "run", ["right model was chosen"]),
        ((5, 1), "source", "run", ["cannot tell"]),
    ],
)
def test_labels_say_whether_the_right_model_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[int, int], chosen: str, by: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/result.json").write_text(
        json.dumps({"chosen_model": chosen, "chosen_epoch": 1, "judged_epoch": 1, "chosen_by": by})
    )
    sentence = choice_sentence(Path("runs/a"), Comparison(25, 10, 10 + alone[0] - alone[1], *alone))
    assert says(sentence, *words)


@pytest.mark.parametrize(
    ("alone", "words"),
    [
        ((5, 1), ["guard's choice was wrong for this target", "choose runs/a adapted"]),
        ((1, 5), ["right model was chosen for this target"]),
        ((3, 3), ["neither is better on this target"]),
    ],
)
def test_labels_for_the_whole_target_leave_nothing_to_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[int, int], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/result.json").write_text(json.dumps({"chosen_model": "source", "chosen_epoch": 0}))
    compared = Comparison(25, 10, 10 + alone[0] - alone[1], *alone)
    assert says(choice_sentence(Path("runs/a"), compared, whole_target=True), *words)


@pytest.mark.parametrize("case", ["other images", "the target and one more"])
def test_no_history_from_a_key_with_images_that_are_not_of_the_target(finished, tmp_path: Path, case: str) -> None:
    if case == "other images":
        key = write_key(tmp_path / "key", (0, 1, 2))
    else:
        key, more = tmp_path / "key.txt", draw(tmp_path / "more.png", 0, seed=500, shift=1.0)
        key.write_text(finished.answers.read_text() + f"{more} blue\n")
    result = scored(finished.run, key, root=finished.task.folder)
    assert result.history is None
    assert not {*HISTORY, "per_class_by_epoch"} & result.summary().keys()
    assert result.summary()["accuracy"] == result.scores.accuracy


@pytest.mark.parametrize("tidied", ["predictions", "images.csv"])
def test_a_tidied_run_is_scored_without_history(finished, tmp_path: Path, tidied: str) -> None:
    run = shutil.copytree(finished.run, tmp_path / "run")
    shutil.rmtree(run / tidied) if (run / tidied).is_dir() else (run / tidied).unlink()
    result = scored(run, finished.answers)
    assert result.history is None
    assert result.scores.accuracy == scored(finished.run, finished.answers).scores.accuracy


def test_the_pictures_are_known_by_their_pixels_not_by_their_place(finished, tmp_path: Path) -> None:
    """Copies in other folders under other names have the run's history; a picture that has changed has none."""
    for n, line in enumerate(finished.answers.read_text().splitlines()):
        path, label = line.rsplit(" ", 1)
        (tmp_path / "key" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(finished.task.folder / path, tmp_path / "key" / label / f"copy-{99 - n}.png")
    copies = scored(finished.run, tmp_path / "key")
    assert copies.summary() == scored(finished.run, finished.answers).summary()
    draw(next((tmp_path / "key" / "blue").iterdir()), 0, seed=7)
    assert scored(finished.run, tmp_path / "key").history is None


def test_classes_are_matched_by_name_and_may_be_some_of_the_model_s(finished, tmp_path: Path) -> None:
    """red alone would be class 0 of the key; it is class 2 of the model."""
    result = scored(finished.run, write_key(tmp_path / "key", (2,)))
    assert result.scores.confusion[2].sum() == 3
    assert result.scores.confusion[:2].sum() == 0
    assert result.summary()["per_class"]["blue"] is None
    labels = [p.label for p in load(finished.run, device="cpu").predict(tmp_path / "key")]
    assert result.scores.accuracy == pytest.approx(labels.count("red") / 3)
    assert result.scores.class_mean_accuracy == result.scores.accuracy


def test_labels_become_the_model_s() -> None:
    key = LabelledDomain(Path("r"), ("1", "2", "3"), (1, 0, 1), ("a", "c"))
    assert match_classes(key, ("c", "b", "a"), Path("key")).tolist() == [0, 2, 0]
    with error_says("class 'c'", "'the key'"):
        match_classes(key, ("a", "b"), Path("the key"))


def test_a_class_that_the_model_does_not_know(finished, tmp_path: Path) -> None:
    key = write_key(tmp_path / "key", (0, 1, 2), names=("blue", "gren", "red"))
    with error_says("class 'gren'", "'green'?"):
        scored(finished.run, key)
    key.joinpath("gren").rename(key / "zzz")
    with error_says("'zzz'", "known: blue, green, red"):
        scored(finished.run, key)


def test_unreadable_images_are_skipped_and_counted(finished, tmp_path: Path) -> None:
    key, screen = write_key(tmp_path / "key", (0, 1, 2), each=8), Heard()
    without = scored(finished.run, key)
    (key / "blue" / "000.png").write_bytes(b"")  # the first of its class
    result = scored(finished.run, key, screen=screen)
    assert result.summary()["skipped"] == 1
    assert result.scores.confusion.tolist() == without.scores.confusion.tolist()
    assert says(screen.warnings_heard[0], "skipped", f"'{key / 'blue' / '000.png'}'", "empty")
    assert says(screen.warnings_heard[1], "1 of 25", "cannot be read")
    with error_says("1 of 25", "--max-bad"):
        scored(finished.run, key, max_bad=0.01)


def test_a_key_without_a_readable_image(finished, tmp_path: Path) -> None:
    (tmp_path / "key" / "blue").mkdir(parents=True)
    (tmp_path / "key" / "blue" / "0.png").write_bytes(b"")
    with error_says("no labelled image", "can be read"):
        scored(finished.run, tmp_path / "key", max_bad=1)
