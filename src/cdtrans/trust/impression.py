"""What a model computes for both domains, in brief. The source-only model's is kept until the end, to compare with."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdtrans.pairing.pairs import Domains

SAMPLE = 1000  # images of each domain whose features are kept, for pictures


@dataclass(frozen=True)
class Impression:
    """One model, the source it was trained on and the target. Tensors on the CPU, half precision where enough."""

    target_logits: Tensor  # [Nt, K]
    source_labels: Tensor  # [Ns]
    source_predicted: Tensor  # [Ns]
    source_confidence: Tensor  # [Ns]
    source_own: Tensor  # [Ns] the probability of the image's own label
    source_sample: Tensor  # [S, D] features
    target_sample: Tensor  # [T, D] features

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


def impression(domains: Domains) -> Impression:
    source, target, labels = domains.source, domains.target, domains.source_labels
    p = source.logits.softmax(dim=1)
    confidence, predicted = p.max(dim=1)
    own = p.gather(1, labels[:, None]).squeeze(1)
    samples = [x.features[sampled(len(x.features)).to(x.features.device)].half() for x in (source, target)]
    columns = (target.logits, labels, predicted, confidence.half(), own.half(), *samples)
    return Impression(*(x.cpu() for x in columns))


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
