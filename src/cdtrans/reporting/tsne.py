"""Exact t-SNE (van der Maaten and Hinton, 2008). For the thousand points of a report a step is a few small matrices,
which is fast on a GPU, and on a CPU as fast as an approximation. Several views of the points (V) are computed in one
batch: on a GPU that takes no longer than one."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Step counts, rates and gains are those of scikit-learn's TSNE, with fewer late steps.
EXAGGERATION, EARLY_STEPS = 12.0, 250  # stronger attraction at first, until groups have formed
LATER_STEPS = 250
EARLY_MOMENTUM, LATER_MOMENTUM = 0.5, 0.8
SMALLEST_RATE = 50.0
SMALLEST_GAIN = 0.01
GAIN_STEP, GAIN_DECAY = 0.2, 0.8  # of a coordinate's rate, when its gradient changes sign or not
BISECTIONS = 50
WIDEST, SHARPEST = -40.0, 40.0  # of the logarithm of a density's sharpness: the range of the bisection
START = 1e-4  # standard deviation of the first coordinate at the start
TINY = 1e-12  # guards logarithms and divisions


def tsne(x: Tensor, perplexity: float) -> Tensor:
    """[V, N, D] -> [V, N, 2]. It starts from the first two principal components, so there is no randomness."""
    affinity = affinities(x, perplexity)
    y = START * principal_components(x)
    update, gain = torch.zeros_like(y), torch.ones_like(y)
    rate = max(x.shape[1] / EXAGGERATION / 4, SMALLEST_RATE)
    p, momentum = EXAGGERATION * affinity, y.new_tensor(EARLY_MOMENTUM)

    def step() -> None:
        slope = gradient(p, y)
        gain.copy_(torch.where(update * slope < 0, gain + GAIN_STEP, gain * GAIN_DECAY).clamp_(min=SMALLEST_GAIN))
        update.mul_(momentum).addcmul_(gain, slope, value=-rate)
        y.add_(update)

    run_step = step
    for n in range(EARLY_STEPS + LATER_STEPS):
        if n == 1:  # the first step loads its kernels, which is not possible during the capture
            run_step = captured(step, x.device)
        if n == EARLY_STEPS:
            p.copy_(affinity)
            momentum.fill_(LATER_MOMENTUM)
        run_step()
    return y


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same step, which changes tensors in place. On a GPU launching its kernels takes several times as long as
    their work, so it is captured as a CUDA graph."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


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
