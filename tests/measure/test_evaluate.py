"""A finished run against labelled images of every kind."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdtrans.errors import CdtransError
from cdtrans.inputs.scan import LabelledDomain
from cdtrans.measure.intervals import wilson
from cdtrans.measure.matching import match_classes
from cdtrans.measure.measured import calibration, evaluate, score_predictions
from cdtrans.record.outcome import Measured
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import load
from support import Notes, raises, says
from tiny_task import CLASSES, draw


def scored(run: Path, where: Path, **options: Any) -> Measured:
    return evaluate(run, where, screen=options.pop("screen", Screen(quiet=True)), device="cpu", **options)


def write_labelled(folder: Path, kinds: tuple[int, ...], each: int = 3, names: tuple[str, ...] = CLASSES) -> Path:
    for kind in kinds:
        for n in range(each):
            draw(folder / names[kind] / f"{n}.png", kind, seed=500 + n, shift=1.0)
    return folder


def true_labels(finished) -> list[str]:
    return [line.rsplit(" ", 1)[1] for line in finished.answers.read_text().splitlines()]


def accuracy_by_epoch(finished, lines: list[str]) -> list[float]:
    """By hand, of the images that the lines 'target/NAME label' name."""
    record = RunRecord(finished.run)
    index = {path: i for i, path in enumerate(record.images.paths["target"])}
    true = [line.removeprefix("target/").rsplit(" ", 1) for line in lines]
    return [
        float(np.mean([CLASSES[record.predictions(epoch).predicted[index[path]]] == label for path, label in true]))
        for epoch in range(5)
    ]


def test_the_scores_are_those_of_the_classifier_s_own_labels(finished) -> None:
    true = true_labels(finished)
    predictions = load(finished.run, device="cpu").predict(sorted(finished.task.target.iterdir()))
    measured = scored(finished.run, finished.answers)
    right = np.array([p.label == t for p, t in zip(predictions, true, strict=True)])
    assert measured.images == measured.target == len(true)
    assert measured.whole_target
    assert measured.accuracy == pytest.approx(right.mean())
    assert 0.4 < measured.accuracy < 1  # else this proves little
    for name, accuracy in zip(CLASSES, measured.scores.per_class, strict=True):
        assert accuracy == pytest.approx(right[[t == name for t in true]].mean())
    blue_as_red = sum((t, p.label) == ("blue", "red") for t, p in zip(true, predictions, strict=True))
    assert measured.scores.confusion[CLASSES.index("blue")][CLASSES.index("red")] == blue_as_red
    bins = measured.calibration
    assert sum(b.images for b in bins) == len(true)
    confidence = sum(b.images * b.confidence for b in bins) / len(true)
    assert confidence == pytest.approx(np.mean([p.probability for p in predictions]))
    assert sum(b.images * b.accuracy for b in bins) == pytest.approx(right.sum())
    assert 0 < measured.calibration_error < 1


def test_source_images_are_noticed(finished, tmp_path: Path) -> None:
    """Their accuracy says nothing about the target."""
    heard = Notes()
    assert scored(finished.run, finished.task.source, screen=heard).target is None
    assert says(heard.warnings[0], "24 of 24 labelled images", "source images")
    heard = Notes()
    scored(finished.run, write_labelled(tmp_path / "labelled", kinds=(0, 1, 2)), screen=heard)
    scored(finished.run, finished.answers, screen=heard)
    assert heard.warnings == []


def test_every_epoch_and_both_models_are_scored_and_kept(finished, tmp_path: Path) -> None:
    """Also if the run uses the source-only model: the report shows whichever is chosen."""
    by_hand = accuracy_by_epoch(finished, finished.answers.read_text().splitlines())
    run = shutil.copytree(finished.run, tmp_path / "run")
    outcome = RunRecord(run).outcome
    result = json.loads((run / "result.json").read_text())
    choice = {"model": "source", "epoch": 0, "by": "person"}
    (run / "result.json").write_text(json.dumps(result | {"choice": choice}))
    measured = scored(run, finished.answers)
    assert RunRecord(run).evaluation == measured
    assert [s.accuracy for s in measured.epochs] == pytest.approx(by_hand)
    assert len(set(by_hand)) > 2  # else a mixed-up order would not show
    assert measured.best_epoch == 1 + int(np.argmax(by_hand[1:]))
    assert (measured.model, measured.adapted_epoch) == ("source", outcome.adapted_epoch)
    for name, accuracy in (("source", by_hand[0]), ("adapted", by_hand[outcome.adapted_epoch])):
        scores = measured.models[name]
        assert scores.accuracy == pytest.approx(accuracy)
        assert scores.interval == wilson(round(21 * accuracy), 21)
        assert sum(map(sum, scores.confusion)) == sum(scores.images) == 21
    summary = json.loads(json.dumps(measured.summary()))
    assert summary["accuracy_by_epoch"] == pytest.approx(by_hand)
    named = ("source_only_accuracy", "adapted_accuracy", "last_epoch_accuracy", "best_by_labels_accuracy")
    wanted = [by_hand[0], by_hand[outcome.adapted_epoch], by_hand[-1], max(by_hand[1:])]
    assert [summary[name] for name in named] == pytest.approx(wanted)
    compared = measured.comparison
    gained = 21 * (by_hand[outcome.adapted_epoch] - by_hand[0])
    assert compared.adapted_alone - compared.source_alone == pytest.approx(gained)
    assert compared.better == "adapted", "by the whole target, whatever chance may explain"


def test_models_are_scored_by_name(finished) -> None:
    source = scored(finished.run, finished.answers, model="source")
    adapted = scored(finished.run, finished.answers, model="adapted")
    assert source.accuracy == pytest.approx(source.epochs[0].accuracy)
    assert adapted.accuracy == pytest.approx(source.epochs[-1].accuracy) != source.accuracy


def test_the_best_epoch_is_never_the_source_only_one() -> None:
    every = [
        score_predictions(np.zeros(10, dtype=int), (np.arange(10) >= right).astype(int), 2) for right in (9, 2, 5, 5)
    ]
    measured = Measured("source", ("a", "b"), 10, 10, True, {"source": every[0]}, tuple(every))
    assert [s.accuracy for s in measured.epochs] == [0.9, 0.2, 0.5, 0.5]
    assert measured.best_epoch == 2


@pytest.mark.parametrize("case", ["another order", "links", "copies elsewhere"])
def test_images_are_known_by_their_pixels(finished, tmp_path: Path, case: str) -> None:
    lines = finished.answers.read_text().splitlines(keepends=True)
    labelled = tmp_path / "labelled"
    if case == "another order":
        labelled.write_text("".join(lines[::-1]))
    for n, line in enumerate(lines if case != "another order" else ()):
        path, label = line.split()
        (labelled / label).mkdir(parents=True, exist_ok=True)
        place = labelled / label / (Path(path).name if case == "links" else f"copy-{99 - n}.png")
        (os.symlink if case == "links" else shutil.copy)(finished.task.folder / path, place)
    root = finished.task.folder if case == "another order" else None
    assert scored(finished.run, labelled, root=root) == scored(finished.run, finished.answers)
    if case == "copies elsewhere":
        draw(next((labelled / "blue").iterdir()), 0, seed=7)
        assert scored(finished.run, labelled).target is None, "an image that has changed is another"


@pytest.mark.parametrize("case", ["all but one", "one class", "a few, some twice"])
def test_labels_of_some_of_the_target_have_a_history_too(finished, tmp_path: Path, case: str) -> None:
    lines = finished.answers.read_text().splitlines()
    chosen = {"all but one": lines[:-1], "one class": lines[::3], "a few, some twice": lines[:6] + lines[2:4]}[case]
    (tmp_path / "labelled.txt").write_text("".join(f"{line}\n" for line in chosen))
    measured = scored(finished.run, tmp_path / "labelled.txt", root=finished.task.folder)
    assert [s.accuracy for s in measured.epochs] == pytest.approx(accuracy_by_epoch(finished, chosen))
    assert measured.epochs[-1].accuracy == pytest.approx(measured.accuracy)
    assert (measured.target, measured.whole_target) == (21, False)


def test_a_larger_evaluation_is_never_lost(finished, tmp_path: Path) -> None:
    run = shutil.copytree(finished.run, tmp_path / "run")
    (run / "evaluation.json").unlink(missing_ok=True)
    few = tmp_path / "few.txt"
    few.write_text("".join(finished.answers.read_text().splitlines(keepends=True)[:5]))
    notes, kept = [], []
    for where in (few, finished.answers, finished.answers, few):
        screen = Notes()
        assert scored(run, where, root=finished.task.folder, screen=screen).images in (5, 21)
        notes.append(len(screen.lines))
        kept.append(json.loads((run / "evaluation.json").read_text())["images"])
    assert notes == [0, 0, 0, 1]
    assert kept == [5, 21, 21, 21]
    (run / "evaluation.json").write_text("{}")
    scored(run, few, root=finished.task.folder)
    assert RunRecord(run).evaluation.images == 5, "a damaged file is replaced"


@pytest.mark.parametrize("case", ["other images", "the target and one more"])
def test_other_images_than_the_target_measure_one_model_alone(finished, tmp_path: Path, case: str) -> None:
    if case == "other images":
        labelled = write_labelled(tmp_path / "labelled", (0, 1, 2))
    else:
        labelled, more = tmp_path / "labelled.txt", draw(tmp_path / "more.png", 0, seed=500, shift=1.0)
        labelled.write_text(finished.answers.read_text() + f"{more} blue\n")
    measured = scored(finished.run, labelled, root=finished.task.folder)
    assert (measured.target, measured.epochs, measured.comparison) == (None, (), None)
    assert measured.models.keys() == {"adapted"}
    assert "source_only_accuracy" not in measured.summary()


def test_without_its_predictions_a_run_has_no_history(finished, tmp_path: Path) -> None:
    run = shutil.copytree(finished.run, tmp_path / "run")
    shutil.rmtree(run / "predictions")
    measured = scored(run, finished.answers)
    assert measured.epochs == ()
    assert measured.models == scored(finished.run, finished.answers).models
    assert RunRecord(run).evaluation == measured


def test_classes_are_matched_by_name_and_may_be_some_of_the_model_s(finished, tmp_path: Path) -> None:
    """red alone would be class 0 of the labels; it is class 2 of the model."""
    measured = scored(finished.run, write_labelled(tmp_path / "labelled", (2,)))
    assert measured.scores.images == (0, 0, 3)
    assert measured.scores.per_class[0] is None
    labels = [p.label for p in load(finished.run, device="cpu").predict(tmp_path / "labelled")]
    assert measured.scores.class_mean_accuracy == measured.accuracy == pytest.approx(labels.count("red") / 3)
    domain = LabelledDomain(Path("r"), ("1", "2", "3"), (1, 0, 1), ("a", "c"))
    assert match_classes(domain, ("c", "b", "a"), Path("labels")).tolist() == [0, 2, 0]
    (tmp_path / "labelled" / "red").rename(tmp_path / "labelled" / "rde")
    with raises("class-unknown"):
        scored(finished.run, tmp_path / "labelled")


def test_unreadable_images_are_skipped_and_counted(finished, tmp_path: Path) -> None:
    labelled, screen = write_labelled(tmp_path / "labelled", (0, 1, 2), each=8), Notes()
    without = scored(finished.run, labelled)
    (labelled / "blue" / "000.png").write_bytes(b"")  # the first of its class
    measured = scored(finished.run, labelled, screen=screen)
    assert (measured.skipped, measured.scores) == (1, without.scores)
    assert says(screen.warnings[0], "skipped", f"'{labelled / 'blue' / '000.png'}'", "empty")
    assert says(screen.warnings[1], "1 of 25", "cannot be read")
    with pytest.raises(CdtransError, match="1 of 25"):
        scored(finished.run, labelled, max_bad=0.01)
    (tmp_path / "empty" / "blue").mkdir(parents=True)
    (tmp_path / "empty" / "blue" / "0.png").write_bytes(b"")
    with raises("no-readable-image"):
        scored(finished.run, tmp_path / "empty", max_bad=1)


def test_both_rules_of_the_authors(golden) -> None:
    g = golden("metrics")
    scores = score_predictions(g["labels"].numpy(), g["logits"].argmax(1).numpy(), g["logits"].shape[1])
    assert sum(scores.images) == 452
    assert scores.accuracy == pytest.approx(float(g["OfficeHome/accuracy"]), abs=1e-12)
    assert scores.class_mean_accuracy == pytest.approx(float(g["VisDA/accuracy"]), abs=1e-12)
    assert scores.accuracy != pytest.approx(scores.class_mean_accuracy, abs=1e-3)


def test_scores_by_hand() -> None:
    scores = score_predictions(np.array([0, 0, 0, 0, 2]), np.array([0, 0, 1, 2, 2]), 3)
    assert scores.confusion == ((2, 1, 1), (0, 0, 0), (0, 0, 1))  # true classes down, predicted across
    assert (scores.accuracy, scores.per_class, scores.class_mean_accuracy) == (3 / 5, (0.5, None, 1.0), 0.75)
    with_none = score_predictions(np.array([0, 0, 0, 0, 2, -1]), np.array([0, 0, 1, 2, 2, 2]), 3)
    assert (with_none.accuracy, with_none.confusion) == (3 / 6, scores.confusion), "no class is wrong"
    assert score_predictions(np.array([-1]), np.array([0]), 3).accuracy == 0
    rejected = score_predictions(np.array([-1, -1, 0, 1]), np.array([-1, 0, -1, 1]), 3)
    assert (rejected.accuracy, rejected.images, rejected.right) == (0.5, (1, 1, 0), (0, 1, 0))


def test_calibration_by_hand() -> None:
    sure = np.array([0.82, 0.88, 1.0, 0.95, 0.31])
    bins = calibration(sure, np.array([True, False, True, True, True]))
    assert [b.images for b in bins] == [1, 2, 2]  # from 0.3, from 0.8, from 0.9; 1.0 is in the last
    assert [b.confidence for b in bins] == pytest.approx([0.31, 0.85, 0.975])
    assert [b.accuracy for b in bins] == [1.0, 0.5, 1.0]
    scores = score_predictions(np.array([0]), np.array([0]), 1)
    measured = Measured("source", ("a",), 5, None, False, {"source": scores}, calibration=bins)
    assert measured.calibration_error == pytest.approx((0.69 + 2 * 0.35 + 2 * 0.025) / 5)
