"""What labelled images can show: 95% intervals of an accuracy, and a test of two models on the same images."""

from dataclasses import dataclass
from math import exp, lgamma, log, sqrt
from typing import NamedTuple

import numpy as np

from cdtrans.errors import counted

Z = 1.959964  # quantile of the normal distribution: 95% lie between -Z and Z
SIGNIFICANT = 0.05  # the same level, for the test
EXACT = (
    "Every target image is labelled, so accuracies are exact for this target; the 95% intervals are for new images like"
    " these."
)


class Interval(NamedTuple):
    low: float
    high: float

    def around(self, accuracy: float) -> str:
        """81.0% (60.0 to 92.3)"""
        return f"{accuracy:.1%} ({100 * self.low:.1f} to {100 * self.high:.1f})"


def wilson(right: int, images: int) -> Interval:
    """Wilson's score interval of a proportion, which holds for few images and near 0 and 1 too."""
    share, n = right / images, images
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def class_mean_interval(confusion: np.ndarray) -> Interval:
    """Of the mean accuracy of the classes that have images: the distances to the limits of each class's Wilson interval
    add up as squares (Zou & Donner 2008)."""
    counts = [(int(row[k]), int(row.sum())) for k, row in enumerate(confusion) if row.sum()]
    shares = [right / images for right, images in counts]
    limits = [wilson(right, images) for right, images in counts]
    mean = sum(shares) / len(shares)
    down = sqrt(sum((share - limit.low) ** 2 for share, limit in zip(shares, limits, strict=True))) / len(shares)
    up = sqrt(sum((limit.high - share) ** 2 for share, limit in zip(shares, limits, strict=True))) / len(shares)
    return Interval(max(0.0, mean - down), min(1.0, mean + up))


def sign_test(wins: int, losses: int) -> float:
    """McNemar's test, exact and two-sided: how likely so uneven a split of the images on which only one of two models
    is right would be if neither were better."""
    differ, fewer = wins + losses, min(wins, losses)
    logs = (lgamma(differ + 1) - lgamma(k + 1) - lgamma(differ - k + 1) - differ * log(2) for k in range(fewer + 1))
    return min(1.0, 2 * sum(map(exp, logs)))


@dataclass(frozen=True)
class Comparison:
    """The adapted model compared with the source-only one, on the same labelled images."""

    images: int
    source_right: int
    adapted_right: int
    adapted_alone: int  # images that only the adapted model has right
    source_alone: int

    @classmethod
    def of(cls, source: np.ndarray, adapted: np.ndarray) -> "Comparison":
        """[N] whether each model is right on each image."""
        alone = int((adapted & ~source).sum()), int((source & ~adapted).sum())
        return cls(len(source), int(source.sum()), int(adapted.sum()), *alone)

    @property
    def p_value(self) -> float:
        return sign_test(self.adapted_alone, self.source_alone)

    @property
    def better(self) -> str:
        """The model that is better than the other by more than chance explains: source, adapted or neither."""
        if self.p_value >= SIGNIFICANT:
            return ""
        return "adapted" if self.adapted_alone > self.source_alone else "source"

    @property
    def sentence(self) -> str:
        p = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.2g}"
        beyond = "more than chance explains" if self.better else "which chance may explain"
        return (
            f"On the same {counted(self.images, 'labelled image')} the adapted model is right "
            f"{counted(self.adapted_right, 'time')} and the source-only model {counted(self.source_right, 'time')}, "
            f"{beyond} (paired test, {p})."
        )

    @property
    def better_here(self) -> str:
        """The model that is better on these images, whether or not by chance: source, adapted or neither."""
        if self.adapted_right == self.source_right:
            return ""
        return "adapted" if self.adapted_right > self.source_right else "source"

    def summary(self) -> dict[str, float | int | str]:
        return {
            "adapted_right": self.adapted_right,
            "source_right": self.source_right,
            "adapted_alone": self.adapted_alone,
            "source_alone": self.source_alone,
            "p_value": self.p_value,
            "better": self.better,
            "sentence": self.sentence,
        }
