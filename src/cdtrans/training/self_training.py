"""The rows of the paper's Table 5 by other methods: stage 2 without pairs, on pseudo labels after RPLL or MRKLD+LRENT.

The paper "reproduces their pseudo-label generations" on its own baseline and says no more. So here: model, source-only
start, optimiser, schedule, number of epochs and rounds are those of CDTrans, the source's loss too; a method decides
which target images are trained on, with which labels, and by which loss. No image is paired for its likeness: a source
and a target image stand in one step by chance, and no attention crosses between them.

RPLL (Zheng & Yang, Rectifying Pseudo Label Learning via Uncertainty Estimation, IJCV 2021). Taken: every target image
is labelled by the model's own prediction; the rectified loss. Not taken: their stage 1 (adversarial, with memory
regularisation), and the auxiliary classifier that makes the second prediction: a ViT has none, so both are of the one
classifier, in two draws of stochastic depth (with --drop-path 0 they agree, and plain pseudo labels are left).

MRKLD+LRENT (Zou et al., Confidence Regularized Self-Training, ICCV 2019). Taken: class-balanced selection of the
most confident images; soft labels (LRENT, alpha 0.25) and the model regulariser on the same images (MRKLD, weight 0.1),
both weights as in the scripts of their code. Their portion of the images starts at 20 % and grows by 5 points a round
to at most 50 %; here by as much as reaches 50 % in the last round. Not taken: their optimiser and augmentation, and
the growing portion of the source."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.config import Config
from cdtrans.model.network import Network
from cdtrans.pairing.pairs import Search
from cdtrans.training.losses import rectified_loss, uniform_divergence
from cdtrans.training.state import step_seed
from cdtrans.training.step import Losses

FIRST_PORTION, LAST_PORTION = 0.20, 0.50  # of the target images, MRKLD+LRENT
LABEL_ENTROPY = 0.25  # alpha of LRENT: near 0 labels are hard, at 1 they are the balanced prediction itself
MODEL_DIVERGENCE = 0.1  # alpha of MRKLD
NO_STEP = -1  # the number of a draw before the first step, so that it is like none of the epoch's own


class PseudoLabels(NamedTuple):
    labels: Tensor  # [Nt, K]
    selected: Tensor  # [Nt] bool


def self_trained(found: Search, logits: Tensor, epoch: int, config: Config) -> Search:
    """What a search found, with the method's pseudo labels in place of its pairs. `logits` are the target's, [Nt, K].
    The larger of the two sides, source or pseudo-labelled target, is once in an epoch, the other again and again."""
    p = logits.softmax(dim=1)
    if config.self_training == "rpll":
        pseudo = PseudoLabels(F.one_hot(p.argmax(dim=1), p.shape[1]).to(p), torch.ones_like(p[:, 0], dtype=torch.bool))
    else:
        pseudo = balanced_labels(p, portion(epoch, config))
    generator = torch.Generator().manual_seed(step_seed(config.seed, "adaptation", epoch, NO_STEP))
    source, target = torch.arange(len(found.labels)), pseudo.selected.nonzero().squeeze(1).cpu()
    count = max(len(source), len(target)) if len(target) else 0
    source, target = (shuffled(x, count, generator).to(logits.device) for x in (source, target))
    kept = torch.ones_like(source, dtype=torch.bool)
    return replace(found, source=source, target=target, kept=kept, pseudo_labels=pseudo.labels)


def portion(epoch: int, config: Config) -> float:
    """Of the target images that are selected in the round that begins with this epoch."""
    rounds = -(-config.epochs // config.rebuild_every)
    done = (epoch - 1) // config.rebuild_every / max(rounds - 1, 1)
    return FIRST_PORTION + done * (LAST_PORTION - FIRST_PORTION)


def balanced_labels(p: Tensor, share: float) -> PseudoLabels:
    """LRENT's labels (p_k / lambda_k)^(1 / alpha), made to sum to 1, of the images where some p_k reaches its class's
    threshold lambda_k, [Nt, K] -> [Nt, K]. lambda_k is so high that `share` of the images predicted as k reach it; a
    class that nothing is predicted as has 1, the highest there is."""
    confidence, predicted = p.max(dim=1)
    thresholds = torch.ones_like(p[0])  # [K]
    for k in predicted.unique():
        of_class = confidence[predicted == k].sort(descending=True).values
        thresholds[k] = of_class[max(round(share * len(of_class)), 1) - 1]
    weighted = p.log() - thresholds.log()  # [Nt, K]
    return PseudoLabels((weighted / LABEL_ENTROPY).softmax(dim=1), weighted.amax(dim=1) >= 0)


def shuffled(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of these, each once before any comes twice."""
    if not count:
        return indices[:0]
    rounds = [torch.randperm(len(indices), generator=generator) for _ in range(-(-count // len(indices)))]
    return indices[torch.cat(rounds)[:count]]


def self_training_losses(model: Network, method: str) -> tuple[Losses, tuple[str, ...]]:
    """A step's losses and what the log calls them: the source's, and the method's on the target."""

    def rpll(x_s: Tensor, x_t: Tensor, y_s: Tensor, y_t: Tensor) -> tuple[Tensor, ...]:
        source, auxiliary, primary = model.encode_each(x_s, x_t, x_t)
        return F.cross_entropy(source.logits, y_s), rectified_loss(primary.logits, auxiliary.logits, y_t)

    def mrkld_lrent(x_s: Tensor, x_t: Tensor, y_s: Tensor, y_t: Tensor) -> tuple[Tensor, ...]:
        source, target = model.encode_each(x_s, x_t)
        divergence = MODEL_DIVERGENCE * uniform_divergence(target.logits)
        return F.cross_entropy(source.logits, y_s), F.cross_entropy(target.logits, y_t), divergence

    if method == "rpll":
        return rpll, ("loss_source", "loss_target")
    return mrkld_lrent, ("loss_source", "loss_target", "loss_divergence")
