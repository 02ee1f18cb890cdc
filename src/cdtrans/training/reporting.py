"""What is shown on screen and logged while a stage runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cdtrans.config import Config
from cdtrans.record.run import Run
from cdtrans.runtime.screen import Screen, Task
from cdtrans.training.state import Loop
from cdtrans.training.trackers import open_tracker

REFRESH_SECONDS = 1.0  # reading the loss waits for the device, so it is read this often and not every step


class StageReport:
    """One per stage: `with report.epoch(...) as bar`, then `report.write(...)` with what the epoch came to."""

    def __init__(self, run: Run, screen: Screen, loop: Loop, config: Config) -> None:
        self.run, self.screen, self.loop = run, screen, loop
        self.tracker = open_tracker(config, run)

    @contextmanager
    def epoch(self, *, steps: int, images: int, work: float, lr: float, note: str = "") -> Iterator["EpochBar"]:
        """`images` are those that one step trains on, `work` is that of a step (cdtrans.training.workload); `note` is
        said beside the loss."""
        loop = self.loop
        self.note = note
        self.lr, self.epoch_start, self.first_step = lr, time.monotonic(), loop.step
        with self.screen.track(f"{loop.stage} {loop.epoch}/{loop.last_epoch}", steps, loop.step, work=work) as task:
            yield EpochBar(self, task, images)
        self.seconds = time.monotonic() - self.epoch_start
        self.rate = (loop.step - self.first_step) * images / max(self.seconds, 1e-9)

    def write(self, losses: dict[str, float], **fields: Any) -> None:
        """The epoch's line in the log, on the screen and, if asked for, in a tracker."""
        loop = self.loop
        self.run.log("epoch", stage=loop.stage, epoch=loop.epoch, lr=self.lr, **losses, **fields)
        timing = {"seconds": round(self.seconds, 3), "images_per_second": round(self.rate, 1)}
        self.run.log_timing(stage=loop.stage, epoch=loop.epoch, **timing)
        shown = [f"{name} {value:.4g}" for name, value in losses.items()] + [f"{k} {v}" for k, v in fields.items()]
        self.screen.say(
            f"{loop.stage} {loop.epoch}/{loop.last_epoch}  {'  '.join(shown)}  lr {self.lr:.3g}  "
            f"{self.rate:.0f} images/s  {self.screen.time_left()}".rstrip()
        )
        if self.tracker is not None:
            self.tracker.log(loop.stage, loop.epoch, {**losses, "lr": self.lr})


class EpochBar:
    """The bar of one epoch: moves with every step, and says the mean loss so far about once a second."""

    def __init__(self, report: StageReport, task: Task, images: int) -> None:
        self.report, self.task, self.images = report, task, images
        self.refreshed, self.note = time.monotonic(), ""

    def advance(self) -> None:
        now = time.monotonic()
        if now - self.refreshed > REFRESH_SECONDS and not self.report.screen.quiet:
            self.refreshed = now
            loop, report = self.report.loop, self.report
            rate = (loop.step - report.first_step) * self.images / (now - report.epoch_start)
            loss = sum(loop.mean_losses().values())
            self.note = f"loss {loss:.3f}  lr {report.lr:.3g}  {report.note}  {rate:.0f} images/s"
        self.task.advance(1, self.note)
