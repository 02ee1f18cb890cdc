"""Scores of predictions against target labels."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cdtrans.measure.comparison import Interval, class_mean_interval, wilson


@dataclass(frozen=True)
class Scores:
    """Predictions against true labels. Rows of the confusion matrix are true classes, columns predicted ones."""

    confusion: np.ndarray  # int [K, K]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Overall accuracy: Office-31, Office-Home, DomainNet."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def per_class(self) -> np.ndarray:
        """The accuracy of each true class, NaN for a class without images: [K]."""
        counts = self.confusion.sum(axis=1)
        return np.where(counts > 0, np.diag(self.confusion) / np.maximum(counts, 1), np.nan)

    @property
    def class_mean_accuracy(self) -> float:
        """The mean over the classes that have images: VisDA-2017."""
        return float(np.nanmean(self.per_class))

    @property
    def interval(self) -> Interval:
        """The interval of the overall accuracy."""
        return wilson(int(np.trace(self.confusion)), self.images)

    @property
    def class_mean_interval(self) -> Interval:
        return class_mean_interval(self.confusion)

    @property
    def per_class_interval(self) -> list[Interval | None]:
        """None for a class without images."""
        counts = self.confusion.sum(axis=1).tolist()
        return [wilson(int(self.confusion[k, k]), n) if n else None for k, n in enumerate(counts)]

    def with_intervals(self) -> tuple[str, str]:
        """The accuracy and the class-mean accuracy for a table."""
        class_mean = self.class_mean_interval.around(self.class_mean_accuracy)
        return self.interval.around(self.accuracy), class_mean


CALIBRATION_BINS = 10  # of equal width, a common choice


class CalibrationBin(NamedTuple):
    """The images of similar confidence."""

    confidence: float  # their mean
    accuracy: float
    images: int


def calibration(confidence: np.ndarray, right: np.ndarray) -> tuple[CalibrationBin, ...]:
    """[N] confidences and [N] whether each is correct -> the bins with images, the lowest confidence first."""
    place = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    bins = [place == k for k in np.unique(place)]
    return tuple(CalibrationBin(float(confidence[b].mean()), float(right[b].mean()), int(b.sum())) for b in bins)


def calibration_error(bins: tuple[CalibrationBin, ...]) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy, weighted by images."""
    images = sum(b.images for b in bins)
    return sum(b.images * abs(b.confidence - b.accuracy) for b in bins) / images


def score(true: np.ndarray, predicted: np.ndarray, classes: int) -> Scores:
    """[N] true and [N] predicted classes -> scores."""
    confusion = np.bincount(true * classes + predicted, minlength=classes * classes)
    return Scores(confusion.reshape(classes, classes))
