"""CGDM (Du et al. 2021): MCD, and the gradients of source and target should point the same way.

With the backbone G and the classifiers F1, F2 of MCD (mcd.py), their target predictions p1, p2, d = mean |p1 - p2|, and
the target's labels y by clustering, every step makes these updates:

    A  min over G, F   CE1 + CE2 + e E + 0.01 (W1 + W2)
    B  min over F      CE1 + CE2 + e E - d
    C  min over G      d + e E + 0.01 L_g, four times

    E    = mean H(p) - H(mean p), summed over both classifiers: certain and varied predictions
    W    = mean of w / sum(w) times the cross-entropy with y, w = 1 + exp(-H(p))
    L_g  = mean of 1 - cos(grad of CE on the source, grad of W on the target), over the tensors of both classifiers,
           a matrix row by row

Terms and weights are those of the authors' code: w is divided by its sum and averaged once more, and L_g is of the
whole batch. Not taken: biases before a BatchNorm in L_g, whose gradient is 0 but for rounding; the first epoch without
y; their frozen random projection to 256 features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Update
from cdtrans.methods.mcd import MCD, predictions, supervised_loss
from cdtrans.methods.minent import entropy
from cdtrans.methods.shot import entropy_of_mean
from cdtrans.schema import option


class CGDM(MCD):
    """Adversarial pair of classifiers and matched gradients."""

    @dataclass(frozen=True)
    class Options(MCD.Options):
        trade_off: float | Literal["auto"] = option(1.0, "Weight of the discrepancy d (auto: classes / 3).", minimum=0)
        entropy: float = option(0.1, "Weight of the predictions' entropy in E (the authors on VisDA: 0.01).", minimum=0)
        balance: float = option(0.1, "Weight of the mean prediction's entropy in E (on VisDA: 0.01).", minimum=0)
        labels: float = option(0.01, "Weight of the cross-entropy W with the target's labels.", minimum=0)
        gradients: float = option(0.01, "Weight of the gradients' discrepancy L_g.", minimum=0)

    options: Options
    paper = "Du et al. 2021"
    title = "Cross-Domain Gradient Discrepancy Minimization for Unsupervised Domain Adaptation, CVPR"

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        options = self.options
        generator, classifiers = list(self.network.backbone.parameters()), list(self.classifiers.parameters())

        source, target = map(self.classifiers.each, self.features(batch.x_s, batch.x_t))  # two of [B, K] each
        supervised = supervised_loss(source, batch.y_s)
        labelled = options.labels * weighted_loss(target, batch.y_t)
        update(supervised + self.certainty(target) + labelled, [*generator, *classifiers])  # A

        with torch.no_grad():
            features = self.features(batch.x_s, batch.x_t)
        source, target = map(self.classifiers.each, features)
        discrepancy = self.trade_off * self.discrepancy(*predictions(target))
        update(supervised_loss(source, batch.y_s) + self.certainty(target) - discrepancy, classifiers)  # B

        for _ in range(options.generator_updates):  # C
            source, target = map(self.classifiers.each, self.features(batch.x_s, batch.x_t))
            discrepancy = self.trade_off * self.discrepancy(*predictions(target))
            losses = supervised_loss(source, batch.y_s), weighted_loss(target, batch.y_t)
            mismatch = gradient_discrepancy(*losses, self.compared())
            update(discrepancy + self.certainty(target) + options.gradients * mismatch, generator)
        return {
            "loss_source": supervised,
            "loss_target": labelled,
            "loss_discrepancy": discrepancy,
            "loss_gradients": options.gradients * mismatch,
        }

    def certainty(self, logits: Sequence[Tensor]) -> Tensor:
        """e E: small if each prediction is certain and all together are varied."""
        terms = [self.options.entropy * entropy(z).mean() - self.options.balance * entropy_of_mean(z) for z in logits]
        return torch.stack(terms).sum()

    def compared(self) -> list[Tensor]:
        """The classifiers' tensors whose gradients are compared: not the biases before a BatchNorm."""
        tensors: list[Tensor] = []
        for head in self.classifiers.heads:
            layers = list(head.children())
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                without_bias = isinstance(following, nn.BatchNorm1d)
                tensors += [p for name, p in layer.named_parameters() if not (without_bias and name == "bias")]
        return tensors


def weighted_loss(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """W1 + W2: certain predictions count up to twice as much as uncertain ones. Gradient flows through the weights, but
    not through their sum."""
    losses = []
    for z in logits:
        weight = 1 + (-entropy(z)).exp()  # [B]
        losses.append((weight / weight.sum().detach() * F.cross_entropy(z, labels, reduction="none")).mean())
    return torch.stack(losses).sum()


def gradient_discrepancy(source: Tensor, target: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """L_g of two losses: 1 - cos of their gradients for each of these tensors, on average."""
    of_source, of_target = (torch.autograd.grad(loss, tensors, create_graph=True) for loss in (source, target))
    cosines = [F.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(of_source, of_target, strict=True)]
    return 1 - torch.stack(cosines).mean()
