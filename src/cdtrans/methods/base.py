"""The base class of methods. A method decides what a training step does, and nothing else.

All methods share the rest: data, schedule, resume, selection, guard, report, export and ranks. So comparisons are fair,
and a new method gets all of this for free. docs/methods.md shows how to write one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cdtrans.errors import MethodError
from cdtrans.network.blocks import why_no_shared_attention
from cdtrans.network.network import Network, has_batchnorm
from cdtrans.pairing.pairs import Domains, Proposals

VITS = "deit_small, dinov2_small or dinov3_small"


class Batch(NamedTuple):
    """The input of a step: tensors only, so that a step can be replayed as a CUDA graph. On several ranks `x_s` and
    `x_t` hold this rank's images, while everything else, and every output of the head, is for the whole batch."""

    x_s: Tensor  # [B, 3, H, W] source images
    y_s: Tensor  # [B] their labels
    x_t: Tensor  # [B, 3, H, W] target images
    y_t: Tensor  # [B] their pseudo-labels, or [B, K] soft ones
    i_t: Tensor  # [B] their indices in the target
    weight: Tensor  # [B] of the pairs


class Sizes(NamedTuple):
    """The size of the data."""

    classes: int
    source_images: int
    target_images: int


class Round(NamedTuple):
    """Stage 2 is divided into rounds; each begins with `Method.plan`."""

    number: int  # from 1
    rounds: int  # in all
    epoch: int  # the first of the round

    @property
    def progress(self) -> float:
        """0 in the first round, 1 in the last."""
        return (self.number - 1) / max(self.rounds - 1, 1)


class Update(Protocol):
    """One step of the optimiser: gradients of `loss` for these parameters, or for all."""

    def __call__(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None: ...


@dataclass(frozen=True)
class NoOptions:
    """For a method without options."""


class Method(nn.Module):
    """The first line of a subclass's docstring is its line in `cdtrans methods`.

    Modules and buffers that a method makes beside the network (critics, teachers, memory banks) are optimised, saved,
    resumed and kept equal on all ranks like the network itself."""

    Options: ClassVar[type[Any]] = NoOptions  # a frozen dataclass of `cdtrans.config.option` fields
    paper: ClassVar[str] = ""  # authors and year; empty if there is no paper
    title: ClassVar[str] = ""  # paper and venue, or the page that describes the method
    backbones: ClassVar[str] = "any"  # any, ViT, BatchNorm, or as the method checks it
    uses_target_labels: ClassVar[bool] = False  # only methods of `cdtrans ablate` do
    takes_target_labels: ClassVar[bool] = False  # whether `plan` uses the labels of --answers
    trains: ClassVar[bool] = True  # whether it has training steps; if not, `plan` does everything
    least_batch: ClassVar[int] = 1  # pairs that a step needs
    capturable: bool = True  # whether a step can be replayed as a CUDA graph; an instance may decide by its options
    needs_source: ClassVar[bool] = True  # whether it needs source images beside a --source-model
    pairs_mean: ClassVar[str] = ""  # for the report: why both images of a pair belong together, if they do

    def __init__(self, network: Network, options: Any, sizes: Sizes) -> None:
        super().__init__()
        self.network, self.options, self.sizes = network, options, sizes

    @classmethod
    def check(cls, network: Network, name: str) -> None:
        """Refuse a backbone (called `name`) that the method cannot work with, before anything is written."""
        if cls.backbones == "ViT" and (why := why_no_shared_attention(network.backbone)):
            sentence = f"The backbone '{name}' {why}; use a ViT such as {VITS}, or another --method such as dann."
            raise MethodError("backbone-misfit", sentence)
        if cls.backbones == "BatchNorm" and not has_batchnorm(network.backbone):
            raise cls.misfit(name, "with BatchNorm layers, such as resnet50")

    @classmethod
    def misfit(cls, name: str, needs: str) -> MethodError:
        """The error for a backbone (called `name`) that is not one `needs` describes."""
        sentence = (
            f"{cls.__name__} needs a backbone {needs}, and '{name}' is none; choose another --backbone or --method."
        )
        return MethodError("backbone-misfit", sentence)

    def rates(self) -> Mapping[str, float]:
        """Learning rates relative to --lr, by the name of a submodule: {"critic": 10.0, "network.backbone": 0.1}."""
        return {}

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        """The pairs of source and target images in the epochs of a round. Default: at random."""
        return Proposals.at_random(domains, torch.arange(self.sizes.target_images), domains.centers, generator)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        """The losses of a step, by the name they have in the log; their sum is minimised. `progress` rises from 0 to 1
        over stage 2."""
        raise NotImplementedError

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        """A whole step; returns the losses to log. Override it for several updates in one step."""
        losses = require_losses(self.losses, self.losses(batch, progress))
        update(torch.stack(list(losses.values())).sum())
        return losses

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        """Called after each step, for a moving average, a memory bank and the like. Runs without gradients."""

    def served(self) -> Network:
        """The network that predicts, is exported and is judged by the guard."""
        return self.network


def require_losses(function: Callable[..., Any], returned: Any, *, to_minimise: bool = True) -> dict[str, Tensor]:
    """The returned value of a method's function, if it is losses: numbers by name, as tensors."""
    problem = ""
    if not isinstance(returned, dict) or not returned:
        problem = f"{returned!r:.60}, not a dictionary of losses by name"
    elif wrong := [k for k, x in returned.items() if not isinstance(x, Tensor) or x.numel() != 1]:
        value = returned[wrong[0]]
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        problem = f"{kind} as '{wrong[0]}', not a tensor with one number"
    elif to_minimise and not any(x.requires_grad for x in returned.values()):
        problem = "losses that have no gradient"
    if problem:
        code = inspect.unwrap(function).__code__
        place = f"'{code.co_filename}', line {code.co_firstlineno}"
        raise MethodError("method-losses", f"{function.__qualname__} in {place}, returns {problem}; correct it.")
    return returned  # type: ignore[no-any-return]


def follow(average: nn.Module, module: nn.Module, part: Tensor) -> None:
    """Move a module's weights and running statistics by this part of the way to another's."""
    theirs: list[Any] = [x for x in average.state_dict().values() if x.is_floating_point()]
    ours: list[Any] = [x for x in module.state_dict().values() if x.is_floating_point()]
    difference = torch._foreach_sub(ours, theirs)
    torch._foreach_mul_(difference, part)
    torch._foreach_add_(theirs, difference)
