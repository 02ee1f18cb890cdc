"""SHOT (Liang et al. 2020): the source's classifier stays as it is, and the features move to where it is certain.

With target images x, predictions p of them, their mean p' over the batch and H(p) = -sum_k p_k log p_k, the feature
extractor alone is trained. No source image is used, and none need be given (`--source-model`):

    min over G   mean H(p) - H(p') + 0.3 CE(x, y)

The first two terms are information maximisation: each prediction is certain, and all together are varied (SHOT-IM has
these alone). The labels y are those of the nearest class centres at the start of a round, as in CDTrans (Eq. 5 to 7).

As in the authors' code the bottleneck norm is in training mode while the classifier is frozen, and an epoch is every
target image once. Not taken: their classifier (weight-normed, 256 features), optimiser, and new labels in every epoch,
unless with --rebuild-every 1."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Round, Sizes
from cdtrans.methods.minent import entropy
from cdtrans.network.network import Head, Network
from cdtrans.pairing.pairs import Domains, Proposals, shuffled
from cdtrans.schema import option

ENTROPY_EPSILON = 1e-5  # the authors'


class SHOTIM(Method):
    """Information maximisation, fixed classifier."""

    @dataclass(frozen=True)
    class Options:
        information: float = option(1.0, "Weight of information maximisation.", minimum=0)

    options: Options
    paper = "Liang et al. 2020"
    title = "Do We Really Need to Access the Source Data? Source Hypothesis Transfer, ICML"
    needs_source = False

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        assert isinstance(network.head, Head), "stage 1 leaves a plain one"
        network.head.classifier.requires_grad_(False)

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        """Every target image once, with its centre's class. There need not be source images beside them."""
        target = torch.arange(self.sizes.target_images, device=domains.centers.device)
        if not self.sizes.source_images:
            return Proposals(torch.full_like(target, -1), target, domains.centers, domains.centers, coupled=False)
        source = shuffled(torch.arange(self.sizes.source_images), len(target), generator).to(target.device)
        return Proposals(source, target, domains.source_labels[source], domains.centers, coupled=False)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        return self.information(self.network.encode(batch.x_t).logits)

    def information(self, logits: Tensor) -> dict[str, Tensor]:
        weight = self.options.information
        return {"loss_entropy": weight * entropy(logits).mean(), "loss_diversity": -weight * entropy_of_mean(logits)}


class SHOT(SHOTIM):
    """Information maximisation, centre labels, fixed classifier."""

    @dataclass(frozen=True)
    class Options(SHOTIM.Options):
        labels: float = option(0.3, "Weight of the cross-entropy with the centres' labels.", minimum=0)
        labels_from: int = option(1, "Round from which labels are used (the authors on VisDA: 2).", minimum=1)

    options: Options

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        used = round.number >= self.options.labels_from
        weight = torch.full((self.sizes.target_images,), float(used), device=domains.centers.device)
        return replace(super().plan(domains, round, generator), weight=weight)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        logits = self.network.encode(batch.x_t).logits
        taught = batch.weight * F.cross_entropy(logits, batch.y_t, reduction="none")  # [B]
        return {"loss_target": self.options.labels * taught.mean(), **self.information(logits)}


def entropy_of_mean(logits: Tensor) -> Tensor:
    """H(p') of the mean prediction, [B, K] -> scalar."""
    mean = logits.float().softmax(dim=1).mean(dim=0)  # [K]
    return -(mean * (mean + ENTROPY_EPSILON).log()).sum()
