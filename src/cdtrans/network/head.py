"""Heads: feature -> logits. The authors' is a bottleneck norm and a bias-free classifier, shared by all branches."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdtrans.runtime.ranks import gather

CLASSIFIER_STD = 0.001  # the authors' initialisation
MLP_STD = 0.01  # of the authors of MCD and SAFN
CORRECTION_STD, CORRECTION_BIAS = 0.005, 0.1  # of DCAN's authors


class Output(NamedTuple):
    """The head's output for a batch: the feature that pairs are searched with, and the class scores."""

    feature: Tensor  # [B, D], after the bottleneck norm
    logits: Tensor  # [B, K]


class AnyHead(nn.Module):
    """What every head has. On several ranks it is trained on the features of all of them."""

    spec: dict[str, Any]  # what a model card says of it, so that `build_head` can make it again

    def forward(self, feature: Tensor) -> Output:
        return self.classify(gather(feature) if self.training else feature)

    def classify(self, feature: Tensor) -> Output:
        """The same for features that have been gathered."""
        raise NotImplementedError

    def of_another_domain(self, out: Output) -> Output:
        """Its output for a whole other domain, [N, D] and [N, K]: a head that standardises features by the target's
        statistics has to take that domain's own."""
        return out


class Head(AnyHead):
    """The authors' head and its simpler forms.
    `neck="batchnorm"`: BatchNorm with its bias frozen at 0, then a linear layer without bias (docs/method.md 1.3).
    `neck="none"`: a plain linear layer on the backbone's feature.
    `neck="standardise"`: each feature standardised by its mean and deviation, then a linear layer: a probe."""

    def __init__(self, dim: int, classes: int, neck: str) -> None:
        super().__init__()
        self.spec = {"neck": neck} if neck == "standardise" else {}  # the card says the others
        self.neck: nn.Module = nn.Identity()
        if neck == "batchnorm":
            self.neck = nn.BatchNorm1d(dim)
            self.neck.bias.requires_grad_(False)
        elif neck == "standardise":
            self.neck = nn.BatchNorm1d(dim, affine=False)
        self.classifier = nn.Linear(dim, classes, bias=neck != "batchnorm")
        nn.init.normal_(self.classifier.weight, std=CLASSIFIER_STD)
        if self.classifier.bias is not None:
            nn.init.zeros_(self.classifier.bias)

    def classify(self, feature: Tensor) -> Output:
        feature = self.neck(feature)
        return Output(feature, self.classifier(feature))

    def of_another_domain(self, out: Output) -> Output:
        if self.spec.get("neck") != "standardise":
            return out
        mean, variance = out.feature.mean(dim=0), out.feature.var(dim=0, correction=0)
        feature = (out.feature - mean) / (variance + 1e-5).sqrt()
        logits = self.classifier(feature.to(self.classifier.weight.device))  # encoded images of a Mac are on the CPU
        return Output(feature, logits.to(feature.device))


class MeanHead(AnyHead):
    """Several classifiers of the same feature, whose logits are averaged (MCD). Each is an MLP of two hidden layers:
    Dropout, Linear, BatchNorm, ReLU, twice, then Linear."""

    def __init__(self, dim: int, classes: int, *, heads: int, hidden: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.spec = {"heads": heads, "hidden": hidden}

        def layer(inputs: int) -> list[nn.Module]:
            return [nn.Dropout(dropout), nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]

        self.heads = nn.ModuleList(
            nn.Sequential(*layer(dim), *layer(hidden), nn.Linear(hidden, classes)) for _ in range(heads)
        )
        _start(self)

    def each(self, feature: Tensor) -> list[Tensor]:
        """The logits of every classifier, [B, K] each."""
        return [head(feature) for head in self.heads]

    def classify(self, feature: Tensor) -> Output:
        return Output(feature, torch.stack(self.each(feature)).mean(dim=0))


class BottleneckHead(AnyHead):
    """A block of Linear, BatchNorm, ReLU and Dropout, then a linear layer (SAFN). Its feature is that of the block;
    Dropout keeps the mean of its squared length."""

    def __init__(self, dim: int, classes: int, *, bottleneck: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.spec = {"bottleneck": bottleneck}
        self.block = nn.Sequential(nn.Linear(dim, bottleneck), nn.BatchNorm1d(bottleneck), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(bottleneck, classes)
        _start(self)

    def classify(self, feature: Tensor) -> Output:
        feature = self.block(feature)
        if self.training:
            feature = self.dropout(feature) * math.sqrt(1 - self.dropout.p)
        return Output(feature, self.classifier(feature))


class CorrectedHead(AnyHead):
    """A head whose feature and logits are both corrected by an MLP of theirs (DCAN): f + D(f), then z + D'(z)."""

    def __init__(self, dim: int, classes: int, neck: str, *, correction: int) -> None:
        super().__init__()
        self.spec = {"correction": correction}
        self.plain = Head(dim, classes, neck)
        self.of_feature = Correction(dim, correction)
        self.of_logits = Correction(classes, classes)

    def classify(self, feature: Tensor) -> Output:
        return self.correct(self.plain.classify(feature))

    def correct(self, out: Output) -> Output:
        """The corrected form of what the plain head says."""
        feature = out.feature + self.of_feature(out.feature)
        logits = self.plain.classifier(feature)
        return Output(feature, logits + self.of_logits(logits))


class Correction(nn.Sequential):
    """[B, D] -> [B, D], small at first."""

    def __init__(self, dim: int, hidden: int) -> None:
        layers = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        super().__init__(layers[0], nn.ReLU(), layers[1])
        for layer in layers:
            nn.init.normal_(layer.weight, std=CORRECTION_STD)
            nn.init.constant_(layer.bias, CORRECTION_BIAS)


def _start(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=MLP_STD)
            nn.init.zeros_(module.bias)


def build_head(spec: dict[str, Any], dim: int, classes: int, neck: str) -> AnyHead:
    """The head that a model card describes: `spec` is empty for a head of the run's --neck."""
    if "heads" in spec:
        return MeanHead(dim, classes, **spec)
    if "bottleneck" in spec:
        return BottleneckHead(dim, classes, **spec)
    if "correction" in spec:
        return CorrectedHead(dim, classes, neck, **spec)
    return Head(dim, classes, spec.get("neck", neck))
