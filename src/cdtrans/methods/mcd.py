"""MCD (Saito et al. 2018): two classifiers find target images near the boundary, and the backbone moves them away.

With the backbone G, two classifiers F = (F1, F2), their target predictions p1, p2, d = mean |p1 - p2| over images and
classes, and the authors' balance term b(p) = -1/K sum_k log(mean_i p_ik), every step makes three kinds of updates:

    A  min over G, F   CE1 + CE2 + 0.01 (b(p1) + b(p2))
    B  min over F      CE1 + CE2 - eta d + 0.01 (b(p1) + b(p2))
    C  min over G      eta d, four times

Served is the mean of both classifiers' logits; they are MLPs of two hidden layers, as in the authors' code for VisDA.
d is a mean over the classes, so its weight must grow with their number: 'auto' is K / 3, about as in the Transfer
Learning Library. Not taken: the authors' optimisers. In C a backbone's BatchNorm layers see the target alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes, Update
from cdtrans.network.network import MeanHead, Network
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option

BALANCE_EPSILON = 1e-6  # the authors'


class MCD(Method):
    """Adversarial pair of classifiers."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float | Literal["auto"] = option("auto", "Weight eta of the discrepancy (auto: K / 3).", minimum=0)
        balance: float = option(0.01, "Weight of the balance term.", minimum=0)
        generator_updates: int = option(4, "Updates of the backbone (step C) after one of the classifiers.", minimum=1)
        hidden: int = option(1000, "Width of the classifiers' hidden layers.", minimum=1)
        dropout: float = option(0.5, "Dropout of the classifiers.", minimum=0, maximum=0.99)

    options: Options
    paper = "Saito et al. 2018"
    title = "Maximum Classifier Discrepancy for Unsupervised Domain Adaptation, CVPR"
    weight_per_class: ClassVar[float] = 1 / 3  # weight of the discrepancy per class, if 'auto'

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        shape = {"heads": 2, "hidden": options.hidden}
        self.classifiers = MeanHead(network.dim, sizes.classes, **shape, dropout=options.dropout)
        self.trade_off = self.weight_per_class * sizes.classes if options.trade_off == "auto" else options.trade_off

    def served(self) -> Network:
        return Network(self.network.backbone, self.classifiers, self.network.taps)

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        generator, classifiers = list(self.network.backbone.parameters()), list(self.classifiers.parameters())

        supervised, discrepancy = self.both_domains(batch)
        update(supervised, [*generator, *classifiers])  # A

        with torch.no_grad():
            both = self.features(batch.x_s, batch.x_t)
        again, discrepancy = self.both_domains(batch, both)
        update(again - self.trade_off * discrepancy, classifiers)  # B

        for _ in range(self.options.generator_updates):  # C
            (features,) = self.features(batch.x_t)
            discrepancy = self.discrepancy(*predictions(self.classifiers.each(features)))
            update(self.trade_off * discrepancy, generator)
        return {"loss_source": supervised, "loss_discrepancy": discrepancy}

    def both_domains(self, batch: Batch, features: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Cross-entropy on the source with the balance term, and the discrepancy on the target."""
        source, target = map(self.classifiers.each, features or self.features(batch.x_s, batch.x_t))
        p, q = predictions(target)
        supervised = supervised_loss(source, batch.y_s) + self.options.balance * (balance(p) + balance(q))
        return supervised, self.discrepancy(p, q)

    def features(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """[B, D] of each batch, in one pass of the backbone; of all ranks."""
        return tuple(gather(feature) for feature in self.network.features_each(*batches))

    @staticmethod
    def discrepancy(p: Tensor, q: Tensor) -> Tensor:
        return (p - q).abs().mean()


def supervised_loss(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """The cross-entropy of both classifiers."""
    first, second = (F.cross_entropy(z, labels) for z in logits)
    return first + second


def predictions(logits: Sequence[Tensor]) -> list[Tensor]:
    return [z.softmax(dim=1) for z in logits]


def balance(p: Tensor) -> Tensor:
    """[B, K] -> scalar: small if all classes are predicted equally often."""
    return -(p.mean(dim=0) + BALANCE_EPSILON).log().mean()
