"""Pseudo labels of the target from weighted k-means centres with one refinement (Eq. 5, 6, 7)."""

import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-8  # the authors' guard against an empty class


def pseudo_labels(features: Tensor, logits: Tensor) -> Tensor:
    """[Nt, D] features and [Nt, K] logits of the target -> its [Nt] labels.

    Only a class that the classifier predicts at least once may become a label. A class that wins no image in the first
    assignment has no centre to refine and is left out of the second: the authors' code lets such a class take every
    image (docs/method.md, section 6, trap 1)."""
    probabilities = logits.softmax(dim=1)  # [Nt, K]
    ones = features.new_ones(len(features), 1)
    x = F.normalize(torch.cat([features, ones], dim=1))  # [Nt, D + 1]
    allowed = _used(logits.argmax(dim=1), logits.shape[1])
    labels = nearest_center(x, centers(x, probabilities), allowed)  # Eq. 5, 6
    assigned = F.one_hot(labels, logits.shape[1]).to(x.dtype)
    return nearest_center(x, centers(x, assigned), allowed & _used(labels, logits.shape[1]))  # Eq. 7, 6


def centers(x: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the features for each class: [N, D], [N, K] -> [K, D]."""
    return (weights.T @ x) / (weights.sum(dim=0)[:, None] + EPSILON)


def nearest_center(x: Tensor, centers: Tensor, allowed: Tensor) -> Tensor:
    """The allowed class whose centre has the highest cosine with each row of x."""
    similarity = F.normalize(x) @ F.normalize(centers).T  # [N, K]
    return similarity.masked_fill(~allowed, -torch.inf).argmax(dim=1)


def _used(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels, minlength=classes) > 0
