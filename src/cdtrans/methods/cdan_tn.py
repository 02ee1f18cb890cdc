"""CDAN+TN (Wang et al. 2019): CDAN+E with TransNorm in place of every BatchNorm layer of the backbone.

TransNorm normalises each domain by its own mean mu and variance sigma^2, shares scale and shift between them, and lets
channels count more that are alike in both:

    d_j     = | mu_s / sqrt(sigma_s^2 + eps) - mu_t / sqrt(sigma_t^2 + eps) |     for each of C channels
    alpha_j = C / (1 + d_j) / sum_i 1 / (1 + d_i)
    y       = (1 + alpha) (gamma x' + beta)                                       x' is x normalised

alpha gets no gradient. In training all statistics are the batch's. Served is a BatchNorm layer with the running ones of
the target, the scale (1 + alpha) gamma and the shift (1 + alpha) beta. The mean of alpha is 1, so all values are about
twice those of the source-only network; the bottleneck norm, which the authors do not have, makes up for it."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.cdan_e import CDANE
from cdtrans.network.network import Network, with_layers


class CDANTN(CDANE):
    """CDAN+E with norms that weigh transferable channels."""

    paper = "Wang et al. 2019"
    title = "Transferable Normalization: Towards Improving Transferability of Deep Neural Networks, NeurIPS"
    backbones = "BatchNorm"

    def __init__(self, network: Network, options: CDANE.Options, sizes: Sizes) -> None:
        super().__init__(with_layers(network, nn.modules.batchnorm._BatchNorm, TransNorm), options, sizes)
        self.plain = network

    def served(self) -> Network:
        return self.plain

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        for layer in self.network.modules():
            if isinstance(layer, TransNorm):
                layer.serve()


class TransNorm(nn.Module):
    """In place of a BatchNorm layer. That one is `served`: it keeps the target's statistics, and `serve` sets its scale
    and shift."""

    source_mean: Tensor
    source_var: Tensor

    def __init__(self, served: nn.Module) -> None:
        super().__init__()
        self.served: nn.modules.batchnorm._BatchNorm = served.requires_grad_(False)  # type: ignore[assignment]
        self.weight, self.bias = (nn.Parameter(x.detach().clone()) for x in (self.served.weight, self.served.bias))
        self.register_buffer("source_mean", served.get_buffer("running_mean").clone())
        self.register_buffer("source_var", served.get_buffer("running_var").clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.served(x)  # type: ignore[no-any-return]
        source, target = x.chunk(2)
        scale = 1 + self.alpha(*batch_statistics(source), *batch_statistics(target))
        affine = {"weight": scale * self.weight, "bias": scale * self.bias}
        running = {"running_mean": self.source_mean, "running_var": self.source_var}
        # `served` has the momentum, and in some models the activation; it updates the statistics that it is given
        source = functional_call(self.served, affine | running, (source,))
        return torch.cat([source, functional_call(self.served, affine, (target,))])

    @torch.no_grad()
    def alpha(self, mean_s: Tensor, var_s: Tensor, mean_t: Tensor, var_t: Tensor) -> Tensor:
        """How alike each channel is in both domains, [C] with a mean of 1."""
        eps = self.served.eps
        distance = (mean_s / (var_s + eps).sqrt() - mean_t / (var_t + eps).sqrt()).abs()
        likeness = 1 / (1 + distance)
        return likeness / likeness.mean()

    @torch.no_grad()
    def serve(self) -> None:
        """Make `served` compute as this layer does for target images."""
        target = (self.served.get_buffer(name) for name in ("running_mean", "running_var"))
        scale = 1 + self.alpha(self.source_mean, self.source_var, *target)
        self.served.weight.copy_(scale * self.weight)
        self.served.bias.copy_(scale * self.bias)


@torch.no_grad()
def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C, ...] -> mean and variance of each channel, [C]."""
    variance, mean = torch.var_mean(x.float(), dim=[d for d in range(x.ndim) if d != 1])
    return mean, variance
