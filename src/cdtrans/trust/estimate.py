"""Estimate the accuracy on the target as a range, without labels.

    logit(accuracy) = LEVEL + AGREEMENT logit(agreement) + STEADY logit(steady) + SHIFT logit(shift) + STAYED stayed

The first two terms say how well the target can be labelled at all: how far the reference labels of `trust.support`
agree with the probe that they began with, and with those of their neighbours. The other two say how far a model is from
there: the shift of its class shares, and the share of its predictions that are still the source-only model's where the
reference says otherwise. No training touches any of these but the model's own predictions, so a method that hardly
moves shows in them.

The five numbers and the width of the range were fitted to three data sets; docs/results/estimate.md has the errors on
the data set that was left out. There is no range unless the guard judges that adaptation helped, because it would be
meaningless for a target with other classes. There is none for few images, because agreement cannot be measured well on
them. In features that are not pretrained, there is none for the source-only model, which they flatter, nor for a method
that serves the reference's own labels."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from cdtrans.errors import counted
from cdtrans.trust.support import NEIGHBOURS, Evidence, Support

LEVEL, AGREEMENT, STEADY, SHIFT, STAYED = -0.56, 0.86, 0.30, -0.32, -1.37
HALF_WIDTH = 0.132  # contains the true accuracy in nine of ten runs
IMAGES, PER_CLASS = 200, NEIGHBOURS  # of the target, and of the source's middle class: with fewer there is no range


class Estimate(NamedTuple):
    """An estimate of a model's accuracy on the target."""

    accuracy: float
    known: bool  # whether the range is reliable
    labels: int  # how many target images to label to measure the accuracy instead

    @property
    def low(self) -> float:
        return max(0.0, self.accuracy - HALF_WIDTH)

    @property
    def high(self) -> float:
        return min(1.0, self.accuracy + HALF_WIDTH)

    def summary(self) -> dict[str, Any]:
        if not self.known:
            labels = counted(self.labels, "label")
            sentence = f"The accuracy on the target is unknown without labels: about {labels} would show it."
            return {"low": None, "high": None, "sentence": sentence}
        sentence = (
            f"Estimated accuracy on the target, without labels: {self.low:.0%} to {self.high:.0%}. In one of "
            "ten runs the true accuracy is outside this range."
        )
        return {"low": round(self.low, 4), "high": round(self.high, 4), "sentence": sentence}


def estimate(support: Support, stayed: float, evidence: Evidence, *, known: bool, labels: int) -> Estimate:
    """The estimate for a model with this support."""
    task = LEVEL + AGREEMENT * _logit(float(evidence.agreement)) + STEADY * _logit(float(evidence.steady))
    x = task + SHIFT * _logit(support.shift) + STAYED * stayed
    return Estimate(1 / (1 + math.exp(-x)), known, labels)


def measurable(source_labels: Tensor, images: int) -> bool:
    """Whether there are enough images for a range, of the source and of the target: neighbours can be of one class, and
    chance moves an agreement by only a few points."""
    counts = source_labels.bincount()
    return images >= IMAGES and int(counts[counts > 0].median()) >= PER_CLASS


def unknown(labels: int) -> Estimate:
    """The estimate where there are no source images to base it on."""
    return Estimate(0.0, known=False, labels=labels)


def _logit(share: float) -> float:
    share = min(max(share, 0.02), 0.985)
    return math.log(share / (1 - share))
