"""The section that an answer key fills: what `cdtrans eval` wrote into the run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdtrans.report.pictures import matrix
from cdtrans.report.record import Record
from cdtrans.report.sections import Curve, Missing, curve

SHOWN_CONFUSION = 40  # classes of a confusion matrix that still fits as a table
SHOWN_CONFUSIONS = 12  # the largest ones, by name


@dataclass(frozen=True)
class Answers:
    """What an answer key said, in the words of `cdtrans eval`."""

    images: int
    accuracy: float
    class_mean_accuracy: float
    source_only: float | None
    curve: Curve | None
    classes: tuple[tuple[str, int, float | None], ...]  # name, images, share right
    matrix: tuple[tuple[int, ...], ...] | None  # None when it is too large for a table
    picture: str | None  # of the matrix, then
    confusions: tuple[tuple[str, str, int], ...]  # true, predicted, images: the largest
    calibration: dict[str, Any] | None


def answers(record: Record) -> Answers | Missing:
    found = record.evaluation
    if found is None or not {"accuracy", "confusion", "classes"} <= found.keys():
        return Missing("No answer key was given. With labels for some target images: cdtrans eval RUN LABELLED.")
    confusion = np.array(found["confusion"])  # [K, K]
    names, per_class = found["classes"], found.get("per_class", {})
    off_diagonal = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    largest = [np.unravel_index(i, confusion.shape) for i in np.argsort(-off_diagonal, axis=None, kind="stable")]
    wrong = [(names[i], names[j], int(confusion[i, j])) for i, j in largest[:SHOWN_CONFUSIONS] if off_diagonal[i, j]]
    by_epoch = found.get("accuracy_by_epoch")
    small = len(confusion) <= SHOWN_CONFUSION
    counts = confusion.sum(axis=1)
    return Answers(
        images=int(found.get("images", counts.sum())),
        accuracy=float(found["accuracy"]),
        class_mean_accuracy=float(found.get("class_mean_accuracy", float("nan"))),
        source_only=found.get("source_only_accuracy"),
        curve=_accuracy_curve(by_epoch, record) if by_epoch and len(by_epoch) > 1 else None,
        classes=tuple((name, int(n), per_class.get(name)) for name, n in zip(names, counts, strict=True)),
        matrix=tuple(map(tuple, confusion.tolist())) if small else None,
        picture=None if small else matrix(confusion / np.maximum(counts, 1)[:, None]),
        confusions=tuple(wrong),
        calibration=found.get("calibration"),
    )


def _accuracy_curve(by_epoch: Sequence[float], record: Record) -> Curve:
    seen = "the training has seen" if record.trained_with_key else "training and choosing never saw"
    words = ("True accuracy", f"by the answer key, which {seen}")
    return curve({e: {"accuracy": value} for e, value in enumerate(by_epoch)}, "accuracy", words, record)
