"""SWD (Lee et al. 2019): MCD with the sliced Wasserstein distance between the predictions of its two classifiers.

For the target predictions P, Q [B, K] of the two classifiers and M random directions, the columns of R [K, M],

    d(P, Q) = mean over rows and columns of (sort(P R) - sort(Q R))^2

where sort orders each column by itself. R is Gaussian with columns of length 1, drawn anew for each d. d, M = 128 and
no balance term are those of the authors' toy in two dimensions; they released nothing for images, so the steps are
MCD's (mcd.py). A random direction shrinks a difference: the mean of (r . (p - q))^2 is |p - q|^2 / K, and the weight
'auto', K, makes up for it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.mcd import MCD
from cdtrans.schema import option

DIRECTIONS = 128  # the authors'


class SWD(MCD):
    """Adversarial pair of classifiers, sliced Wasserstein."""

    @dataclass(frozen=True)
    class Options(MCD.Options):
        trade_off: float | Literal["auto"] = option("auto", "Weight of the discrepancy (auto: the classes).", minimum=0)
        balance: float = option(0.0, "Weight of MCD's balance term.", minimum=0)

    options: Options
    paper = "Lee et al. 2019"
    title = "Sliced Wasserstein Discrepancy for Unsupervised Domain Adaptation, CVPR"
    weight_per_class = 1.0

    @staticmethod
    def discrepancy(p: Tensor, q: Tensor) -> Tensor:
        directions = F.normalize(torch.randn(p.shape[1], DIRECTIONS, device=p.device), dim=0)
        return sliced_wasserstein(p.float(), q.float(), directions)


def sliced_wasserstein(p: Tensor, q: Tensor, directions: Tensor) -> Tensor:
    """[B, K] twice and [K, M] -> scalar. In float32: differences that are squared must not be rounded before."""
    with torch.autocast(p.device.type, enabled=False):
        along_p, along_q = (p @ directions).sort(dim=0).values, (q @ directions).sort(dim=0).values  # [B, M]
    return (along_p - along_q).square().mean()
