"""How a model sees both domains, in brief: that of the source-only model is kept until the end, to compare with."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe
from cdtrans.pairing.pairs import Domains
from cdtrans.trust.support import Support, nearest_labels, support

FOLDS, PROBED = 5, 20_000  # of the cross-validation, and images in it at most
SAMPLE = 1000  # images of each domain whose features are kept, for pictures


@dataclass(frozen=True)
class Impression:
    """One model, the source it was trained on and the target. Tensors on the CPU, half precision where enough."""

    target_logits: Tensor  # [Nt, K]
    nearest_labels: Tensor  # [n, k] labels of the source images nearest to some target images, see trust.support
    source_labels: Tensor  # [Ns]
    source_predicted: Tensor  # [Ns]
    source_confidence: Tensor  # [Ns]
    source_own: Tensor  # [Ns] the probability of the image's own label
    source_sample: Tensor  # [S, D] features
    target_sample: Tensor  # [T, D] features
    source_learnable: Tensor  # [] accuracy of a linear probe on the source's features, cross-validated

    @property
    def has_source(self) -> bool:
        """Whether there were source images."""
        return len(self.source_labels) > 0

    @property
    def predicted(self) -> Tensor:
        return self.target_logits.argmax(dim=1)

    @property
    def source_accuracy(self) -> float:
        """On the images it was trained on, in eval mode."""
        return float((self.source_predicted == self.source_labels).double().mean())

    def support(self, predicted: Tensor) -> Support:
        """How far this model's features support predictions [Nt], its own or another's."""
        return support(predicted, self.nearest_labels, self.source_labels, float(self.source_learnable))


def impression(domains: Domains) -> Impression:
    source, target, labels = domains.source, domains.target, domains.source_labels
    p = source.logits.softmax(dim=1)
    confidence, predicted = p.max(dim=1)
    own = p.gather(1, labels[:, None]).squeeze(1)
    samples = [x.features[sampled(len(x.features)).to(x.features.device)].half() for x in (source, target)]
    nearest = nearest_labels(domains) if len(labels) else labels[:, None]
    columns = (target.logits, nearest, labels, predicted, confidence.half(), own.half(), *samples)
    learnable = torch.tensor(cross_validated(source.features, labels, source.logits.shape[1]) if len(labels) else 0.0)
    return Impression(*(x.cpu() for x in (*columns, learnable)))


def cross_validated(features: Tensor, labels: Tensor, classes: int) -> float:
    """Accuracy of a linear probe on images that it has not seen: near chance if labels were mixed up, or if training
    has ruined the features, whatever the model's own head says."""
    some = torch.linspace(0, len(labels) - 1, min(len(labels), PROBED), device=labels.device).round().long()
    x, y = Statistics.of(features).standardised(features[some]), labels[some]
    fold = torch.arange(len(y), device=y.device) % FOLDS  # the source is in the order of its classes
    right = 0
    for n in range(FOLDS):
        kept, left = fold != n, fold == n
        if kept.any() and left.any():
            probe = fit_probe(x[kept], F.one_hot(y[kept], classes).to(x), LOOSE)
            right += int((probe.probabilities(x[left]).argmax(dim=1) == y[left]).sum())
    return right / len(y)


def sampled(count: int) -> Tensor:
    """Evenly spread over the domain, so that every class of the source is in it."""
    return torch.linspace(0, count - 1, min(count, SAMPLE)).round().long()


def views(before: Impression, after: Impression) -> dict[str, np.ndarray]:
    """views.npz: both models' view of the images, for the report; the target's confidences come from the logits."""
    half = {
        "before_source": before.source_sample,
        "before_target": before.target_sample,
        "after_source": after.source_sample,
        "after_target": after.target_sample,
        "source_confidence": before.source_confidence,
        "source_own": before.source_own,
    }
    whole = {
        "sampled_source": sampled(len(before.source_labels)),
        "sampled_target": sampled(len(before.target_logits)),
        "target_before": before.predicted,
        "target_after": after.predicted,
        "source_labels": before.source_labels,
        "source_predicted": before.source_predicted,
    }
    arrays = {name: x.numpy().astype(np.float16) for name, x in half.items()}
    return arrays | {name: x.numpy().astype(np.int32) for name, x in whole.items()}
