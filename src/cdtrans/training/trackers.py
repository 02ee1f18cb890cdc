"""Curves for other programs to draw, with --tracker: TensorBoard, Weights & Biases, MLflow. Each is imported only if it
is asked for, and gets the losses and the learning rate of every epoch. What is opened here is closed with the run, so
that the next run of the same program has its own; what the program has opened itself is used and left open."""

import hashlib
from importlib import import_module
from typing import Any, Protocol

from cdtrans.config import Config
from cdtrans.errors import CdtransError
from cdtrans.record.run import Run

PROJECT = "cdtrans"  # what Weights & Biases and MLflow file runs under
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # what is imported
MLFLOW_RUN = "mlflow-run.txt"  # in the run folder: MLflow's name of the run, so that a resumed one continues it


class Tracker(Protocol):
    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, config: Config, run: Run) -> None:
        self.writer = library("tensorboard").SummaryWriter(run.folder / "tensorboard")
        run.at_close(self.writer.close)

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{stage}/{name}", value, epoch)
        self.writer.flush()


class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run folder. Each stage counts its own epochs."""

    def __init__(self, config: Config, run: Run) -> None:
        wandb = library("wandb")
        self.run = wandb.run  # of stage 1, or of the program
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

    def __init__(self, config: Config, run: Run) -> None:
        self.mlflow = library("mlflow")
        known = run.folder / MLFLOW_RUN
        if self.mlflow.active_run() is not None:  # of stage 1, or of the program
            return
        run.at_close(self.mlflow.end_run)
        if known.exists():
            self.mlflow.start_run(run_id=known.read_text(encoding="utf-8").strip())
            return
        self.mlflow.set_experiment(PROJECT)
        begun = self.mlflow.start_run(run_name=run.folder.name)
        run.write(MLFLOW_RUN, begun.info.run_id.encode())
        self.mlflow.log_params({key: str(value)[:250] for key, value in config.to_dict().items()})

    def log(self, stage: str, epoch: int, values: dict[str, float]) -> None:
        self.mlflow.log_metrics({f"{stage}/{name}": value for name, value in values.items()}, step=epoch)


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def open_tracker(config: Config, run: Run) -> Tracker | None:
    """None without --tracker, and on every rank but the main one."""
    return TRACKERS[config.tracker](config, run) if config.tracker != "none" and run.writes else None


def library(tracker: str) -> Any:
    """Its package, imported; an error if it is not installed."""
    try:
        return import_module(PACKAGES[tracker])
    except ImportError as error:
        raise CdtransError(
            f"--tracker {tracker} needs a package that is not installed; 'pip install cdtrans[{tracker}]', or leave "
            "--tracker out."
        ) from error
