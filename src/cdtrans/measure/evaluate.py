"""Score a finished run with target labels: the chosen model, and every epoch if the images are the run's target."""

import json
from collections.abc import Sequence
from csv import DictReader
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cdtrans.config import DeviceName, LargestBad, Root, RunFolder, WhichModel
from cdtrans.errors import CdtransError, counted, nearest
from cdtrans.inputs.images import judge_unreadable
from cdtrans.inputs.scan import LabelledDomain, scan_labelled
from cdtrans.measure.comparison import Comparison
from cdtrans.measure.metrics import CalibrationBin, Scores, calibration, calibration_error, score
from cdtrans.record.files import atomic, intact
from cdtrans.record.run_folder import (
    EVALUATION,
    MODEL_NAMES,
    adapted_epoch,
    choose_command,
    chosen_by_person,
    find_model,
    read_result,
    trained_labels,
)
from cdtrans.record.shapes import Misfit
from cdtrans.runtime.screen import Screen, html_table
from cdtrans.schema import Help, checked
from cdtrans.serving.classifier import Unreadable, labels_warning, load

WITHOUT = "restore it, or delete it to score the chosen model alone"


@dataclass(frozen=True)
class History:
    """Scores after each epoch of adaptation, by target labels. Epoch 0 is the source-only model."""

    scores: tuple[Scores, ...]
    selected: int = 0  # the epoch of the adapted model; 0 if there is none
    comparison: Comparison | None = None  # of that epoch with the source-only model
    whole_target: bool = False  # whether every target image of the run is labelled

    @property
    def accuracy(self) -> tuple[float, ...]:
        return tuple(s.accuracy for s in self.scores)

    @property
    def best_epoch(self) -> int:
        """The best epoch by target labels: an upper bound that is not available without labels."""
        return int(np.argmax(self.accuracy[1:])) + 1 if len(self.scores) > 1 else 0

    def epochs(self) -> dict[str, int]:
        """The epochs that people ask for, by what they are."""
        selected = {"adapted": self.selected} if self.selected else {}
        return {"source_only": 0, **selected, "last_epoch": len(self.scores) - 1, "best_by_labels": self.best_epoch}

    def rows(self) -> list[tuple[str, Scores]]:
        """These epochs in words, with their scores. If there is only one besides the source-only model, it is listed
        once."""
        if len(self.scores) < 2:
            return []
        names = {
            "source_only": "source-only",
            "adapted": f"adapted, epoch {self.selected}",
            "last_epoch": "last epoch",
            "best_by_labels": f"best by labels, epoch {self.best_epoch}",
        }
        shown = ("source_only", "adapted") if len(self.scores) == 2 else tuple(names)
        return [(names[name], self.scores[epoch]) for name, epoch in self.epochs().items() if name in shown]


@dataclass(frozen=True)
class Evaluation:
    """What target labels show about a run's model."""

    scores: Scores
    classes: tuple[str, ...]
    skipped: tuple[Unreadable, ...]
    history: History | None  # None if the labelled images are not the run's own target images
    calibration: tuple[CalibrationBin, ...] = ()
    model: str = ""  # a description of the model
    folder: str = ""  # of the model in the run: source, adapted or last
    trained: int = 0  # labelled images that are left out: the run was trained with their labels
    choice: str = ""  # whether the labels show that the right model was chosen, a sentence; empty if they cannot

    @property
    def accuracy(self) -> float:
        return self.scores.accuracy

    @property
    def comparison(self) -> Comparison | None:
        """The adapted model compared with the source-only one; None without both on the run's own target images."""
        return None if self.history is None else self.history.comparison

    @property
    def whole_target(self) -> bool:
        """Whether every target image is labelled. Then accuracies are exact for this target, and an interval is for new
        images like these."""
        return self.history is not None and self.history.whole_target

    def summary(self) -> dict[str, Any]:
        """The promised keys of `eval --json`. An interval is [low, high], at 95%."""
        summary: dict[str, Any] = {
            "model": self.folder,
            **describe(self.scores, self.classes),
            "skipped": len(self.skipped),
            "trained_with": self.trained,
            "classes": list(self.classes),
            "whole_target": self.whole_target,
        }
        if self.calibration:
            bins = [b._asdict() for b in self.calibration]
            summary["calibration"] = {"error": calibration_error(self.calibration), "bins": bins}
        if self.history is not None:
            every = self.history.scores
            for name, epoch in self.history.epochs().items():
                summary[f"{name}_accuracy"] = every[epoch].accuracy
                summary[f"{name}_accuracy_interval"] = list(every[epoch].interval)
            if self.history.selected:
                summary["adapted_epoch"] = self.history.selected
            summary |= {
                "best_by_labels_epoch": self.history.best_epoch,
                "accuracy_by_epoch": list(self.history.accuracy),
                "accuracy_interval_by_epoch": [list(s.interval) for s in every],
                "class_mean_accuracy_by_epoch": [s.class_mean_accuracy for s in every],
                "per_class_by_epoch": [_without_nan(s.per_class.tolist()) for s in every],
            }
            if self.history.comparison is not None:
                summary["comparison"] = self.history.comparison.summary()
        return summary | ({"choice": self.choice} if self.choice else {})

    def _repr_html_(self) -> str:
        rows = [(self.model, self.scores), *(self.history.rows() if self.history else [])]
        columns = ("model", "accuracy (95% interval)", "class-mean accuracy")
        shown = [(name, *scores.with_intervals()) for name, scores in rows]
        compared = "" if self.comparison is None else self.comparison.sentence
        return html_table(
            counted(self.scores.images, "labelled image"), columns, shown, f"{compared} {self.choice}".strip()
        )

    def by_model(self) -> dict[str, dict[str, Any]]:
        """Source-only and adapted model, for a report that shows whichever is chosen."""
        if self.history is None:
            return {}
        epochs = {"source": 0} | ({"adapted": self.history.selected} if self.history.selected else {})
        every = {name: self.history.scores[epoch] for name, epoch in epochs.items()} | {self.folder: self.scores}
        return {name: describe(scores, self.classes) for name, scores in every.items()}


def describe(scores: Scores, classes: tuple[str, ...]) -> dict[str, Any]:
    """One model's scores as JSON."""
    return {
        "accuracy": scores.accuracy,
        "accuracy_interval": list(scores.interval),
        "class_mean_accuracy": scores.class_mean_accuracy,
        "class_mean_accuracy_interval": list(scores.class_mean_interval),
        "images": scores.images,
        "per_class": dict(zip(classes, _without_nan(scores.per_class.tolist()), strict=True)),
        "per_class_interval": {name: i and list(i) for name, i in zip(classes, scores.per_class_interval, strict=True)},
        "confusion": scores.confusion.tolist(),
    }


def _without_nan(values: Sequence[float]) -> list[float | None]:
    """NaN, for a class without images, becomes None, because JSON has no NaN."""
    return [None if np.isnan(value) else value for value in values]


@checked()
def evaluate(
    run: RunFolder,
    images: Annotated[
        str | Path, Help("Labelled target images: a folder of class folders, or a list of 'path label'.", "LABELLED")
    ],
    *,
    root: Root = None,
    model: WhichModel = "chosen",
    device: DeviceName = "auto",
    max_bad: LargestBad = 0.05,
    quiet: bool = False,
    screen: Screen | None = None,
) -> Evaluation:
    """Score a finished run's model on labelled images: a folder of class folders, or a list of 'path label' lines,
    whose paths start at `root`. `model` is as for `load`. At most the share `max_bad` of the files may be
    unreadable."""
    run, where, screen = Path(run), Path(images), screen or Screen(quiet=quiet)
    folder, _ = find_model(run, model)
    labelled = scan_key(where, None if root is None else Path(root))
    classifier = load(run, model=model, device=device)
    if warning := labels_warning(run, classifier):
        screen.warn(warning)
    true = match_classes(labelled, classifier.classes, where)
    position = {name: i for i, name in enumerate(classifier.classes)}
    predicted, sure, kept, digests, skipped = [], [], [], [], []
    trained, left_out = trained_labels(run), 0
    with screen.track("evaluating", len(labelled)) as task:
        for i, result in enumerate(classifier.stream(labelled.files(), digests=True)):
            if isinstance(result, Unreadable):
                skipped.append(result)
                screen.warn(f"skipped '{result.path}': {result.cause}")
            elif result.digest in trained:
                left_out += 1
            else:
                predicted.append(position[result.label])
                sure.append(result.probability)
                kept.append(i)
                digests.append(result.digest)
            task.advance(1)
    if skipped:
        first = skipped[0]
        screen.warn(judge_unreadable("labelled ", len(skipped), len(labelled), str(first.path), first.cause, max_bad))
    if left_out:
        said = counted(left_out, "image is left out", "images are left out")
        screen.say(f"{said}: the run was trained with their labels (--target-labels).")
    if left_out and not kept:
        raise CdtransError(
            f"The run was trained with the labels of all images of '{where}'; label others to measure it."
        )
    if not kept:
        raise CdtransError(f"No labelled image of '{where}' can be read: restore the files, or choose others.")
    classes = len(classifier.classes)
    labels = np.array(predicted, dtype=np.int64)
    scores, bins = score(true[kept], labels, classes), calibration(np.array(sure), labels == true[kept])
    history = read_history(run, digests, true[kept], classes)
    if history is None and (of_source := len(positions_of(run, "source").keys() & set(digests))):
        are = "is a source image" if of_source == 1 else "are source images"
        screen.warn(
            f"{of_source} of {len(kept):,} labelled images {are} that the run was trained on; for the "
            "accuracy on the target, give labelled target images only."
        )
    evaluation = Evaluation(
        scores, classifier.classes, tuple(skipped), history, bins, classifier.name, folder, left_out
    )
    if history is not None and model == "chosen":
        keep_for_report(run, evaluation, screen)
    compared = evaluation.comparison
    if compared is None:
        return evaluation
    return replace(evaluation, choice=choice_sentence(run, compared, whole_target=evaluation.whole_target))


def keep_for_report(run: Path, evaluation: Evaluation, screen: Screen) -> None:
    """Write evaluation.json for the report, unless there is one of more images. If the run folder is read-only, warn
    instead."""
    before, now = kept_images(run), evaluation.scores.images
    if before > now:
        screen.say(
            f"'{run / EVALUATION}' keeps the earlier evaluation of {counted(before, 'image')} for the report; "
            f"this one, of {now:,}, is only printed. Delete the file to replace it."
        )
        return
    try:
        with atomic(run / EVALUATION) as file:
            content = evaluation.summary() | {"models": evaluation.by_model()}
            file.write((json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        screen.warn(f"The evaluation could not be saved in '{run}' for the report: {error.strerror}.")


def kept_images(run: Path) -> int:
    """The number of images of the saved evaluation; 0 if there is none."""
    try:
        return int(json.loads((run / EVALUATION).read_text(encoding="utf-8"))["images"])
    except Exception:  # damaged, in any way
        return 0


def choice_sentence(run: Path, comparison: Comparison, *, whole_target: bool = False) -> str:
    """What these labels say about the chosen model. If every target image is labelled, chance plays no part."""
    result = read_result(run)
    chosen, better = result["chosen_model"], comparison.better_here if whole_target else comparison.better
    here = " for this target" if whole_target else ""
    if not better and whole_target:
        return "Both models are right equally often, so neither is better on this target."
    if not better:
        return "These labels cannot tell whether the right model was chosen; more labels may."
    if better == chosen:
        return f"The right model was chosen{here}: the {MODEL_NAMES[chosen]} one."
    who = "Your choice" if chosen_by_person(result) else "The guard's choice"
    return f"{who} was wrong{here}: to use the {MODEL_NAMES[better]} model, run '{choose_command(run, better)}'."


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
    position = positions_of(run, "target")
    positions = [position.get(digest) for digest in digests]
    if not positions or None in positions:
        return None
    rows = np.array(positions)
    predictions = []
    for file in sorted((run / "predictions").glob("epoch-*.npz")):
        with intact(file, WITHOUT), np.load(file) as arrays:
            predicted = arrays["predicted"][rows].astype(np.int64)
            if not (predicted.shape == rows.shape and predicted.min() >= 0 and predicted.max() < classes):
                raise Misfit("its predictions are not of these classes")
            predictions.append(predicted)
    if not predictions:  # deleted by the user
        return None
    selected = adapted_epoch(read_result(run))
    selected = selected if selected < len(predictions) else 0
    compared = Comparison.of(predictions[0] == true, predictions[selected] == true) if selected else None
    scores = tuple(score(true, predicted, classes) for predicted in predictions)
    return History(scores, selected, compared, whole_target=len(set(positions)) == len(position))


def positions_of(run: Path, domain: str) -> dict[str, int]:
    """The digest of each image of a domain of the run -> its index; of the target also its index in the predictions."""
    file = run / "images.csv"
    if not file.is_file():  # deleted by the user
        return {}
    with intact(file, WITHOUT), open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return {row["digest"]: int(row["index"]) for row in DictReader(lines) if row["domain"] == domain}
