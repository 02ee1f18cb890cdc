"""Exact t-SNE (van der Maaten and Hinton, 2008) on a GPU or CPU.

scikit-learn's takes as long on a CPU, but its import alone takes 1.8 of the 19 seconds of a run on an H200
(docs/results/speed.md). Several views of the points (V) are computed in one batch: on a GPU that takes no longer than
one."""

import math

import torch
from torch import Tensor

# Step counts, rates and gains are those of scikit-learn's TSNE, with fewer late steps.
EXAGGERATION, EARLY_STEPS = 12.0, 250  # stronger attraction at first, until groups have formed
LATER_STEPS = 250
EARLY_MOMENTUM, LATER_MOMENTUM = 0.5, 0.8
SMALLEST_RATE = 50.0
SMALLEST_GAIN = 0.01
GAIN_STEP, GAIN_DECAY = 0.2, 0.8  # change of a coordinate's rate when its gradient changes sign, and when it does not
BISECTIONS = 50
WIDEST, SHARPEST = -40.0, 40.0  # range of the bisection for the logarithm of a density's sharpness
START = 1e-4  # standard deviation of the first coordinate at the start
TINY = 1e-12  # guards logarithms and divisions


def tsne(x: Tensor, perplexity: float) -> Tensor:
    """[V, N, D] -> [V, N, 2]. It starts from the first two principal components, so there is no randomness."""
    affinity = affinities(x, perplexity)
    y = START * principal_components(x)
    update, gain = torch.zeros_like(y), torch.ones_like(y)
    rate = max(x.shape[1] / EXAGGERATION / 4, SMALLEST_RATE)
    for n in range(EARLY_STEPS + LATER_STEPS):
        early = n < EARLY_STEPS
        slope = gradient(EXAGGERATION * affinity if early else affinity, y)
        gain = torch.where(update * slope < 0, gain + GAIN_STEP, gain * GAIN_DECAY).clamp_(min=SMALLEST_GAIN)
        update.mul_(EARLY_MOMENTUM if early else LATER_MOMENTUM).addcmul_(gain, slope, value=-rate)
        y.add_(update)
    return y


def gradient(p: Tensor, y: Tensor) -> Tensor:
    """The gradient of KL(P || Q), with q_ij in proportion to 1 / (1 + |y_i - y_j|^2).
    [V, N, N], [V, N, 2] -> [V, N, 2]"""
    squares = y.square().sum(dim=2, keepdim=True)
    near = torch.baddbmm(1 + squares + squares.mT, y, y.mT, alpha=-2).reciprocal_()  # [V, N, N]
    near.diagonal(dim1=1, dim2=2).zero_()
    pull = torch.addcmul(p, near, -1 / near.sum(dim=(1, 2), keepdim=True)).mul_(near)  # (p - q) near
    return 4 * (pull.sum(dim=2, keepdim=True) * y - pull @ y)


def affinities(x: Tensor, perplexity: float) -> Tensor:
    """Similarities of the points, [V, N, N], with sum 1: a normal density around each, of the width that gives the
    perplexity, found by bisection for all points at once."""
    squares = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares /= squares.mean(dim=(1, 2), keepdim=True).clamp(min=TINY)  # centres the range of the bisection
    squares.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    low, high = (torch.full_like(x[:, :, :1], value) for value in (WIDEST, SHARPEST))  # [V, N, 1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2  # the logarithm of a density's sharpness
        p = torch.softmax(-squares * middle.exp(), dim=2)
        entropy = -(p * p.clamp(min=TINY).log()).sum(dim=2, keepdim=True)
        wide = entropy > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    p = torch.softmax(-squares * low.exp(), dim=2)
    return ((p + p.mT) / (2 * x.shape[1])).clamp_(min=TINY)


def principal_components(x: Tensor) -> Tensor:
    """[V, N, D] -> [V, N, 2]: the first two principal components, the first with standard deviation 1. The sign of each
    is fixed by making its largest coordinate positive."""
    centred = x - x.mean(dim=1, keepdim=True)
    _, directions = torch.linalg.eigh(centred.mT @ centred)  # [V, D, D], the largest last
    y: Tensor = centred @ directions[:, :, -2:].flip(2)
    largest = y.gather(1, y.abs().argmax(dim=1, keepdim=True))  # [V, 1, 2]
    y = y * torch.where(largest < 0, -1.0, 1.0)
    return y / y[:, :, :1].std(dim=1, keepdim=True).clamp(min=TINY)
