"""CDAN+BSP (Chen et al. 2019): CDAN+E with a penalty on the largest singular value of the features of each domain.

    min over network and critic of  CDAN+E's losses + beta [sigma_1(F_s)^2 + sigma_1(F_t)^2]

F is [B, d], the features of a batch after the bottleneck norm (the authors': after a bottleneck of 256). The penalty
keeps the directions that tell the classes apart. sigma_1^2 = |u^T F|^2 with the first singular vector u as a constant
has the exact gradient, 2 u u^T F. u comes from powers of F F^T in float32, so that a step needs no SVD and can be
captured. beta B d is as in the authors' code: beta = 1e-4 for B = 36 and d = 256."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch
from cdtrans.methods.cdan_e import CDANE
from cdtrans.network.network import Output
from cdtrans.schema import option

AUTHORS_SIZE = 36 * 256  # images of a domain in a batch, times features
SQUARINGS = 8  # F F^T to the power 256


class CDANBSP(CDANE):
    """CDAN+E that keeps features from collapsing."""

    @dataclass(frozen=True)
    class Options(CDANE.Options):
        spectral: float = option(1e-4, "Weight beta of the penalty for 36 images with 256 features.", minimum=0)

    options: Options
    paper = "Chen et al. 2019"
    title = "Transferability vs. Discriminability: Batch Spectral Penalization for Adversarial Domain Adaptation, ICML"
    least_batch = 4  # there must be other singular values than the largest

    def losses_of(self, source: Output, target: Output, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        beta = self.options.spectral * AUTHORS_SIZE / source.feature.numel()
        penalty = beta * (first_squared(source.feature) + first_squared(target.feature))
        return super().losses_of(source, target, batch, progress) | {"loss_spectral": penalty}


def first_squared(f: Tensor) -> Tensor:
    """[B, d] -> scalar: the square of the largest singular value."""
    with torch.autocast(f.device.type, enabled=False):
        f = f.float()
        with torch.no_grad():
            power = f @ f.T  # [B, B]
            for _ in range(SQUARINGS):
                power = power / power.trace().clamp(min=1e-30)
                power = power @ power
            longest = power.diagonal().argmax().view(1)  # every column is u times a number
            u = F.normalize(power.index_select(1, longest), dim=0)  # [B, 1]
        return (u.T @ f).square().sum()
