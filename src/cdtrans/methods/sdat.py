"""SDAT (Rangwani et al. 2022): CDAN + MCC whose task loss is minimised where the loss around it is small too.

With the weights theta of the network, the task loss L(theta) = CE(source) + v MCC(target) and CDAN's domain loss d,
every step is

    e = rho grad L(theta) / |grad L(theta)|                            the direction in which L rises most (SAM)
    theta <- theta - lr grad [L + w d](theta + e)

As in the authors' code all weights of the network are perturbed and the critic's are not, and both passes update the
statistics of the bottleneck norm. CDAN is without E, T = 2 and rho = 0.02, as their scripts for ViTs have it. Weight
decay acts on theta + e here, a difference of lr times decay times e."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Update
from cdtrans.methods.cdan_e import CDANE
from cdtrans.methods.mcc import confusion
from cdtrans.network.network import Output
from cdtrans.runtime.ranks import average_gradients
from cdtrans.schema import option


class SDAT(CDANE):
    """CDAN and MCC with a smooth task loss."""

    @dataclass(frozen=True)
    class Options(CDANE.Options):
        entropy: bool = option(False, "Certain images count more for the critic (CDAN+E).")
        confusion: float = option(1.0, "Weight v of the class confusion.", minimum=0)
        temperature: float = option(2.0, "Temperature of the class confusion.", minimum=0.01)
        rho: float = option(0.02, "How far the weights are perturbed.", minimum=0)

    options: Options
    paper = "Rangwani et al. 2022"
    title = "A Closer Look at Smoothness in Domain Adversarial Training, ICML"

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        source, target = self.network.encode_together(batch.x_s, batch.x_t)
        with self.perturbed(F.cross_entropy(source.logits, batch.y_s) + self.confusion(target)):
            return super().train_step(batch, progress, update)

    def losses_of(self, source: Output, target: Output, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        return super().losses_of(source, target, batch, progress) | {"loss_confusion": self.confusion(target)}

    def confusion(self, target: Output) -> Tensor:
        return self.options.confusion * confusion(target.logits, self.options.temperature)

    @contextmanager
    def perturbed(self, task: Tensor) -> Iterator[None]:
        """The network is at theta + e in here; afterwards e is subtracted from its weights, updated or not."""
        weights: list[Any] = [p for p in self.network.parameters() if p.requires_grad]
        with torch.autocast(task.device.type, enabled=False):
            gradients = torch.autograd.grad(task, weights, allow_unused=True)
        for p, gradient in zip(weights, gradients, strict=True):
            p.grad = gradient
        average_gradients(weights)  # over the ranks
        weights = [p for p in weights if p.grad is not None]
        steps = [p.grad for p in weights]
        norm = torch.nn.utils.get_total_norm(steps, foreach=True)
        torch._foreach_mul_(steps, self.options.rho / (norm + 1e-12))
        with torch.no_grad():
            torch._foreach_add_(weights, steps)
        torch.clear_autocast_cache()  # it holds the weights before
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_sub_(weights, steps)
