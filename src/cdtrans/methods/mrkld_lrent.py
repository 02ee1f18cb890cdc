"""MRKLD+LRENT (Zou et al. 2019): class-balanced self-training with soft labels and a regularised network.

As in rpll.py, network, source-only start, optimiser and schedule are those of CDTrans, because the paper's Table 5
compares pseudo-labels and nothing else.

Taken from the paper: soft labels (LRENT, alpha 0.25) of the images whose label costs less than none, and the
regulariser on the same images (MRKLD, weight 0.1), both weights as in the scripts of their code. With the thresholds
lambda_k of the classes, the best label of an image and its cost are

    y_k = (p_k / lambda_k)^(1 / alpha) / Z,   -sum_k y_k log(p_k / lambda_k) + alpha sum_k y_k log y_k = -alpha log Z

and the cost of no label is 0, so an image is used if Z = sum_k (p_k / lambda_k)^(1 / alpha) is more than 1: where some
p_k reaches its threshold, as in plain class-balanced self-training, or several come close. Their portion of the images
starts at 20% and grows by 5 points a round to at most 50%; here it grows by as much as reaches 50% in the last
round.

Not taken: their optimiser and augmentation, and the growing portion of the source. They round the number of images that
sets a threshold down, and a class with none has the threshold 1; among millions of pixels that is rare, but a class of
four images would never be trained on, so here at least one image of each predicted class counts."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Round
from cdtrans.pairing.pairs import Domains, Proposals
from cdtrans.schema import option


class MRKLDLRENT(Method):
    """Confidence-regularised self-training."""

    @dataclass(frozen=True)
    class Options:
        first_portion: float = option(0.20, "Share of the target images used in the first round.", minimum=0, maximum=1)
        last_portion: float = option(0.50, "Share of the target images used in the last round.", minimum=0, maximum=1)
        label_entropy: float = option(
            0.25,
            "Alpha of LRENT: at 0 labels are hard, at 1 the balanced prediction.",
            minimum=0.01,
            maximum=1,
        )
        divergence: float = option(0.1, "Alpha of MRKLD: weight of KL(uniform || prediction).", minimum=0)

    options: Options
    paper = "Zou et al. 2019"
    title = "Confidence Regularized Self-Training, ICCV"
    cost = "0.74"

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        options = self.options
        portion = options.first_portion + round.progress * (options.last_portion - options.first_portion)
        pseudo = balanced_labels(domains.target.logits.softmax(dim=1), portion, options.label_entropy)
        selected = pseudo.selected.nonzero().squeeze(1)
        return Proposals.at_random(domains, selected, pseudo.labels, generator, coupled=True)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        divergence = self.options.divergence * uniform_divergence(target.logits)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_target": F.cross_entropy(target.logits, batch.y_t),
            "loss_divergence": divergence,
        }


class PseudoLabels(NamedTuple):
    labels: Tensor  # [Nt, K]
    selected: Tensor  # [Nt] bool


def balanced_labels(p: Tensor, share: float, alpha: float) -> PseudoLabels:
    """LRENT's labels (p_k / lambda_k)^(1 / alpha) / Z and whether Z is at least 1 (it is rounded to 1 where a certain
    prediction sets the threshold), [Nt, K] -> [Nt, K]. lambda_k is so high that `share` of the images predicted as k
    reach it; a class that nothing is predicted as has 1, the highest there is."""
    confidence, predicted = p.max(dim=1)
    thresholds = torch.ones_like(p[0])  # [K]
    for k in predicted.unique():
        of_class = confidence[predicted == k].sort(descending=True).values
        thresholds[k] = of_class[max(round(share * len(of_class)), 1) - 1]
    weighted = (p.log() - thresholds.log()) / alpha  # [Nt, K]
    return PseudoLabels(weighted.softmax(dim=1), weighted.logsumexp(dim=1) >= 0)


def uniform_divergence(logits: Tensor) -> Tensor:
    """KL(uniform || prediction), [B, K] -> scalar: large for confident predictions."""
    return -logits.log_softmax(dim=1).mean() - math.log(logits.shape[1])
