"""Stage 2 on the classes that occur in the target. To every method it is a task of these classes alone: classes and
source images are numbered anew, and no method knows of any other. Records keep the numbers of the whole source."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdtrans.network.network import Head, Network

NEVER = -1e4  # recorded score of a class that does not occur: its probability is exactly 0


@dataclass(frozen=True)
class Numbering:
    """The classes and the source images that stage 2 knows, by their numbers in the whole source."""

    classes: Tensor  # [K'] of the classes that occur
    source: Tensor  # [Ns'] of the images of these
    source_labels: Tensor  # [Ns] of the whole source
    total: int  # K

    @classmethod
    def of(cls, occurs: Tensor, source_labels: Tensor) -> "Numbering":
        """`occurs` [K] bool, and the labels of the whole source, [Ns]."""
        occurs, labels = occurs.cpu(), source_labels.cpu()
        return cls(occurs.nonzero().squeeze(1), occurs[labels].nonzero().squeeze(1), labels, len(occurs))

    @property
    def whole(self) -> bool:
        """Whether every class occurs."""
        return len(self.classes) == self.total

    @property
    def beside(self) -> Tensor:
        """[Na] the source images of classes that do not occur."""
        left = torch.ones(len(self.source_labels), dtype=torch.bool)
        left[self.source] = False
        return left.nonzero().squeeze(1)

    def new_labels(self, labels: Tensor) -> Tensor:
        """Labels of occurring classes, in the new numbers."""
        numbers = torch.full((self.total,), -1)
        numbers[self.classes] = torch.arange(len(self.classes))
        return numbers.to(labels.device)[labels]

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """New numbers of classes -> those of the whole source."""
        numbers: np.ndarray = self.classes.numpy().astype(labels.dtype)[labels]
        return numbers

    def logits(self, logits: np.ndarray) -> np.ndarray:
        """[N, K'] -> [N, K]"""
        whole = np.full((len(logits), self.total), NEVER, logits.dtype)
        whole[:, self.classes.numpy()] = logits
        return whole

    def pairs(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a round's proposals; a source image -1 is none."""
        source = arrays["source"]
        numbers = np.append(self.source.numpy(), -1).astype(source.dtype)
        labels = {name: self.labels(arrays[name]) for name in ("source_labels", "target_labels")}
        return arrays | labels | {"source": numbers[source]}

    def per_image(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """[Ns'] -> [Ns]: images of classes that do not occur keep their value in `others`, [Ns]."""
        whole = others.astype(values.dtype)
        whole[self.source.numpy()] = values
        return whole


def narrowed(network: Network, classes: Tensor) -> Network:
    """A network that stage 1 has left, with a classifier of these classes alone; the other weights are shared."""
    head = network.head
    assert isinstance(head, Head), "stage 1 leaves a plain one"
    full = head.classifier
    if len(classes) == full.out_features:
        return network
    small = Head(full.in_features, len(classes), "batchnorm" if full.bias is None else "none")
    small.neck, small.spec = head.neck, head.spec
    small.classifier.to(full.weight.device)
    rows = classes.to(full.weight.device)
    with torch.no_grad():
        for ours, theirs in zip(small.classifier.parameters(), full.parameters(), strict=True):
            ours.copy_(theirs[rows])
    return Network(network.backbone, small, network.taps, network.transferability)
