"""The section with target labels: what `cdtrans eval` wrote into the run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdtrans.report.pictures import matrix
from cdtrans.report.record import Record
from cdtrans.report.sections import Curve, Missing, curve

TABLE_CLASSES = 40  # up to so many classes the confusion matrix is a table, beyond it an image
SHOWN_CONFUSIONS = 12  # the most frequent ones, by name


@dataclass(frozen=True)
class LabelledResults:
    """The results of `cdtrans eval` with target labels."""

    images: int
    accuracy: float
    class_mean_accuracy: float
    source_only: float | None
    curve: Curve | None
    classes: tuple[tuple[str, int, float | None], ...]  # name, images, accuracy
    matrix: tuple[tuple[int, ...], ...] | None  # None if it is too large for a table
    picture: str | None  # of the matrix, if it is too large for a table
    confusions: tuple[tuple[str, str, int], ...]  # true, predicted, images: the largest
    calibration: dict[str, Any] | None


def labelled_results(record: Record) -> LabelledResults | Missing:
    evaluation = record.evaluation
    if evaluation is None or not {"accuracy", "confusion", "classes"} <= evaluation.keys():
        return Missing("No target labels were given. With labels for some target images: cdtrans eval RUN LABELLED.")
    confusion = np.array(evaluation["confusion"])  # [K, K]
    names, per_class = evaluation["classes"], evaluation.get("per_class", {})
    off_diagonal = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    largest = [np.unravel_index(i, confusion.shape) for i in np.argsort(-off_diagonal, axis=None, kind="stable")]
    wrong = [(names[i], names[j], int(confusion[i, j])) for i, j in largest[:SHOWN_CONFUSIONS] if off_diagonal[i, j]]
    by_epoch = evaluation.get("accuracy_by_epoch")
    small = len(confusion) <= TABLE_CLASSES
    counts = confusion.sum(axis=1)
    return LabelledResults(
        images=int(evaluation.get("images", counts.sum())),
        accuracy=float(evaluation["accuracy"]),
        class_mean_accuracy=float(evaluation.get("class_mean_accuracy", float("nan"))),
        source_only=evaluation.get("source_only_accuracy"),
        curve=_accuracy_curve(by_epoch, record) if by_epoch and len(by_epoch) > 1 else None,
        classes=tuple((name, int(n), per_class.get(name)) for name, n in zip(names, counts, strict=True)),
        matrix=tuple(map(tuple, confusion.tolist())) if small else None,
        picture=None if small else matrix(confusion / np.maximum(counts, 1)[:, None]),
        confusions=tuple(wrong),
        calibration=evaluation.get("calibration"),
    )


def _accuracy_curve(by_epoch: Sequence[float], record: Record) -> Curve:
    use = "which training used" if record.trained_with_labels else "which neither training nor selection used"
    heading = ("True accuracy", f"by target labels, {use}")
    return curve({e: {"accuracy": value} for e, value in enumerate(by_epoch)}, "accuracy", heading, record)
