"""The authors' optimiser: two parameter groups, a learning rate for each epoch, clipping, mixed precision."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from cdtrans.config import Config
from cdtrans.runtime.ranks import average_gradients

WARMUP_START = 0.01  # of the base rate
FLOOR = 0.002  # of the base rate


def learning_rate(epoch: int, epochs: int, base: float, factor: float = 1.0, warmup: int = 10) -> float:
    """The rate of epoch 1..E for a group of rate factor * base (docs/method.md 2.1). The warm-up's start and the
    cosine's floor do not grow with the factor, and the cosine does not start anew after the warm-up."""
    peak, start, floor = factor * base, WARMUP_START * base, FLOOR * base
    if epoch < warmup:
        return start + epoch * (peak - start) / warmup
    if epoch < epochs:
        return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * epoch / epochs))
    return floor


def parameter_groups(model: nn.Module, bias_lr_factor: float) -> list[dict[str, Any]]:
    """Weights and biases: the biases learn faster. Weight decay is on everything, norms and tokens included."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if "bias" not in name], "factor": 1.0},
        {"params": [p for name, p in named if "bias" in name], "factor": bias_lr_factor},
    ]


class Optimisation:
    """One stage's optimiser. `step` takes a loss and does everything up to the new weights, without waiting for the
    device: a loss that is not finite is remembered there and found by `first_bad_step` when somebody asks."""

    def __init__(self, model: nn.Module, config: Config, *, lr: float, epochs: int, device: torch.device) -> None:
        groups = parameter_groups(model, config.bias_lr_factor)
        for group in groups:  # on a GPU the rate is a tensor, so that a captured step reads the current one
            group["lr"] = torch.tensor(lr, device=device) if device.type == "cuda" else lr
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                groups, momentum=config.momentum, weight_decay=config.weight_decay, fused=device.type == "cuda"
            )
        else:
            self.optimizer = torch.optim.AdamW(
                groups, weight_decay=config.weight_decay, capturable=device.type == "cuda"
            )
        self.parameters = [p for group in groups for p in group["params"]]
        self.lr, self.epochs, self.config, self.device = lr, epochs, config, device
        self.scaler = torch.amp.grad_scaler.GradScaler(device.type, enabled=config.precision == "fp16")
        self.taken = torch.zeros((), dtype=torch.long, device=device)  # steps of this epoch
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)  # the first whose loss was not finite

    def start_epoch(self, epoch: int, steps_taken: int = 0) -> float:
        """Set the epoch's rates; the rate of the weights is returned for people to see."""
        warmup = self.config.warmup_epochs
        for group in self.optimizer.param_groups:
            rate = learning_rate(epoch, self.epochs, self.lr, group["factor"], warmup)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self.taken.fill_(steps_taken)
        return learning_rate(epoch, self.epochs, self.lr, warmup=warmup)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        bad = ~loss.detach().isfinite() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(bad, self.taken, self.bad_step))
        self.scaler.scale(loss).backward()
        average_gradients(self.parameters)
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def first_bad_step(self) -> int | None:
        """The first step whose loss was not finite. Waits for the device."""
        step = int(self.bad_step)
        return None if step < 0 else step

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # the saved rates are the epoch's, which start_epoch sets
        self.scaler.load_state_dict(state["scaler"])
