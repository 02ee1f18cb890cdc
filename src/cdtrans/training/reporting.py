"""The progress of a stage: a bar, a line and a log entry for every epoch, and curves in another program (--tracker)."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from cdtrans.config import Config
from cdtrans.errors import SettingsError
from cdtrans.record import layout
from cdtrans.record.run import RunWriter
from cdtrans.runtime.screen import Screen
from cdtrans.training.state import Loop

PASSES = 3.0  # work of training on an image, in forward passes: the backward pass takes twice as long
REFRESH_SECONDS = 1.0  # reading the loss waits for the device, so it is read this often and not every step
PROJECT = "cdtrans"  # the group of runs in Weights & Biases and MLflow
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class StageReport:
    """One per stage. `with report.epoch(...)` around the steps, `report.advance()` after each, then `report.write(...)`
    with the epoch's losses."""

    def __init__(self, run: RunWriter, screen: Screen, loop: Loop, config: Config) -> None:
        self.run, self.screen, self.loop = run, screen, loop
        self.tracker = open_tracker(config, run)

    @contextmanager
    def epoch(self, *, steps: int, images: int, lr: float, note: str = "") -> Iterator[None]:
        """`images`: how many a step trains on. `note` is shown beside the loss."""
        loop = self.loop
        self.images, self.lr, self.note, self.text = images, lr, note, ""
        self.start = self.refreshed = time.monotonic()
        self.first_step = loop.step
        title, units = f"{loop.stage} {loop.epoch}/{loop.last_epoch}", PASSES * images
        with self.screen.track(title, steps, loop.step, kind=loop.stage, units=units) as self.task:
            yield
        self.seconds = time.monotonic() - self.start
        self.rate = self._rate(self.seconds)

    def advance(self) -> None:
        """Move the bar by a step."""
        now = time.monotonic()
        if now - self.refreshed > REFRESH_SECONDS and not self.screen.quiet:
            self.refreshed = now
            loss = sum(self.loop.mean_losses().values())
            rate = self._rate(now - self.start)
            self.text = f"loss {loss:.3f}  lr {self.lr:.3g}  {self.note}  {rate:.0f} images/s"
        self.task.advance(1, self.text)

    def write(self, losses: dict[str, float], **fields: Any) -> None:
        """The epoch's line in the log, on the screen and, if asked for, in a tracker."""
        loop = self.loop
        self.run.log("epoch", stage=loop.stage, epoch=loop.epoch, lr=self.lr, **losses, **fields)
        timing = {"seconds": round(self.seconds, 3), "images_per_second": round(self.rate, 1)}
        self.run.log_timing(stage=loop.stage, epoch=loop.epoch, **timing)
        shown = [f"{name} {value:.4g}" for name, value in losses.items()] + [f"{k} {v}" for k, v in fields.items()]
        self.screen.say(
            f"{loop.stage} {loop.epoch}/{loop.last_epoch}  {'  '.join(shown)}  lr {self.lr:.3g}  "
            f"{self.rate:.0f} images/s  {self.screen.work.time_left()}".rstrip()
        )
        if self.tracker is not None:
            self.tracker.log(loop.stage, loop.epoch, {**losses, "lr": self.lr})

    def _rate(self, seconds: float) -> float:
        """Images per second in this epoch."""
        return (self.loop.step - self.first_step) * self.images / max(seconds, 1e-9)


class Tracker(Protocol):
    """Curves of the losses and the learning rate. What is opened here is closed with the run, so that the next run of
    the same program has its own; what the program has opened itself is used and left open."""

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, config: Config, run: RunWriter) -> None:
        self.writer = library("tensorboard").SummaryWriter(run.folder / layout.TENSORBOARD)
        run.at_close(self.writer.close)

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{stage}/{name}", value, epoch)
        self.writer.flush()


class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run folder. Each stage counts its own epochs."""

    def __init__(self, config: Config, run: RunWriter) -> None:
        wandb = library("wandb")
        self.run = wandb.run  # stage 1's run, or the program's
        if self.run is None:
            place = str(run.folder.resolve())
            about = {"name": run.folder.name, "dir": place, "config": config.to_dict()}
            name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]  # the same when it resumes
            self.run = wandb.init(project=PROJECT, id=name, resume="allow", **about)
            run.at_close(self.run.finish)
        for stage in ("source", "adaptation"):
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/epoch")

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None:
        self.run.log({f"{stage}/{name}": value for name, value in {**values, "epoch": epoch}.items()})


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, or else where MLflow puts it."""

    def __init__(self, config: Config, run: RunWriter) -> None:
        self.mlflow = library("mlflow")
        known = run.folder / layout.MLFLOW.name  # the name of the run, which a resumed one continues
        if self.mlflow.active_run() is not None:  # stage 1's run, or the program's
            return
        run.at_close(self.mlflow.end_run)
        if known.exists():
            self.mlflow.start_run(run_id=known.read_text(encoding="utf-8").strip())
            return
        self.mlflow.set_experiment(PROJECT)
        begun = self.mlflow.start_run(run_name=run.folder.name)
        run.write(layout.MLFLOW, begun.info.run_id.encode())
        self.mlflow.log_params({key: str(value)[:250] for key, value in config.to_dict().items()})

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None:
        self.mlflow.log_metrics({f"{stage}/{name}": value for name, value in values.items()}, step=epoch)


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def open_tracker(config: Config, run: RunWriter) -> Tracker | None:
    """None without --tracker, and on every rank but the main one."""
    return TRACKERS[config.tracker](config, run) if config.tracker != "none" and run.writes else None


def library(tracker: str) -> Any:
    """A tracker's package, imported."""
    try:
        return import_module(PACKAGES[tracker])
    except ImportError as error:
        raise SettingsError(
            "tracker-missing",
            f"--tracker {tracker} needs a package that is not installed; 'pip install cdtrans[{tracker}]', or leave "
            "--tracker out.",
        ) from error
