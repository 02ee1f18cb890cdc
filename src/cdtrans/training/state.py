"""Everything needed to resume after a kill: written atomically, restored exactly."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cdtrans.config import Config
from cdtrans.errors import Hopeless, Interrupted
from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import STATE
from cdtrans.record.run import RunWriter
from cdtrans.runtime.device import between_passes
from cdtrans.runtime.ranks import world
from cdtrans.runtime.signals import StopSignals
from cdtrans.schema import Range, build
from cdtrans.training.optimisation import Optimisation

STAGES = {"init": 0, "source": 1, "adaptation": 2, "method": 3}  # numbers in a seed


@dataclass(frozen=True)
class SavedState:
    """A stage as it is saved. `sums` are the losses of the epoch so far, `parts` the states of their owners."""

    stage: Literal["source", "adaptation"]
    epoch: Annotated[int, Range(1, 2**31)]
    step: Annotated[int, Range(0, 2**31)]
    names: list[str]
    sums: Tensor | None
    parts: dict[str, dict[str, Any]]
    log_size: Annotated[int, Range(0, 2**62)]


class Stateful(Protocol):
    """Owns a part of the state: networks, optimisers, pairs, scores."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def load_state(run: RunWriter) -> SavedState | None:
    file = run.folder / STATE.name
    if not file.exists():
        return None
    with intact(file, STATE.advice):  # only a disk can damage it: atomic writes leave no half-written state
        return build(SavedState, torch.load(file, map_location="cpu", weights_only=True))


def step_seed(seed: int, stage: str, epoch: int, step: int) -> int:
    """The seed of a step by its position, whatever came before, so that a resumed run is exactly the undisturbed
    one."""
    words = [seed, STAGES[stage], epoch, step]
    mixed = 0
    for word in words:
        mixed = (mixed * 6364136223846793005 + word * 1442695040888963407 + 1) % 2**63
        mixed ^= mixed >> 29
    return mixed


class Loop:
    """The epochs and steps of one stage, and the state that a kill must not lose.

    A stage reads `for epoch in loop.epochs(): for step in loop.steps(n): loop.update(names, losses)`. The loop seeds
    every step, sums the losses, saves the state when it is time, and resumes from a saved one. Each of the `parts`
    saves and restores its own."""

    def __init__(
        self,
        run: RunWriter,
        stage: str,
        model: nn.Module,
        optimisation: Optimisation,
        *,
        config: Config,
        epochs: int,
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.run, self.stage, self.model, self.optimisation = run, stage, model, optimisation
        self.seed, self.save_every, self.last_epoch = config.seed, config.save_every, epochs
        self.epoch, self.step = 1, 0
        self.names: tuple[str, ...] = ()
        self.sums: Tensor | None = None  # the epoch's losses so far
        self.parts: dict[str, Stateful] = {"model": model, "optimisation": optimisation, **(parts or {})}
        self._saved_at = time.monotonic()
        state = load_state(run)
        if state is not None and state.stage == stage:
            self._restore(state)
        else:
            self.save()

    @property
    def fresh(self) -> bool:
        """Whether nothing of the stage has been done."""
        return (self.epoch, self.step) == (1, 0)

    def epochs(self) -> Iterator[int]:
        while self.epoch <= self.last_epoch:
            yield self.epoch
            self.epoch, self.step, self.sums = self.epoch + 1, 0, None
            self._save_if_due()

    def steps(self, count: int) -> Iterator[int]:
        while self.step < count:
            torch.manual_seed(step_seed(self.seed, self.stage, self.epoch, self.step))
            yield self.step
        self._check_finite()

    def update(self, names: tuple[str, ...], losses: Tensor) -> None:
        """Count a step as done; `losses` are its values, [k]."""
        self.names = names
        losses = losses.to(between_passes(losses.device)).double()
        self.sums = losses if self.sums is None else self.sums + losses
        self.step += 1
        self._save_if_due()

    def mean_losses(self) -> dict[str, float]:
        """The mean of each loss over the epoch. Waits for the device."""
        assert self.sums is not None, "an epoch has at least one step"
        return dict(zip(self.names, [float(x) for x in self.sums / self.step], strict=True))

    def save(self) -> None:
        if self.run.writes:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            place = {"stage": self.stage, "epoch": self.epoch, "step": self.step, "log_size": self.run.log_size()}
            state = {**place, "names": list(self.names), "sums": self.sums, "parts": parts}
            with atomic(self.run.folder / STATE.name) as file:
                torch.save(state, file)
        self._saved_at = time.monotonic()

    def _restore(self, state: SavedState) -> None:
        with intact(self.run.folder / STATE.name, STATE.advice):
            for name, part in self.parts.items():
                part.load_state_dict(state.parts[name])
        self.epoch, self.step, self.names = state.epoch, state.step, tuple(state.names)
        self.sums = None if state.sums is None else state.sums.to(between_passes(self.optimisation.device))
        self.run.cut_log(state.log_size)

    def _save_if_due(self) -> None:
        stop = StopSignals.received if self.run.writes else None  # the others continue until the main rank has saved
        if stop is None and time.monotonic() - self._saved_at < self.save_every:
            return
        if world() > 1 and not self._finite():
            return  # ranks come here at different times: the end of the epoch, which they share, will say so
        self._check_finite()
        self.save()
        if stop is not None:
            raise Interrupted(stop)

    def _finite(self) -> bool:
        return self.optimisation.first_bad_step() is None and all_finite(self.model)

    def _check_finite(self) -> None:
        """Check the losses and the weights: a step whose loss is finite can still ruin the model."""
        step = self.optimisation.first_bad_step()
        ruined = step is None and not all_finite(self.model)
        if step is not None or ruined:
            file = self.run.folder / STATE.name
            kept = f"The last good state is in '{file}'" if file.exists() else "No state had been saved yet"
            raise Hopeless(
                f"{'The weights are' if ruined else 'The loss is'} not finite in the {self.stage} stage, "
                f"epoch {self.epoch}, step {self.step if ruined else step}",
                f"{kept}. Start again in another --out with a lower learning rate (--lr, --source-lr) or "
                "--precision fp32.",
            )


def all_finite(model: nn.Module) -> bool:
    """Whether no weight or running statistic is NaN or infinite. Waits for the device."""
    floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return bool(torch.nn.utils.get_total_norm(floats, torch.inf, foreach=True).isfinite())
