"""Score a finished run with target labels: the chosen model, and every epoch if the images are the run's target."""

import json
from collections.abc import Sequence
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.data.domains import LabelledDomain, scan_labelled
from cdtrans.data.images import judge_unreadable
from cdtrans.errors import CdtransError, nearest
from cdtrans.evaluation.metrics import CalibrationBin, Scores, calibration, calibration_error, score
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import Unreadable, key_warning, load
from cdtrans.storage.files import atomic
from cdtrans.storage.run_folder import EVALUATION, find_model


@dataclass(frozen=True)
class History:
    """Accuracy after each epoch of adaptation, by target labels. Epoch 0 is the source-only model."""

    accuracy: tuple[float, ...]
    class_mean_accuracy: tuple[float, ...]
    per_class: tuple[tuple[float, ...], ...] = ()  # of each epoch, in the order of the model's classes

    @property
    def best_epoch(self) -> int:
        """The best epoch by target labels: an upper bound that is not available without labels."""
        return int(np.argmax(self.accuracy[1:])) + 1 if len(self.accuracy) > 1 else 0


@dataclass(frozen=True)
class Evaluation:
    scores: Scores
    classes: tuple[str, ...]
    skipped: tuple[Unreadable, ...]
    history: History | None  # None if the labelled images are not the run's own target images
    calibration: tuple[CalibrationBin, ...] = ()
    model: str = ""  # a description of the model

    def summary(self) -> dict[str, Any]:
        """The promised keys of `eval --json`."""
        per_class = dict(zip(self.classes, _without_nan(self.scores.per_class.tolist()), strict=True))
        summary: dict[str, Any] = {
            "accuracy": self.scores.accuracy,
            "class_mean_accuracy": self.scores.class_mean_accuracy,
            "images": self.scores.images,
            "skipped": len(self.skipped),
            "per_class": per_class,
            "confusion": self.scores.confusion.tolist(),
            "classes": list(self.classes),
        }
        if self.calibration:
            bins = [b._asdict() for b in self.calibration]
            summary["calibration"] = {"error": calibration_error(self.calibration), "bins": bins}
        if self.history is not None:
            best = self.history.best_epoch
            summary |= {
                "source_only_accuracy": self.history.accuracy[0],
                "last_epoch_accuracy": self.history.accuracy[-1],
                "best_by_labels_accuracy": self.history.accuracy[best],
                "best_by_labels_epoch": best,
                "accuracy_by_epoch": list(self.history.accuracy),
                "class_mean_accuracy_by_epoch": list(self.history.class_mean_accuracy),
                "per_class_by_epoch": [_without_nan(values) for values in self.history.per_class],
            }
        return summary


def _without_nan(values: Sequence[float]) -> list[float | None]:
    """NaN, for a class without images, becomes None, because JSON has no NaN."""
    return [None if np.isnan(value) else value for value in values]


def evaluate(
    run: Path,
    where: Path,
    *,
    screen: Screen,
    root: Path | None = None,
    model: str = "chosen",
    device: str = "auto",
    max_bad: float = 0.05,
) -> Evaluation:
    """Score a run's model on labelled images."""
    find_model(run, model)
    labelled = scan_key(where, root)
    classifier = load(run, model=model, device=device)
    if warning := key_warning(run, classifier):
        screen.warn(warning)
    true = match_classes(labelled, classifier.classes, where)
    position = {name: i for i, name in enumerate(classifier.classes)}
    predicted, sure, kept, digests, skipped = [], [], [], [], []
    with screen.track("evaluating", len(labelled)) as task:
        for i, result in enumerate(classifier.stream(labelled.files(), digests=True)):
            if isinstance(result, Unreadable):
                skipped.append(result)
                screen.warn(f"skipped '{result.path}': {result.cause}")
            else:
                predicted.append(position[result.label])
                sure.append(result.probability)
                kept.append(i)
                digests.append(result.digest)
            task.advance(1)
    if skipped:
        first = skipped[0]
        screen.warn(judge_unreadable("labelled ", len(skipped), len(labelled), str(first.path), first.cause, max_bad))
    if not kept:
        raise CdtransError(f"None of the {len(labelled)} labelled images of '{where}' can be read.")
    classes = len(classifier.classes)
    labels = np.array(predicted, dtype=np.int64)
    scores, bins = score(true[kept], labels, classes), calibration(np.array(sure), labels == true[kept])
    history = read_history(run, digests, true[kept], classes)
    evaluation = Evaluation(scores, classifier.classes, tuple(skipped), history, bins, classifier.name)
    if history is not None and model == "chosen":
        keep_for_report(run, evaluation, screen)
    return evaluation


def keep_for_report(run: Path, evaluation: Evaluation, screen: Screen) -> None:
    """Write evaluation.json, which the report shows as made with target labels. A read-only run folder is evaluated
    too, with a warning."""
    previous, now = kept_images(run), evaluation.scores.images
    try:
        with atomic(run / EVALUATION) as file:
            file.write((json.dumps(evaluation.summary(), indent=2) + "\n").encode())
    except OSError as error:
        screen.warn(f"The evaluation could not be saved in '{run}' for the report: {error.strerror}.")
    else:
        if previous is not None and previous > now:
            screen.say(f"This replaces an earlier evaluation in the report, of {previous} images instead of {now}.")


def kept_images(run: Path) -> int | None:
    """The number of images of the saved evaluation, if there is one."""
    try:
        return int(json.loads((run / EVALUATION).read_text(encoding="utf-8"))["images"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def scan_key(where: Path, root: Path | None) -> LabelledDomain:
    """Labelled target images. Errors say so, because the source is labelled too."""
    try:
        return scan_labelled(where, root, allow_one_class=True)
    except CdtransError as error:
        raise CdtransError(f"The labelled images cannot be used: {error}") from error


def match_classes(labelled: LabelledDomain, classes: tuple[str, ...], where: Path) -> np.ndarray:
    """The labels as indices into the model's classes, matched by name."""
    unknown = [name for name in labelled.classes if name not in classes]
    if unknown:
        raise CdtransError(
            f"The class {unknown[0]!r} of '{where}' is unknown to the model: {nearest(unknown[0], list(classes))}"
        )
    order = [classes.index(name) for name in labelled.classes]
    return np.array([order[label] for label in labelled.labels], dtype=np.int64)


def read_history(run: Path, digests: list[str], true: np.ndarray, classes: int) -> History | None:
    """Score the saved predictions of every epoch, if the labelled images all belong to the run's own target. Images are
    matched by their pixels, so their files may have moved."""
    position = target_positions(run)
    positions = [position.get(digest) for digest in digests]
    if not positions or None in positions:
        return None
    rows = np.array(positions)
    scores = []
    for file in sorted((run / "predictions").glob("epoch-*.npz")):
        with np.load(file) as arrays:
            scores.append(score(true, arrays["predicted"][rows].astype(np.int64), classes))
    if not scores:  # deleted by the user
        return None
    return History(
        tuple(s.accuracy for s in scores),
        tuple(s.class_mean_accuracy for s in scores),
        tuple(tuple(s.per_class.tolist()) for s in scores),
    )


def target_positions(run: Path) -> dict[str, int]:
    """The digest of each target image of the run -> its index in the predictions."""
    file = run / "images.csv"
    if not file.is_file():  # deleted by the user
        return {}
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return {row["digest"]: int(row["index"]) for row in DictReader(lines) if row["domain"] == "target"}
