"""Impressions made up for tests: what a model predicts for the target, and what else is known then."""

import torch
from torch import Tensor

from cdtrans.trust.impression import Impression


def impression_of(
    predicted: Tensor,
    *,
    nearest: Tensor | None = None,
    classes: int = 3,
    source_right: float = 1.0,
    source_learnable: float | None = None,
) -> Impression:
    """The nearest source images have the predicted classes unless told; of 100 source images the first ones are
    right."""
    labels = torch.arange(100) % classes
    n = torch.arange(100)
    return Impression(
        target_logits=10.0 * torch.nn.functional.one_hot(predicted, classes),
        nearest_labels=(predicted if nearest is None else nearest)[:, None].expand(-1, 10),
        source_labels=labels,
        source_predicted=torch.where(n < 100 * source_right, labels, (labels + 1) % classes),
        source_confidence=torch.ones(100).half(),
        source_own=torch.ones(100).half(),
        source_sample=torch.zeros(100, 4).half(),
        target_sample=torch.zeros(len(predicted), 4).half(),
        source_learnable=torch.tensor(source_right if source_learnable is None else source_learnable),
    )
