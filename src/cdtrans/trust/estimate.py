"""How good is it? A range for the accuracy on the target, made without labels.

Before adaptation there are three opinions on a target image that come about in different ways: the source-only
classifier's, the label of the nearest source image, and the class of the nearest centre. Adaptation starts from them
and makes up its own. Where the final prediction is what all three had said, it is mostly right; where none of them had
said it, it may be a discovery or an error. So the shares of agreement bound the accuracy, loosely. This is a rule of
thumb that was checked, not a theorem: docs/results/estimate.md says how often the truth was inside.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.trust.impression import Impression

SIGMAS = 2.0  # of the error that the finite number of images makes


class Estimate(NamedTuple):
    """A range for the accuracy, and the shares of agreement it is made of."""

    low: float
    high: float
    unanimous: float  # share of images on which every opinion is the final prediction
    supported: float  # share on which one of them is
    harm: bool = False  # the opinions cannot be trusted themselves: nothing can be said from below

    def summary(self) -> dict[str, float | str | bool]:
        sentence = (
            f"Estimated accuracy on the target, without labels: {self.low:.0%} to {self.high:.0%}. On some data the "
            "truth lies outside."
        )
        if self.harm:
            sentence = (
                "The accuracy on the target cannot be estimated after what the guard found: it may be anything up to "
                f"{self.high:.0%}."
            )
        return {"low": round(self.low, 4), "high": round(self.high, 4), "harm": self.harm, "sentence": sentence}


def estimate(before: Impression, predicted: Tensor, *, harm: bool = False) -> Estimate:
    """The range for a model that predicts `predicted` [Nt]. From below: what all support, less half of what only some
    do. From above: what any supports, and half of the rest, since a good run finds what nobody had said. A source-only
    model is not asked for its opinion of itself."""
    opinions = [before.label_nearest_target, before.centers]
    if not torch.equal(predicted, before.predicted):
        opinions.append(before.predicted)
    agree = torch.stack([opinion == predicted for opinion in opinions])  # [opinions, Nt]
    unanimous, supported = (float(x.double().mean()) for x in (agree.all(dim=0), agree.any(dim=0)))
    low, high = unanimous - (supported - unanimous) / 2, (1 + supported) / 2
    low, high = max(0.0, low - _noise(low, predicted)), min(1.0, high + _noise(high, predicted))
    return Estimate(0.0 if harm else low, high, unanimous, supported, harm)


def _noise(share: float, predicted: Tensor) -> float:
    """Of a share of so many images."""
    share = min(1.0, max(0.0, share))
    return float(SIGMAS * (share * (1 - share) / max(1, len(predicted))) ** 0.5)
