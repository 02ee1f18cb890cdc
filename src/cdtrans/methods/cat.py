"""rRevGrad+CAT (Deng et al. 2019): features in clusters by class, the clusters of both domains at one place, and a
critic that sees confident target images alone.

With d(i, j) = |f_i - f_j|^2 / D, labels y, and the mean features c_k of a class in the batch,

    S(f, y) = mean over i, j of  d(i, j) if y_i = y_j, else max(0, m - d(i, j))
    L_cat   = S(f_s, y_s) + S(f_t, y_t) + mean over classes in both batches of |c_s,k - c_t,k|^2 / D
    min  CE(source) + lambda_2 L_cat + 0.2 L_domain

L_domain is DANN's loss over target images with a confidence above 0.9. The target's labels and confidences come from a
second pass of the network, in eval mode. lambda_2 is 0 in the first eighth of the run, then rises as exp(-10 (1 - u))
with u from 0 to 1 over the next quarter: the authors' 5,000, 15,000 and 40,000 steps as parts of a run.

Changed: the margin m is 3 instead of 30, because f is not the logit of their network for digits but the feature after
the bottleneck norm, whose d(i, j) is 2 on average. Not taken: the paper's averaged teacher, as in their code."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch
from cdtrans.methods.dann import DANN, domain_loss, rising
from cdtrans.methods.mstn import class_means
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option

LATE, SLOW = 1 / 8, 1 / 4  # parts of the run before lambda_2 rises, and while it does


class CAT(DANN):
    """Clusters by class at one place in both domains."""

    @dataclass(frozen=True)
    class Options(DANN.Options):
        trade_off: float = option(0.2, "Weight of the critic's loss.", minimum=0)
        hidden: int = option(500, "Width of the critic's two hidden layers.", minimum=1)
        clustering: float = option(1.0, "What lambda_2, the weight of the clusters, rises to.", minimum=0)
        margin: float = option(3.0, "Features of other classes are pushed m apart.", minimum=0)
        confidence: float = option(0.9, "The critic sees target images above this.", minimum=0, maximum=1)

    options: Options
    paper = "Deng et al. 2019"
    title = "Cluster Alignment with a Teacher for Unsupervised Domain Adaptation, ICCV"

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        options = self.options
        taught = gather(self.network.encode_in_eval_mode(batch.x_t).logits.float())
        confidence, y_t = taught.softmax(dim=1).max(dim=1)  # [B] each
        source, target = self.network.encode_together(batch.x_s, batch.x_t)
        f_s, f_t = source.feature.float(), target.feature.float()
        strength = options.largest * rising(progress, options.ramp)
        domain = domain_loss(self.critic, f_s, f_t, strength, (1.0, selected(confidence > options.confidence)))
        clusters = clustering(f_s, batch.y_s, options.margin) + clustering(f_t, y_t, options.margin)
        moved = alignment(f_s, batch.y_s, f_t, y_t, self.sizes.classes)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_domain": options.trade_off * domain,
            "loss_clusters": options.clustering * late(progress) * (clusters + moved),
        }


def late(progress: Tensor) -> Tensor:
    """lambda_2"""
    rise = ((progress - LATE) / SLOW).clamp(max=1)
    return torch.where(progress >= LATE, torch.exp(-10 * (1 - rise)), 0.0)


def clustering(features: Tensor, labels: Tensor, margin: float) -> Tensor:
    """S: [B, D], [B] -> scalar."""
    distance = (features[:, None] - features[None]).square().mean(dim=2)  # [B, B]
    return torch.where(labels[:, None] == labels[None], distance, (margin - distance).relu()).mean()


def alignment(f_s: Tensor, y_s: Tensor, f_t: Tensor, y_t: Tensor, classes: int) -> Tensor:
    """The squared distance of a class's mean features in both domains, mean over the classes that both have."""
    (of_s, in_s), (of_t, in_t) = (class_means(f, y, classes) for f, y in ((f_s, y_s), (f_t, y_t)))
    shared = (in_s & in_t).squeeze(1).float()  # [K]
    return (shared * (of_s - of_t).square().mean(dim=1)).sum() / shared.sum().clamp(min=1)


def selected(chosen: Tensor) -> Tensor:
    """Weights of images, [B], with which a mean over all is one over the chosen, or 0 if there are none."""
    weights = chosen.float()
    return weights / weights.mean().clamp(min=1 / len(weights))
