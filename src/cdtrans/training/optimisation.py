"""The optimiser: parameter groups, learning rates (the authors', or one cosine), clipping, mixed precision."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import group_parameters
from torch import Tensor, nn

from cdtrans.config import Config
from cdtrans.errors import DeviceError
from cdtrans.network.network import Network
from cdtrans.runtime.device import TOO_LITTLE
from cdtrans.runtime.ranks import average_gradients

WARMUP_START, FLOOR = 0.01, 0.002  # first and last rate, relative to the base rate
NO_DECAY = {"weight_decay": 0.0}


def learning_rate(epoch: int, epochs: int, base: float, factor: float = 1.0, warmup: int = 10) -> float:
    """The authors' rate of epoch 1..E for a group whose own rate is factor * base (docs/method.md). The warm-up's start
    and the cosine's floor do not grow with the factor, and the cosine does not start anew after the warm-up. A run that
    is shorter than its warm-up would never reach the rate: it rises to it until its middle and then falls."""
    peak, start, floor = factor * base, WARMUP_START * base, FLOOR * base
    short = epochs < max(warmup, 2)  # the authors' formula gives a single epoch the floor alone
    middle = (epochs + 1) / 2 if short else float(warmup)
    if epoch < middle:
        return start + epoch * (peak - start) / middle
    if epoch >= epochs and not short:
        return floor
    done = (epoch - middle) / (epochs + 1 - middle) if short else epoch / epochs
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * done))


def cosine_rate(done: float, warmup: float) -> float:
    """The rate, relative to the base, after a part of all steps: rises over the part `warmup`, at most half of them,
    then falls in one cosine."""
    warmup = min(warmup, 0.5)
    if done < warmup:
        return WARMUP_START + (1 - WARMUP_START) * done / warmup
    return FLOOR + 0.5 * (1 - FLOOR) * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def backbone_rates(backbone: nn.Module, rate: float, decay: float) -> dict[nn.Parameter, float]:
    """The rate of every parameter of the backbone, relative to the rest: `rate` in its last layer, and less in the
    early ones, which change least from one domain to another. Without layers that timm knows, all learn alike."""
    timm_backbone: Any = backbone
    parameters = dict(backbone.named_parameters())
    if decay == 1 or not hasattr(backbone, "group_matcher"):
        return dict.fromkeys(parameters.values(), rate)
    layers = group_parameters(backbone, timm_backbone.group_matcher())  # layer -> names
    last = max(layers)
    return {parameters[name]: rate * decay ** (last - layer) for layer, names in layers.items() for name in names}


def parameter_groups(
    module: nn.Module,
    bias_lr_factor: float,
    rates: Mapping[str, float] | None = None,
    of_backbone: Mapping[nn.Parameter, float] | None = None,
    *,
    decay_vectors: bool = True,
) -> list[dict[str, Any]]:
    """Weights and biases: the biases learn faster. `rates` are factors by the name of a submodule or parameter,
    `of_backbone` factors of the backbone's parameters. Weight decay is on everything, norms and tokens included, or on
    matrices alone."""
    groups: dict[tuple[float, bool, bool], list[Tensor]] = {}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for is_bias in (False, True):
        for name, p in named:
            if ("bias" in name) == is_bias:
                decays = decay_vectors or (p.ndim > 1 and 1 not in p.shape[:1])  # a token is [1, 1, D]
                rate = _rate(name, rates or {}) * (of_backbone or {}).get(p, 1.0)
                groups.setdefault((rate, is_bias, decays), []).append(p)
    return [
        {"params": params, "rate": rate, "factor": bias_lr_factor if is_bias else 1.0} | ({} if decays else NO_DECAY)
        for (rate, is_bias, decays), params in groups.items()
    ]


def _rate(name: str, rates: Mapping[str, float]) -> float:
    """The factor of a parameter or of the submodule that it is in; the innermost counts."""
    inside = [prefix for prefix in rates if f"{name}.".startswith(f"{prefix}.")]
    return rates[max(inside, key=len)] if inside else 1.0


class Optimisation:
    """One stage's optimiser. `update` takes a loss and does everything up to the new weights, without waiting for the
    device: a loss that is not finite is remembered there and reported by `first_bad_step`.

    The gradients of the network and of a method's own modules are clipped apart: a critic's large gradient must not
    shrink the network's."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        *,
        lr: float,
        epochs: int,
        device: torch.device,
        rates: Mapping[str, float] | None = None,
        network: Network | None = None,
    ) -> None:
        """`network` is the one that a method adapts, in stage 2."""
        self.lr, self.epochs, self.config, self.device = lr, epochs, config, device
        self.adapting = network is not None  # stage 2
        inner_rates = None
        if network is not None:
            inner_rates = backbone_rates(network.backbone, config.backbone_rate, config.layer_decay)
        decay_vectors = config.schedule == "authors"
        groups = parameter_groups(module, config.bias_lr_factor, rates, inner_rates, decay_vectors=decay_vectors)
        gpu = device.type == "cuda"
        for group in groups:  # on a GPU the rate is a tensor, so that a captured step reads the current one
            group["lr"] = torch.tensor(lr, device=device) if gpu else lr
        decay = config.weight_decay
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, momentum=config.momentum, weight_decay=decay, fused=gpu)
        else:
            self.optimizer = torch.optim.AdamW(groups, weight_decay=decay, capturable=gpu)
        self.parameters = [p for group in groups for p in group["params"]]
        inner = {id(p) for p in (network or module).parameters()}
        of_network = [p for p in self.parameters if id(p) in inner]
        of_method = [p for p in self.parameters if id(p) not in inner]
        self.clipped = [group for group in (of_network, of_method) if group]
        self.scaler = torch.amp.grad_scaler.GradScaler(device.type, enabled=config.precision == "fp16")
        self.taken = torch.zeros((), dtype=torch.long, device=device)  # steps of this epoch
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)  # the first with a loss that is not finite
        self.calls = self.made = 0  # calls of `update` in this try of the step, and updates already made
        self.applying = False  # an update is changing the weights

    def start_epoch(self, epoch: int, steps_taken: int = 0) -> float:
        """Set the epoch's rates. Returns the rate of the weights, for the log."""
        warmup = self.config.warmup_epochs
        self.taken.fill_(steps_taken)
        if self.config.schedule == "cosine":
            return self.lr * cosine_rate((epoch - 0.5) / self.epochs, warmup / self.epochs)  # the rate in its middle
        if self.adapting and self.epochs == warmup:
            warmup += 1  # it counts as a short run; the authors' stage 1 rises to its end
        for group in self.optimizer.param_groups:
            _set_rate(group, learning_rate(epoch, self.epochs, group["rate"] * self.lr, group["factor"], warmup))
        return learning_rate(epoch, self.epochs, self.lr, warmup=warmup)

    def at(self, epoch: int, part: float) -> None:
        """Set the rates of a step after this part of an epoch. The authors' rates are constant in an epoch."""
        if self.config.schedule == "cosine":
            rate = cosine_rate((epoch - 1 + part) / self.epochs, self.config.warmup_epochs / self.epochs)
            for group in self.optimizer.param_groups:
                _set_rate(group, rate * self.lr * group["rate"] * group["factor"])

    def start_step(self) -> None:
        self.taken += 1
        self.calls, self.made, self.applying = 0, 0, False

    def repeat_step(self) -> None:
        """The device ran out of memory, and the step begins again: the updates that it has made count and are not made
        a second time."""
        if self.applying:  # the activations are gone by then: smaller parts of the batch would not help
            raise DeviceError(
                "gpu-memory",
                f"{TOO_LITTLE} for the weights of this backbone, their gradients and the optimiser; use a smaller "
                "--backbone.",
            )
        self.calls = 0
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """One step of the optimiser on these parameters, or on all."""
        self.calls += 1
        if self.calls <= self.made:
            return
        with torch.autocast(self.device.type, enabled=False):
            self.optimizer.zero_grad(set_to_none=True)
            bad = ~loss.detach().isfinite() & (self.bad_step < 0)
            self.bad_step.copy_(torch.where(bad, self.taken, self.bad_step))
            inputs = None if parameters is None else [p for p in parameters if p.requires_grad]
            self.scaler.scale(loss).backward(inputs=inputs)
            self.applying = True
            average_gradients(self.parameters)
            self.scaler.unscale_(self.optimizer)
            for group in self.clipped:
                torch.nn.utils.clip_grad_norm_(group, self.config.clip_norm, foreach=True)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.made, self.applying = self.calls, False
        torch.clear_autocast_cache()  # weights rounded before this update must not serve after it

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


def _set_rate(group: dict[str, Any], rate: float) -> None:
    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
