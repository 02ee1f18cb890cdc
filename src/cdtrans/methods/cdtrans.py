"""CDTrans (Xu et al., ICLR 2022): two-way, centre-aware pairs, and three branches that share one transformer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.config import BranchOptions, CDTransOptions
from cdtrans.methods.base import Batch, Method, Round, Sizes
from cdtrans.network.cross_attention import Branches, require_cross_attention, three_branches
from cdtrans.network.network import Network
from cdtrans.pairing.pairs import Domains, Proposals, one_way, union

ONE_WAY = ("one_way_source", "one_way_target")


class ThreeBranches(Method):
    """The branches of CDTrans and their losses, on whatever pairs a subclass plans.

    A pair (s, t) passes three branches: source, target, and source-target, whose queries are the source's and whose
    keys and values are the target's (Eq. 2). All three share the classifier."""

    Options = BranchOptions
    backbones = "ViT"
    options: BranchOptions
    passes = 9.0  # three branches, forward and backward

    @classmethod
    def check(cls, network: Network, name: str) -> None:
        require_cross_attention(network.backbone, name)

    @classmethod
    def expected_pairs(cls, options: Any, sizes: Sizes, rounds: int) -> int:
        """One pair for each image of both domains, if all pairs are kept."""
        return sizes.source_images + sizes.target_images

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        branches = three_branches(
            self.network, batch.x_s, batch.x_t, first_block_residual=self.options.first_block_residual
        )
        return branch_losses(branches, batch.y_s, batch.y_t, self.options)


class CDTrans(ThreeBranches):
    """Cross-attention between paired images."""

    Options = CDTransOptions
    options: CDTransOptions
    paper = "Xu et al. 2022"
    title = "CDTrans: Cross-domain Transformer for Unsupervised Domain Adaptation, ICLR"
    cost = "1"

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        """Pair every image with its nearest neighbour in the other domain (Eq. 3 and 4). A pair is kept if the class of
        the target image's nearest centre (Eq. 5 to 7) is the source image's label."""
        options = self.options
        if options.pairing in ONE_WAY:
            source, target = one_way(domains.neighbours, options.pairing)
        else:
            source, target = union(domains.neighbours, options.mutual_pairs)
        labels, centers = domains.source_labels[source], domains.centers[target]  # [P]
        if options.center_aware:
            kept = labels == centers
            return Proposals(source, target, labels, centers, kept)  # both labels of a kept pair are equal
        # Without the filter, the authors' code uses the class of a target image's nearest centre as its pseudo-label.
        # The rows of Table 5 that do not use centres take the label of its source image.
        return Proposals(source, target, labels, labels if options.target_class == "pair" else centers)


def branch_losses(branches: Branches, y_s: Tensor, y_t: Tensor, options: Any) -> dict[str, Tensor]:
    """Source, target and distillation loss (Eq. 8), or those that the options select, each with weight 1.

    With `loss_source_target: cls`, the source-target branch is classified instead of distilled. Its two images count as
    one class, for which the label of the source image is used, because it is not a pseudo-label."""
    losses = {}
    if options.loss_source == "cls":
        losses["loss_source"] = F.cross_entropy(branches.source.logits, y_s)
    if options.loss_target == "cls":
        losses["loss_target"] = F.cross_entropy(branches.target.logits, y_t)
    teacher = branches.source_target.logits
    if options.loss_source_target == "dtl":
        teacher = teacher.detach() if options.detach_teacher else teacher
        losses["loss_distillation"] = distillation_loss(branches.target.logits, teacher)
    elif options.loss_source_target == "cls":
        losses["loss_source_target"] = F.cross_entropy(teacher, y_s)
    return losses


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Eq. 8 with the minus sign that the paper leaves out: cross-entropy of the student's probabilities p under the
    teacher's q, [B, K] twice -> scalar. Gradient flows through both unless the caller detaches the teacher."""
    return -(teacher.softmax(dim=1) * student.log_softmax(dim=1)).sum(dim=1).mean()
