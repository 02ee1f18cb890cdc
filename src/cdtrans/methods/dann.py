"""DANN (Ganin et al. 2016): a critic tells source from target features, and the network learns to make it fail.

    min over network and critic of  CE(source) + w / 2 [BCE(D(R(f_s)), 1) + BCE(D(R(f_t)), 0)]

R is the identity that multiplies the gradient by -lambda, so one backward trains both sides. lambda rises with the
progress p of training: 2 / (1 + exp(-a p)) - 1, a = 10. f is the feature after the bottleneck norm. The critic is the
CDAN authors' with BatchNorm instead of Dropout, as in the Transfer Learning Library: so the result does not depend on
the number of ranks. Source and target pass head and critic as one batch: a BatchNorm that sees each domain by itself
would hide the difference of their means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.blocks import initialise
from cdtrans.network.network import Network, Output
from cdtrans.schema import option


class DANN(Method):
    """Adversarial training against a critic."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(1.0, "Weight w of the critic's loss.", minimum=0)
        ramp: float = option(10.0, "Steepness a of the rise of lambda.", minimum=0)
        largest: float = option(1.0, "What lambda rises to (0.1 in SSRT, for ViTs).", minimum=0)
        hidden: int = option(1024, "Width of the critic's two hidden layers.", minimum=1)
        critic_rate: float = option(1.0, "Learning rate of the critic, relative to --lr.", minimum=0)

    options: Options
    paper = "Ganin et al. 2016"
    title = "Domain-Adversarial Training of Neural Networks, JMLR"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.critic = Critic(network.dim, options.hidden)

    def rates(self) -> Mapping[str, float]:
        return {"critic": self.options.critic_rate}

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_together(batch.x_s, batch.x_t)
        return self.losses_of(source, target, batch, progress)

    def losses_of(self, source: Output, target: Output, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        strength = self.options.largest * rising(progress, self.options.ramp)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_domain": self.options.trade_off * self.domain(source, target, strength),
        }

    def domain(self, source: Output, target: Output, strength: Tensor) -> Tensor:
        return domain_loss(self.critic, source.feature, target.feature, strength)


def domain_loss(
    critic: nn.Module,
    source: Tensor,
    target: Tensor,
    strength: Tensor,
    weights: tuple[Tensor | float, Tensor | float] = (1.0, 1.0),
) -> Tensor:
    """[B, D] twice -> scalar: the critic's error, whose gradient reaches the features reversed. It starts near ln 2.
    Images may have weights, [B] of each domain with a mean of 1."""
    logits = critic(reversed_gradient(torch.cat([source, target]), strength)).float()  # [2B]
    return critic_error(logits[: len(source)], logits[len(source) :], weights)


def critic_error(source: Tensor, target: Tensor, weights: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)) -> Tensor:
    """The critic's binary cross-entropy with 1 for source logits and 0 for target logits."""
    return 0.5 * ((weights[0] * F.softplus(-source)).mean() + (weights[1] * F.softplus(target)).mean())


def rising(progress: Tensor, steepness: float) -> Tensor:
    """0 -> nearly 1 as progress goes from 0 to 1. A tensor, so that a captured step follows it."""
    return 2 / (1 + torch.exp(-steepness * progress)) - 1


class Critic(nn.Sequential):
    """[B, D] -> [B] logits: source or target?"""

    def __init__(self, dim: int, hidden: int) -> None:
        layers: list[nn.Module] = []
        for inputs in (dim, hidden):
            layers += [nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        super().__init__(*layers, nn.Linear(hidden, 1), nn.Flatten(0))
        initialise(self, nn.init.xavier_normal_)


class _Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: Tensor) -> Tensor:
        ctx.save_for_backward(strength)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (strength,) = ctx.saved_tensors
        return -strength * gradients[0], None


def reversed_gradient(x: Tensor, strength: Tensor) -> Tensor:
    """x itself; its gradient is multiplied by -strength."""
    return _Reverse.apply(x, strength)  # type: ignore[no-any-return, no-untyped-call]
