"""t-SNE (van der Maaten and Hinton, 2008), exact: every point pulls and pushes every other. For the thousand points of
a report that is a few small matrices a step, which a GPU does in no time, and a CPU as fast as an approximation.
Several views of the points (V) are laid out side by side: a GPU then takes no longer than for one."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

EXAGGERATION, EARLY_STEPS = 12.0, 250  # attraction counts for so much more at first, until groups have formed
LATER_STEPS = 250
EARLY_MOMENTUM, LATER_MOMENTUM = 0.5, 0.8
SMALLEST_RATE = 50.0
SMALLEST_GAIN = 0.01
BISECTIONS = 50
START = 1e-4  # the standard deviation of the first coordinate at the start
TINY = 1e-12


def tsne(x: Tensor, perplexity: float) -> Tensor:
    """[V, N, D] -> [V, N, 2]. The start is the data's two main directions, so that nothing is drawn by lot."""
    affinity = affinities(x, perplexity)
    y = START * main_directions(x)
    update, gain = torch.zeros_like(y), torch.ones_like(y)
    rate = max(x.shape[1] / EXAGGERATION / 4, SMALLEST_RATE)
    p, momentum = EXAGGERATION * affinity, y.new_tensor(EARLY_MOMENTUM)

    def step() -> None:
        slope = gradient(p, y)
        gain.copy_(torch.where(update * slope < 0, gain + 0.2, gain * 0.8).clamp_(min=SMALLEST_GAIN))
        update.mul_(momentum).addcmul_(gain, slope, value=-rate)
        y.add_(update)

    again = step
    for n in range(EARLY_STEPS + LATER_STEPS):
        if n == 1:  # the first one has loaded its kernels, which cannot be done while recording
            again = recorded(step, x.device)
        if n == EARLY_STEPS:
            p.copy_(affinity)
            momentum.fill_(LATER_MOMENTUM)
        again()
    return y


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same step, which changes tensors in place. On a GPU its launches take several times as long as its work, so
    they are recorded as a CUDA graph."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def gradient(p: Tensor, y: Tensor) -> Tensor:
    """Of the divergence KL(P || Q), with q_ij in proportion to 1 / (1 + |y_i - y_j|^2).
    [V, N, N], [V, N, 2] -> [V, N, 2]"""
    squares = y.square().sum(dim=2, keepdim=True)
    near = torch.baddbmm(1 + squares + squares.mT, y, y.mT, alpha=-2).reciprocal_()  # [V, N, N]
    near.diagonal(dim1=1, dim2=2).zero_()
    pull = torch.addcmul(p, near, -1 / near.sum(dim=(1, 2), keepdim=True)).mul_(near)  # (p - q) near
    return 4 * (pull.sum(dim=2, keepdim=True) * y - pull @ y)


def affinities(x: Tensor, perplexity: float) -> Tensor:
    """How near the points are to each other, [V, N, N], with sum 1: a normal density around each, as wide as gives it
    so many neighbours, found by bisection for all at the same time."""
    squares = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    squares /= squares.mean(dim=(1, 2), keepdim=True).clamp(min=TINY)  # so that the search starts in the middle
    squares.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    low, high = (torch.full_like(x[:, :, :1], value) for value in (-40.0, 40.0))  # [V, N, 1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2  # the logarithm of a density's sharpness
        p = torch.softmax(-squares * middle.exp(), dim=2)
        entropy = -(p * p.clamp(min=TINY).log()).sum(dim=2, keepdim=True)
        wide = entropy > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    p = torch.softmax(-squares * low.exp(), dim=2)
    return ((p + p.mT) / (2 * x.shape[1])).clamp_(min=TINY)


def main_directions(x: Tensor) -> Tensor:
    """[V, N, D] -> [V, N, 2]: the first two principal components, the first with standard deviation 1; each points to
    where its largest coordinate is, because a direction has no sign of its own."""
    centred = x - x.mean(dim=1, keepdim=True)
    _, directions = torch.linalg.eigh(centred.mT @ centred)  # [V, D, D], the main one last
    y: Tensor = centred @ directions[:, :, -2:].flip(2)
    largest = y.gather(1, y.abs().argmax(dim=1, keepdim=True))  # [V, 1, 2]
    y = y * torch.where(largest < 0, -1.0, 1.0)
    return y / y[:, :, :1].std(dim=1, keepdim=True).clamp(min=TINY)
