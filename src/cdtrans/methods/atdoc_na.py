"""ATDOC-NA (Liang et al. 2021): the labels of target images are a vote of their neighbours in a memory bank.

The bank has a feature F_j of length 1 and a prediction Q_j for every target image j. For a target image i with feature
f, N_i are the 5 entries with the largest f F_j, itself left out, and

    q_i = mean of Q_j over N_i,   y_i = argmax q_i,   w_i = max q_i
    min over the network of  CE(source) + c (t/T) sum_i w_i CE(z_i, y_i) / sum_i w_i

After a step the batch is encoded again in eval mode and replaces its entries: F_i = f / |f|, Q_ik = p_ik^2 / sum over
the batch of p_jk^2. The bank starts with random F and Q = 1/K. All is as in the authors' code but for their bottleneck:
f is the feature after the bottleneck norm."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.network import Network
from cdtrans.pairing.neighbours import unit_rows
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option


class ATDOCNA(Method):
    """Labels by a vote of neighbours in a memory bank."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(0.2, "Weight c of the target's loss at the end of its linear rise.", minimum=0)
        neighbours: int = option(5, "Entries of the bank that vote.", minimum=1)
        label_smoothing: float = option(0.1, "Label smoothing on the source.", minimum=0, maximum=0.99)

    options: Options
    paper = "Liang et al. 2021"
    title = "Domain Adaptation with Auxiliary Target Domain-Oriented Classifier, CVPR"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.bank = MemoryBank(sizes, network.dim, options.neighbours)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        labels, weights = self.bank.vote(target.feature.detach(), batch.i_t)
        errors = F.cross_entropy(target.logits, labels, reduction="none")  # [B]
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s, label_smoothing=self.options.label_smoothing),
            "loss_target": self.options.trade_off * progress * (weights * errors).sum() / weights.sum(),
        }

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        self.bank.remember(self.network, batch)


class MemoryBank(nn.Module):
    """The network's last output for every target image."""

    features: Tensor  # F  [Nt, D]
    predictions: Tensor  # Q  [Nt, K]

    def __init__(self, sizes: Sizes, dim: int, neighbours: int) -> None:
        super().__init__()
        self.neighbours = min(neighbours, sizes.target_images)
        self.register_buffer("features", unit_rows(torch.rand(sizes.target_images, dim)))
        self.register_buffer("predictions", torch.full((sizes.target_images, sizes.classes), 1 / sizes.classes))

    def vote(self, features: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """[B, D] of the images with these indices -> their labels and how many agree on them, [B] each."""
        similarity = features.float() @ self.features.T  # [B, Nt]
        similarity = similarity.scatter(1, indices[:, None], -torch.inf)
        nearest = similarity.topk(self.neighbours, dim=1).indices  # [B, neighbours]
        weights, labels = self.predictions[nearest].mean(dim=1).max(dim=1)
        return labels, weights

    @torch.no_grad()
    def remember(self, network: Network, batch: Batch) -> None:
        """Replace the entries of a batch's target images by the network's current output."""
        out = network.encode_in_eval_mode(batch.x_t)
        features, p = gather(out.feature.float()), gather(out.logits.float()).softmax(dim=1)
        self.features[batch.i_t] = unit_rows(features)
        self.predictions[batch.i_t] = p.square() / p.square().sum(dim=0)
