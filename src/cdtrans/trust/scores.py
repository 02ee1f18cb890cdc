"""Label-free scores of a model on the target, all from one pass. Higher is better, from 0 to 1; `clusters` is adjusted
for chance and can be below 0.

None of them is accuracy. `confidence` and `density` are also high for a model that predicts one class only, so the
choice of an epoch combines them with diversity (selection.py).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import pseudo_labels

SAMPLE = 4096  # images for the scores of quadratic or iterated cost: the first ones, whose order is random
CLUSTER_TRIES, CLUSTER_STEPS = 3, 20  # k-means; the tightest result is used
DENSITY_TEMPERATURE = 0.05  # as in the paper on soft neighbourhood density (Saito et al., ICCV 2021)


class LabelFreeScores(NamedTuple):
    """The scores of one model."""

    confidence: float  # 1 - mean entropy of the predictions / its maximum
    diversity: float  # entropy of the mean prediction / its maximum
    information: float  # mutual information of image and prediction / its maximum: confidence and diversity
    nuclear_norm: float  # prediction matrix's norm / its maximum (batch nuclear-norm maximisation, CVPR 2020)
    clusters: float  # adjusted mutual information of predictions and clusters of the features
    density: float  # soft neighbourhood density: how many images share an image's prediction
    centers: float  # share of the images whose nearest class centre is the predicted class


def score(encoded: Encoded) -> LabelFreeScores:
    """The scores of one pass."""
    p = encoded.logits.double().softmax(dim=1)  # [N, K]
    most = math.log(p.shape[1])
    uncertainty = float(shannon_entropy(p).mean()) / most
    diversity = float(shannon_entropy(p.mean(dim=0))) / most
    predicted = p.argmax(dim=1)
    features = F.normalize(encoded.features[:SAMPLE])
    labellings = torch.stack([predicted[:SAMPLE], cluster(features, p.shape[1])])
    alike = bool((labellings[0] == predicted[0]).all())  # one class alone would agree with a single cluster
    return LabelFreeScores(
        confidence=1 - uncertainty,
        diversity=diversity,
        information=diversity - uncertainty,
        nuclear_norm=nuclear_norm(p),
        clusters=0.0 if alike else adjusted_mutual_information(*labellings.cpu().numpy()),
        density=density(p[:SAMPLE].float()),
        centers=float((pseudo_labels(encoded.features, encoded.logits) == predicted).double().mean()),
    )


def shannon_entropy(p: Tensor) -> Tensor:
    """The entropy of distributions along the last dimension, in nats. Not torch's `entr`, which takes a third of a
    second to compile."""
    return -torch.xlogy(p, p).sum(dim=-1)


def nuclear_norm(p: Tensor) -> float:
    """[N, K] -> the sum of the singular values over its maximum: 1 if all predictions are certain and all classes
    equally frequent, 1 / sqrt(K) if all are certain of the same class."""
    squares = torch.linalg.eigvalsh((p.T @ p).cpu()).clamp(min=0)  # [K], of the singular values
    return float(squares.sqrt().sum() / math.sqrt(len(p) * min(p.shape)))


def density(p: Tensor) -> float:
    """The entropy of an image's similarity to the others' predictions, over its maximum."""
    if len(p) < 2:
        return 0.0
    q = F.normalize(p)
    similarity = q @ q.T / DENSITY_TEMPERATURE  # [N, N]
    similarity.fill_diagonal_(-torch.inf)
    return float(shannon_entropy(similarity.softmax(dim=1)).mean()) / math.log(max(2, len(p) - 1))


def cluster(x: Tensor, count: int) -> Tensor:
    """k-means of unit rows by cosine, [N, D] -> [N] cluster numbers: the tightest of a few tries (T), computed at once.
    Seeded, so equal features give equal clusters."""
    labels, tightness = _lloyd(x, _spread_out(x, min(count, len(x))))
    return labels[tightness.argmax()]


def _spread_out(x: Tensor, count: int) -> Tensor:
    """k-means++: centres drawn one by one, each with a probability in proportion to its squared distance from the
    previous ones. -> [T, count, D]"""
    draws = torch.rand(count, CLUSTER_TRIES, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = draws.to(x.device)
    chances = torch.arange(1, len(x) + 1, dtype=torch.float64, device=x.device).expand(CLUSTER_TRIES, -1)  # uniform
    distance = x.new_full((), torch.inf)
    centers = []
    for draw in draws:
        chosen = torch.searchsorted(chances.contiguous(), draw * chances[:, -1:]).squeeze(1).clamp(max=len(x) - 1)
        centers.append(x[chosen])  # [T, D]
        distance = torch.minimum(distance, 1 - centers[-1] @ x.T)  # [T, N], half the squared distance of unit vectors
        chances = distance.clamp(min=0).double().cumsum(dim=1)
    return torch.stack(centers, dim=1)


def _lloyd(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm, [T, count, D] -> labels [T, N], and the mean similarity to the centres, [T]."""
    for _ in range(CLUSTER_STEPS):
        members = F.one_hot((x @ centers.mT).argmax(dim=2), centers.shape[1]).to(x.dtype)  # [T, N, count]
        sums = members.mT @ x
        centers = torch.where(members.any(dim=1)[..., None], F.normalize(sums, dim=2), centers)
    similarity, labels = (x @ centers.mT).max(dim=2)
    return labels, similarity.mean(dim=1)


def adjusted_mutual_information(first: np.ndarray, second: np.ndarray) -> float:
    """Agreement of two labellings of N items, [N] integers each (Vinh, Epps and Bailey, 2010): 1 if they are equal up
    to the names of the labels, 0 on average for random ones. scikit-learn has it too, but importing scikit-learn takes
    longer than an epoch on a small target."""
    (_, first, a), (_, second, b) = (np.unique(x, return_inverse=True, return_counts=True) for x in (first, second))
    both = np.unique(first * len(b) + second, return_counts=True)[1]  # items per pair of labels
    if len(a) == len(b) == len(both):  # equal up to names
        return 1.0
    mutual = entropy_of_counts(a) + entropy_of_counts(b) - entropy_of_counts(both)
    by_chance = expected_mutual_information(a, b)
    most = (entropy_of_counts(a) + entropy_of_counts(b)) / 2 - by_chance
    return (mutual - by_chance) / most


def entropy_of_counts(counts: np.ndarray) -> float:
    """The entropy of the distribution with these counts, in nats."""
    total = counts.sum()
    return float(np.log(total) - (counts * np.log(counts)).sum() / total)


def expected_mutual_information(a: np.ndarray, b: np.ndarray) -> float:
    """The mean over all pairs of labellings with these class sizes. The number n of items that a class of size a and
    one of size b share is hypergeometric. Classes of equal size are counted together, because there are few distinct
    sizes."""
    total = int(a.sum())
    (sizes_a, times_a), (sizes_b, times_b) = np.unique(a, return_counts=True), np.unique(b, return_counts=True)
    a, b = (sizes.ravel() for sizes in np.meshgrid(sizes_a, sizes_b, indexing="ij"))  # [P] pairs of sizes
    times = np.outer(times_a, times_b).ravel()
    fewest, most = np.maximum(a + b - total, 1), np.minimum(a, b)
    shared = np.maximum(most - fewest + 1, 0)  # [P] how many n are possible
    pair = np.repeat(np.arange(len(a)), shared)  # [S]
    n = np.arange(len(pair)) - np.repeat(np.cumsum(shared) - shared, shared) + fewest[pair]
    a, b, times = a[pair], b[pair], times[pair]
    log_factorial = np.append(0.0, np.cumsum(np.log(np.arange(1, total + 1))))
    log_chance = (
        (log_factorial[a] + log_factorial[b] + log_factorial[total - a] + log_factorial[total - b])
        - (log_factorial[total] + log_factorial[n] + log_factorial[a - n] + log_factorial[b - n])
        - log_factorial[total - a - b + n]
    )
    gain = n / total * np.log(total * n / (a * b))
    return float((times * gain * np.exp(log_chance)).sum())
