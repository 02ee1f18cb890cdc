"""Scores of predictions against an answer key."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scores:
    """What an answer key says of predictions. Rows of the confusion matrix are true classes, columns predicted ones."""

    confusion: np.ndarray  # int [K, K]

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of images that are right: Office-31, Office-Home, DomainNet."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def per_class(self) -> np.ndarray:
        """Share of each true class that is right, NaN for a class without images: [K]."""
        counts = self.confusion.sum(axis=1)
        return np.where(counts > 0, np.diag(self.confusion) / np.maximum(counts, 1), np.nan)

    @property
    def class_mean_accuracy(self) -> float:
        """Mean over the classes that have images: VisDA-2017."""
        return float(np.nanmean(self.per_class))


def score(true: np.ndarray, predicted: np.ndarray, classes: int) -> Scores:
    """[N] true and [N] predicted classes -> scores."""
    confusion = np.bincount(true * classes + predicted, minlength=classes * classes)
    return Scores(confusion.reshape(classes, classes))
