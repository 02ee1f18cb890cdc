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

from torch import Tensor

from cdtrans.record.outcome import Interval, Support
from cdtrans.trust.support import NEIGHBOURS, Evidence

LEVEL, AGREEMENT, STEADY, SHIFT, STAYED = -0.56, 0.86, 0.30, -0.32, -1.37
HALF_WIDTH = 0.132  # contains the true accuracy in nine of ten runs
LEAST_IMAGES, PER_CLASS = 200, NEIGHBOURS  # fewest images of the target, and of the source's middle class, for a range


def accuracy_range(support: Support, stayed: float, evidence: Evidence) -> Interval:
    """The range for a model with this support."""
    accuracy = expected_accuracy(support, stayed, evidence)
    return Interval(max(0.0, accuracy - HALF_WIDTH), min(1.0, accuracy + HALF_WIDTH))


def expected_accuracy(support: Support, stayed: float, evidence: Evidence) -> float:
    """The middle of the range."""
    task = LEVEL + AGREEMENT * _logit(float(evidence.agreement)) + STEADY * _logit(float(evidence.steady))
    return 1 / (1 + math.exp(-(task + SHIFT * _logit(support.shift) + STAYED * stayed)))


def measurable(source_labels: Tensor, images: int) -> bool:
    """Whether there are enough images for a range, of the source and of the target: neighbours can be of one class, and
    chance moves an agreement by only a few points."""
    counts = source_labels.bincount()
    return images >= LEAST_IMAGES and int(counts[counts > 0].median()) >= PER_CLASS


def _logit(share: float) -> float:
    share = min(max(share, 0.02), 0.985)
    return math.log(share / (1 - share))
