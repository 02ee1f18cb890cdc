"""The head shared by the three branches: the authors' bottleneck norm and a bias-free classifier."""

from typing import NamedTuple

from torch import Tensor, nn

from cdtrans.runtime.ranks import gather

CLASSIFIER_STD = 0.001  # the authors' initialisation


class Output(NamedTuple):
    """What the head says of a batch: the feature that pairs are searched with, and the class scores."""

    feature: Tensor  # [B, D], after the bottleneck norm
    logits: Tensor  # [B, K]


class Head(nn.Module):
    """On several ranks the head is trained on the features of all of them.
    `neck="batchnorm"`: BatchNorm with its bias frozen at 0, then a linear layer without bias.
    `neck="none"`: a plain linear layer on the backbone's feature."""

    def __init__(self, dim: int, classes: int, neck: str) -> None:
        super().__init__()
        self.neck: nn.Module = nn.Identity()
        if neck == "batchnorm":
            self.neck = nn.BatchNorm1d(dim)
            self.neck.bias.requires_grad_(False)
        self.classifier = nn.Linear(dim, classes, bias=neck == "none")
        nn.init.normal_(self.classifier.weight, std=CLASSIFIER_STD)
        if self.classifier.bias is not None:
            nn.init.zeros_(self.classifier.bias)

    def forward(self, feature: Tensor) -> Output:
        feature = self.neck(gather(feature) if self.training else feature)
        return Output(feature, self.classifier(feature))
