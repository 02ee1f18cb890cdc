"""The section with target labels: what `cdtrans eval` wrote into the run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import numpy as np

from cdtrans.record.run_folder import choose_command
from cdtrans.reporting.pictures import matrix
from cdtrans.reporting.record import Record
from cdtrans.reporting.sections import Curve, Missing, curve

TABLE_CLASSES = 40  # up to so many classes the confusion matrix is a table, beyond it an image
SHOWN_CONFUSIONS = 12  # the most frequent ones, by name


@dataclass(frozen=True)
class LabelledResults:
    """The results of `cdtrans eval` with target labels, of the chosen model."""

    images: int
    whole_target: bool  # whether every target image is labelled
    accuracy: float
    interval: tuple[float, float] | None  # None in an older run, as below
    class_mean_accuracy: float
    class_mean_interval: tuple[float, float] | None
    source_only: float | None
    adapted: float | None  # of the adapted model, chosen or not
    compared: str  # the two beside each other, in a sentence; empty in an older run
    better: str  # the model that labels show to be better: source, adapted or neither
    command: str  # that chooses the better one, if it is not chosen
    curve: Curve | None
    classes: tuple[tuple[str, int, float | None], ...]  # name, images, accuracy
    matrix: tuple[tuple[int, ...], ...] | None  # None if it is too large for a table
    picture: str | None  # of the matrix, if it is too large for a table
    confusions: tuple[tuple[str, str, int], ...]  # true, predicted, images: the largest
    calibration: dict[str, Any] | None  # None if another model was chosen since


def labelled_results(record: Record) -> LabelledResults | Missing:
    evaluation = record.evaluation
    if evaluation is None or not {"accuracy", "confusion", "classes"} <= evaluation.keys():
        if record.answers is not None:
            return Missing(
                f"No labels were given to 'cdtrans eval', which measures every class: {eval_command(record)}"
            )
        return Missing(f"No target labels were given. To measure the accuracy: {eval_command(record)}")
    chosen = record.result["chosen_model"]
    model = evaluation.get("models", {}).get(chosen, evaluation)  # older evaluations have one model, the chosen one
    confusion = np.array(model["confusion"])  # [K, K]
    names, per_class = evaluation["classes"], model.get("per_class", {})
    off_diagonal = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    largest = [np.unravel_index(i, confusion.shape) for i in np.argsort(-off_diagonal, axis=None, kind="stable")]
    wrong = [(names[i], names[j], int(confusion[i, j])) for i, j in largest[:SHOWN_CONFUSIONS] if off_diagonal[i, j]]
    by_epoch = evaluation.get("accuracy_by_epoch")
    compared = evaluation.get("comparison", {})
    better = compared.get("better", "")
    small = len(confusion) <= TABLE_CLASSES
    counts = confusion.sum(axis=1)
    return LabelledResults(
        images=int(model.get("images", counts.sum())),
        whole_target=bool(evaluation.get("whole_target")),
        accuracy=float(model["accuracy"]),
        interval=_interval(model.get("accuracy_interval")),
        class_mean_accuracy=float(model.get("class_mean_accuracy", float("nan"))),
        class_mean_interval=_interval(model.get("class_mean_accuracy_interval")),
        source_only=evaluation.get("source_only_accuracy"),
        adapted=evaluation.get("adapted_accuracy"),
        compared=compared.get("sentence", ""),
        better=better,
        command=choose_command(record.run, better) if better and better != chosen else "",
        curve=_accuracy_curve(by_epoch, record) if by_epoch and len(by_epoch) > 1 else None,
        classes=tuple((name, int(n), per_class.get(name)) for name, n in zip(names, counts, strict=True)),
        matrix=tuple(map(tuple, confusion.tolist())) if small else None,
        picture=None if small else matrix(confusion / np.maximum(counts, 1)[:, None]),
        confusions=tuple(wrong),
        calibration=evaluation.get("calibration") if evaluation.get("model", chosen) == chosen else None,
    )


def eval_command(record: Record) -> str:
    return f"cdtrans eval {quote(str(record.run))} LABELLED"


def _interval(limits: Sequence[float] | None) -> tuple[float, float] | None:
    return None if limits is None else (float(limits[0]), float(limits[1]))


def _accuracy_curve(by_epoch: Sequence[float], record: Record) -> Curve:
    use = "which training used" if record.trained_with_labels else "which neither training nor selection used"
    heading = ("True accuracy", f"by target labels, {use}")
    return curve({e: {"accuracy": value} for e, value in enumerate(by_epoch)}, "accuracy", heading, record)
