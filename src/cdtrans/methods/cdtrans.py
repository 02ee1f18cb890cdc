"""CDTrans (Xu et al., ICLR 2022): two-way, centre-aware pairs, and one vision transformer run as three branches with
shared weights (section 3.3 of the paper).

    Eq. 1, source branch          softmax(Q_s K_s^T / sqrt(d)) V_s
    Eq. 1, target branch          softmax(Q_t K_t^T / sqrt(d)) V_t
    Eq. 2, source-target branch   softmax(Q_s K_t^T / sqrt(d)) V_t

The source-target branch has no weights of its own, and no queries, keys or values: in every block it takes the source's
queries and the target's keys and values, and then the block's own projection, norm and MLP. So the three branches are
one batch of 3B images, pair by pair: source, source-target, target. Because source and target are neighbours in
memory, their queries are one long query, and one call of attention with the target's keys and values computes both the
source-target and the target branch, without a copy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.config import BranchOptions, CDTransOptions
from cdtrans.methods.base import Batch, Method, Round
from cdtrans.network.blocks import attend, embed, position, project_heads
from cdtrans.network.network import Network, Output
from cdtrans.network.operations import Residual, Stream, add_norm, queries_keys_values
from cdtrans.pairing.pairs import Domains, Proposals, proposed


class Branches(NamedTuple):
    """The head's output for a batch of pairs, one per branch."""

    source: Output
    target: Output
    source_target: Output


class ThreeBranches(Method):
    """The branches of CDTrans and their losses, on whatever pairs a subclass plans."""

    Options = BranchOptions
    backbones = "ViT"
    options: BranchOptions

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        branches = three_branches(self.network, batch.x_s, batch.x_t, self.options.first_block_residual)
        return branch_losses(branches, batch.y_s, batch.y_t, self.options)


class CDTrans(ThreeBranches):
    """Cross-attention between paired images."""

    Options = CDTransOptions
    options: CDTransOptions
    paper = "Xu et al. 2022"
    title = "CDTrans: Cross-domain Transformer for Unsupervised Domain Adaptation, ICLR"
    pairs_mean = (
        "Each image proposes its nearest neighbour in the other domain. A pair is kept if the source image's class is "
        "the class of the target's nearest centre."
    )

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        """Pair every image with its nearest neighbour in the other domain (Eq. 3 and 4). A pair is kept if the class of
        the target image's nearest centre (Eq. 5 to 7) is the source image's label."""
        options = self.options
        source, target = proposed(domains.neighbours, options.pairing, options.mutual_pairs)
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


def three_branches(network: Network, source: Tensor, target: Tensor, first_block_residual: bool = True) -> Branches:
    """[B, 3, H, W] twice -> three outputs. The bottleneck norm gets the branches one by one in the authors' order:
    source, source-target, target, so that the target's statistics come last in the running ones."""
    feature_s, feature_t, feature_c = branch_features(network, source, target, first_block_residual)  # each [B, D]
    out_s, out_c, out_t = map(network.head, (feature_s, feature_c, feature_t))
    return Branches(out_s, out_t, out_c)


def branch_features(
    network: Network, source: Tensor, target: Tensor, first_block_residual: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The backbone's features of the source, target and source-target branch, [B, D] each.

    The authors' code starts the source-target branch from the target's tokens; the paper's footnote has no addition in
    the first block, which is the same as starting from zeros (`first_block_residual=False`)."""
    tokens = embed(network.backbone, torch.stack([source, target], dim=1).flatten(0, 1))  # [2B, N, D]
    tokens_s, tokens_t = tokens.x.unflatten(0, (-1, 2)).unbind(1)
    start = tokens_t if first_block_residual else torch.zeros_like(tokens_t)
    x = torch.stack([tokens_s, start, tokens_t], dim=1).flatten(0, 1)  # [3B, N, D]
    scales = network.drop_path_scales(x)
    features = network.run_blocks(tokens._replace(x=x), scales, cross_attention, together=3)  # [3B, D]
    feature_s, feature_c, feature_t = features.unflatten(0, (-1, 3)).unbind(1)
    return feature_s, feature_t, feature_c


def cross_attention(block: Any, stream: Stream, rope: Tensor | None, rows: int | None) -> tuple[Tensor, Residual]:
    """The attention of all three branches of P pairs (Eq. 1 and 2): [3P, N, D] -> [3P, N, D] and an update of
    [3P, rows, D]. Rotary positions are applied to queries and keys as in self-attention."""
    attn = block.attn
    x, normed = add_norm(stream, block.norm1, cross=True)  # [3P, N, D], and of source and target alone [2P, N, D]
    parts = queries_keys_values(attn, normed, rows=rows, cross=True)
    q_s, k_s, v_s = position(attn, parts[:3], rope, rows)  # [P, N, heads, d]
    q_st, k_t, v_t = position(attn, parts[3:], rope, rows)  # q_st [P, 2N, heads, d]: of source and target in a row
    source = attend(attn, q_s, k_s, v_s)  # Eq. 1  [P, N, heads, d]
    others = attend(attn, q_st, k_t, v_t)  # Eq. 2 for source-target, Eq. 1 for target  [P, 2N, heads, d]
    branches = torch.cat([source, others], dim=1).unflatten(1, (3, -1)).flatten(0, 1)  # [3P, N, heads, d]
    return x, project_heads(block, branches)
