"""Impressions and evidence made up for tests: what a model predicts for the target, and what else is known then."""

import torch
from torch import Tensor

from cdtrans.trust.support import Evidence, Impression

IMAGES = 100  # in the source


def impression_of(predicted: Tensor, *, classes: int = 3, source_right: float = 1.0) -> Impression:
    """An impression with the first source images right."""
    labels, n = torch.arange(IMAGES) % classes, torch.arange(IMAGES)
    return Impression(
        target_logits=10.0 * torch.nn.functional.one_hot(predicted, classes),
        source_labels=labels,
        source_predicted=torch.where(n < IMAGES * source_right, labels, (labels + 1) % classes),
        source_confidence=torch.ones(IMAGES).half(),
        source_own=torch.ones(IMAGES).half(),
        source_sample=torch.zeros(IMAGES, 4).half(),
        target_sample=torch.zeros(len(predicted), 4).half(),
    )


def evidence_of(nearest: Tensor, *, classes: int = 3, learnable: float = 1.0, pretrained: bool = False) -> Evidence:
    """The nearest source images of each target image have this label, and so has the reference."""
    labels, all_of = torch.arange(IMAGES) % classes, torch.tensor(1.0)
    every, none = torch.ones(classes, dtype=torch.bool), torch.tensor(False)
    of_classes = every, none, torch.zeros(len(nearest)), torch.zeros(classes, 9).long(), torch.zeros(classes)
    known = nearest[:, None].expand(-1, 10), labels, torch.tensor(learnable), nearest, all_of, all_of
    return Evidence(*known, *of_classes, torch.tensor(0.0), torch.tensor(pretrained))
