"""Estimate the accuracy on the target as a range, without labels.

    logit(accuracy) = LEVEL + START logit(support of the source-only model) + GAIN (support gained) + SHIFT logit(shift)

with support and shift as in `trust.support`. The four numbers and the width of the range were fitted to runs on two
data sets; docs/results/estimate.md has the errors on the data set that was left out. There is no range unless the
guard judges that adaptation helped, because it would be meaningless for a target with other classes. There is none for
few images either, because support cannot be measured well on them."""

import math
from typing import Any, NamedTuple

from cdtrans.trust.support import NEIGHBOURS, Evidence, Support

LEVEL, START, GAIN, SHIFT = 0.01, 0.74, 4.35, -0.62
HALF_WIDTH = 0.136  # contains the true accuracy in seven of eight runs
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
            sentence = (
                f"The accuracy on the target is unknown without labels: about {self.labels} labels would show it."
            )
            return {"low": None, "high": None, "sentence": sentence}
        sentence = (
            f"Estimated accuracy on the target, without labels: {self.low:.0%} to {self.high:.0%}. In one of "
            "eight runs the true accuracy is outside this range."
        )
        return {"low": round(self.low, 4), "high": round(self.high, 4), "sentence": sentence}


def estimate(support: Support, source_only: Support, *, known: bool, labels: int) -> Estimate:
    """The estimate for a model with this support; `source_only` is the support of the source-only model."""
    gain = support.mean - source_only.mean
    x = LEVEL + START * _logit(source_only.mean) + GAIN * gain + SHIFT * _logit(support.shift)
    return Estimate(1 / (1 + math.exp(-x)), known, labels)


def measurable(evidence: Evidence, images: int) -> bool:
    """Whether there are enough images for a range: the nearest ten source images can be of one class, and chance moves
    the target's support by only a few points. With fewer images, a third of the ranges miss the true accuracy."""
    counts = evidence.source_labels.bincount()
    return images >= IMAGES and int(counts[counts > 0].median()) >= PER_CLASS


def unknown(labels: int) -> Estimate:
    """The estimate where there are no source images to base it on."""
    return Estimate(0.0, known=False, labels=labels)


def _logit(share: float) -> float:
    share = min(max(share, 0.02), 0.985)
    return math.log(share / (1 - share))
