"""MRKLD+LRENT (Zou et al. 2019): class-balanced self-training with soft labels and a regularised network.

LRENT makes soft labels (alpha 0.25), MRKLD regularises the images that have one (weight 0.1). With the thresholds
lambda_k of the classes, the best label of an image and its cost are

    y_k = (p_k / lambda_k)^(1 / alpha) / Z,   -sum_k y_k log(p_k / lambda_k) + alpha sum_k y_k log y_k = -alpha log Z

and the cost of no label is 0, so an image is used if Z = sum_k (p_k / lambda_k)^(1 / alpha) is more than 1: where some
p_k reaches its threshold, or several come close. The portion of images used grows from 20 to 50% over the rounds.

As in rpll.py, everything else is that of CDTrans. Changed: at least one image of each predicted class counts; they
round down, which would leave out a class of four images. Not taken: the growing portion of the source."""

import math
from dataclasses import dataclass

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
        label_entropy: float = option(0.25, "Alpha of LRENT: at 0 labels are hard.", minimum=0.01, maximum=1)
        divergence: float = option(0.1, "Alpha of MRKLD: weight of KL(uniform || prediction).", minimum=0)

    options: Options
    paper = "Zou et al. 2019"
    title = "Confidence Regularized Self-Training, ICCV"

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        options = self.options
        portion = options.first_portion + round.progress * (options.last_portion - options.first_portion)
        labels, selected = balanced_labels(domains.target.logits.softmax(dim=1), portion, options.label_entropy)
        return Proposals.at_random(domains, selected.nonzero().squeeze(1), labels, generator, coupled=True)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_target": F.cross_entropy(target.logits, batch.y_t),
            "loss_divergence": self.options.divergence * uniform_divergence(target.logits),
        }


def balanced_labels(p: Tensor, share: float, alpha: float) -> tuple[Tensor, Tensor]:
    """LRENT's labels (p_k / lambda_k)^(1 / alpha) / Z and whether Z is at least 1 (it is rounded to 1 where a certain
    prediction sets the threshold), [Nt, K] -> [Nt, K], [Nt]. lambda_k is so high that `share` of the images predicted
    as k reach it; a class that nothing is predicted as has 1, the highest there is."""
    confidence, predicted = p.max(dim=1)
    thresholds = torch.ones_like(p[0])  # [K]
    for k in predicted.unique():
        of_class = confidence[predicted == k].sort(descending=True).values
        thresholds[k] = of_class[max(round(share * len(of_class)), 1) - 1]
    weighted = (p.log() - thresholds.log()) / alpha  # [Nt, K]
    return weighted.softmax(dim=1), weighted.logsumexp(dim=1) >= 0


def uniform_divergence(logits: Tensor) -> Tensor:
    """KL(uniform || prediction), [B, K] -> scalar: large for confident predictions."""
    return -logits.log_softmax(dim=1).mean() - math.log(logits.shape[1])
