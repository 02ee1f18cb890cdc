"""One stage of training: its epochs and steps, the state that a kill must not lose, and its progress: a bar, a line and
a log entry for every epoch, and curves in another program (--tracker)."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cdtrans.config import Config
from cdtrans.errors import Hopeless, Interrupted, SettingsError
from cdtrans.record import layout
from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import STATE
from cdtrans.record.run import RunWriter
from cdtrans.runtime.device import between_passes
from cdtrans.runtime.ranks import share_buffers, world
from cdtrans.runtime.screen import Pace, Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.schema import Range, build
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import Step

SEED_NUMBERS = {"init": 0, "source": 1, "adaptation": 2, "method": 3}  # by stage
UNTIMED_STEPS = 5  # first steps of a stage: they load libraries, build kernels and capture graphs
REFRESH_SECONDS = 1.0  # reading the loss waits for the device, so it is read this often and not every step
PROJECT = "cdtrans"  # the group of runs in Weights & Biases and MLflow

Track = Callable[[str, int, dict[str, float]], None]  # stage, epoch and values -> a point of every curve


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


class Batches(Protocol):
    """The inputs of an epoch's steps, made when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, step: int) -> Sequence[Tensor]: ...


class Stateful(Protocol):
    """Owns a part of the state: networks, optimisers, pairs, scores."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def load_stage(run: RunWriter) -> SavedState | None:
    file = run.folder / STATE.name
    if not file.exists():
        return None
    with intact(file, STATE.advice):  # only a disk can damage it: atomic writes leave no half-written state
        return build(SavedState, torch.load(file, map_location="cpu", weights_only=True))


def step_seed(seed: int, stage: str, epoch: int, step: int) -> int:
    """The seed of a step by its position, whatever came before, so that a resumed run is exactly the undisturbed
    one."""
    words = [seed, SEED_NUMBERS[stage], epoch, step]
    mixed = 0
    for word in words:
        mixed = (mixed * 6364136223846793005 + word * 1442695040888963407 + 1) % 2**63
        mixed ^= mixed >> 29
    return mixed


class Loop:
    """The epochs and steps of one stage, and the state that a kill must not lose.

    A stage reads `for epoch in loop.epochs(): loop.train(...)`. The loop seeds every step, sums the losses, saves the
    state when it is time, and resumes from a saved one. Each of the `parts` saves and restores its own."""

    def __init__(
        self,
        run: RunWriter,
        stage: str,
        model: nn.Module,
        optimisation: Optimisation,
        screen: Screen,
        *,
        config: Config,
        epochs: int,
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.run, self.stage, self.model, self.optimisation, self.screen = run, stage, model, optimisation, screen
        self.track = open_tracker(config, run)
        self.seed, self.save_every, self.last_epoch = config.seed, config.save_every, epochs
        self.epoch, self.step, self.most = 1, 0, config.max_steps
        self.names: tuple[str, ...] = ()
        self.sums: Tensor | None = None  # the epoch's losses so far
        self.log_end: int | None = None  # size of the log before what is done between steps, and done again to resume
        self.parts: dict[str, Stateful] = {"model": model, "optimisation": optimisation, **(parts or {})}
        self.pace = Pace(untimed=UNTIMED_STEPS, stage=" of stage 1" if stage == "source" else "")
        self._saved_at = time.monotonic()
        state = load_stage(run)
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
            self.epoch, self.step, self.sums, self.log_end = self.epoch + 1, 0, None, None
            self._save_if_due()
            self.log_end = self.run.log_size()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around all epochs: an interruption between steps loses no step."""
        try:
            yield
        except Interrupted:
            if self.log_end is not None and not self.fresh:
                self.save()
            raise

    def train(self, step: Step, batches: Batches, *, images: int, note: str = "", **log: Any) -> None:
        """The rest of an epoch, of steps on so many images each. `note` is shown beside the loss, and `log` goes into
        the epoch's entry."""
        optimisation, screen, count = self.optimisation, self.screen, min(len(batches), self.most or len(batches))
        lr = optimisation.start_epoch(self.epoch, self.step)
        step.ahead = count * (self.last_epoch - self.epoch + 1)
        self.model.train()
        self.log_end = None
        title, text, first = f"{self.stage} {self.epoch}/{self.last_epoch}", "", self.step
        start = refreshed = time.monotonic()
        before = count * (self.epoch - 1)  # steps of earlier epochs
        tracked = screen.track(title, count * self.last_epoch, before + first, pace=self.pace, stage=self.stage)
        with StopSignals.whole_steps(), tracked as task:
            for n in self.steps(count):
                optimisation.at(self.epoch, n / count)
                losses = step(*batches[n])
                self.update(step.names, losses)
                now = time.monotonic()
                if now - refreshed > REFRESH_SECONDS and not screen.quiet:
                    refreshed, loss = now, sum(self.mean_losses().values())
                    rate = (self.step - first) * images / (now - start)
                    text = f"loss {loss:.3f}  lr {lr:.3g}  {note}  {rate:.0f} images/s"
                task.advance(1, text)
        self.log_end = self.run.log_size()
        share_buffers(self.model)
        seconds = time.monotonic() - start
        left = self.pace.time_left(count * (self.last_epoch - self.epoch))
        self._report(lr, seconds, (self.step - first) * images / max(seconds, 1e-9), left, log)

    def _report(self, lr: float, seconds: float, rate: float, left: str, log: dict[str, Any]) -> None:
        losses = self.mean_losses()
        self.run.log("epoch", stage=self.stage, epoch=self.epoch, lr=lr, **losses, **log)
        timing = {"seconds": round(seconds, 3), "images_per_second": round(rate, 1)}
        self.run.log_timing(stage=self.stage, epoch=self.epoch, **timing)
        shown = [f"{name} {value:.4g}" for name, value in losses.items()] + [f"{k} {v}" for k, v in log.items()]
        self.screen.say(
            f"{self.stage} {self.epoch}/{self.last_epoch}  {'  '.join(shown)}  lr {lr:.3g}  {rate:.0f} images/s  "
            f"{left}".rstrip()
        )
        if self.track is not None:
            self.track(self.stage, self.epoch, {**losses, "lr": lr})

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
            place: dict[str, Any] = {"stage": self.stage, "epoch": self.epoch, "step": self.step}
            place["log_size"] = self.run.log_size() if self.log_end is None else self.log_end
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
        if world() > 1 and not (self.optimisation.first_bad_step() is None and all_finite(self.model)):
            return  # ranks come here at different times: the end of the epoch, which they share, will say so
        self._check_finite()
        self.save()
        if stop is not None:
            raise Interrupted(stop)

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


# Trackers: curves of the losses and the learning rate. What is opened here is closed with the run, so that the next run
# of the same program has its own; what the program has opened itself is used and left open.


def open_tracker(config: Config, run: RunWriter) -> Track | None:
    """None without --tracker, and on every rank but the main one."""
    trackers = {"tensorboard": track_in_tensorboard, "wandb": track_in_wandb, "mlflow": track_in_mlflow}
    return trackers[config.tracker](config, run) if config.tracker != "none" and run.writes else None


def library(tracker: str) -> Any:
    """A tracker's package, imported."""
    try:
        return import_module("torch.utils.tensorboard" if tracker == "tensorboard" else tracker)
    except ImportError as error:
        raise SettingsError(
            "tracker-missing",
            f"--tracker {tracker} needs a package that is not installed; 'pip install cdtrans[{tracker}]', or leave "
            "--tracker out.",
        ) from error


def track_in_tensorboard(config: Config, run: RunWriter) -> Track:
    """Event files in the run folder."""
    writer = library("tensorboard").SummaryWriter(run.folder / layout.TENSORBOARD)
    run.callback(writer.close)

    def track(stage: str, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{stage}/{name}", value, epoch)
        writer.flush()

    return track


def track_in_wandb(config: Config, run: RunWriter) -> Track:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run folder. Each stage counts its own epochs."""
    wandb = library("wandb")
    curves = wandb.run  # stage 1's run, or the program's
    if curves is None:
        place = str(run.folder.resolve())
        about = {"name": run.folder.name, "dir": place, "config": config.to_dict()}
        name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]  # the same when it resumes
        curves = wandb.init(project=PROJECT, id=name, resume="allow", **about)
        run.callback(curves.finish)
    for stage in ("source", "adaptation"):
        curves.define_metric(f"{stage}/*", step_metric=f"{stage}/epoch")
    return lambda stage, epoch, values: curves.log({f"{stage}/{x}": y for x, y in {**values, "epoch": epoch}.items()})


def track_in_mlflow(config: Config, run: RunWriter) -> Track:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, or else where MLflow puts it."""
    mlflow = library("mlflow")
    known = run.folder / layout.MLFLOW.name  # the name of the run, which a resumed one continues
    if mlflow.active_run() is None:  # otherwise stage 1's run, or the program's
        run.callback(mlflow.end_run)
        if known.exists():
            mlflow.start_run(run_id=known.read_text(encoding="utf-8").strip())
        else:
            mlflow.set_experiment(PROJECT)
            begun = mlflow.start_run(run_name=run.folder.name)
            run.write(layout.MLFLOW, begun.info.run_id.encode())
            mlflow.log_params({key: str(value)[:250] for key, value in config.to_dict().items()})
    return lambda stage, epoch, values: mlflow.log_metrics({f"{stage}/{x}": y for x, y in values.items()}, step=epoch)
