"""What is said and logged of a stage, by a clock that the test moves."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdtrans.config import make_config
from cdtrans.record.run import Run
from cdtrans.runtime.outlook import Outlook
from cdtrans.runtime.screen import Screen
from cdtrans.training import reporting
from cdtrans.training.reporting import StageReport
from run_folders import DATA


class Heard(Screen):
    """A screen, and the task on it, that remember what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.tracked: list[tuple[str, int, int, float]] = []
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def track(self, description: str, total: int, done: int = 0, *, work: float = 0.0) -> Iterator["Heard"]:
        self.tracked.append((description, total, done, work))
        yield self

    def advance(self, done: int, note: str = "") -> None:
        self.notes.append(note)


class Stage:
    """A report on epochs 2 to 4 of 10 steps each, of which `train` takes some at a second each."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: self.now))
        losses = {"mean_losses": lambda: {"loss_source": 0.25, "loss_target": 0.5}}
        self.loop: Any = SimpleNamespace(stage="adaptation", epoch=2, last_epoch=4, step=0, **losses)
        self.screen = Heard()
        self.report = StageReport(run, self.screen, self.loop, make_config({}))

    def train(self, steps: int = 10, seconds: float = 1.0) -> None:
        with self.report.epoch(steps=10, images=16, work=48.0, lr=0.004, note="37 pairs") as bar:
            for _ in range(steps):
                self.now += seconds
                self.loop.step += 1
                bar.advance()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run.open(tmp_path / "run", make_config({"device": "cpu"}), DATA)
    yield run
    run.close()


@pytest.fixture
def stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(run, monkeypatch)


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def test_the_line_of_an_epoch(run: Run, stage: Stage) -> None:
    """With how much is left of the whole run."""
    stage.screen.outlook = Outlook(1200, 0.1, rest=10)
    stage.train()
    stage.report.write({"loss_source": 0.25, "loss_target": 0.5}, pairs=37)
    losses = {"loss_source": 0.25, "loss_target": 0.5}
    assert lines(run, "log.jsonl") == [
        {"event": "epoch", "stage": "adaptation", "epoch": 2, "lr": 0.004, **losses, "pairs": 37}
    ]
    (timing,) = lines(run, "timings.jsonl")
    assert abs(timing.pop("at") - time.time()) < 60
    assert timing == {"stage": "adaptation", "epoch": 2, "seconds": 10.0, "images_per_second": 16.0}
    said = "adaptation 2/4  loss_source 0.25  loss_target 0.5  pairs 37  lr 0.004  16 images/s  2:10 left"
    assert stage.screen.said == [said]
    assert stage.screen.tracked == [("adaptation 2/4", 10, 0, 48.0)]


def test_an_epoch_taken_up_in_its_middle_is_timed_by_what_was_done(run: Run, stage: Stage) -> None:
    stage.loop.step = 6
    stage.train(steps=4)
    stage.report.write({"loss": 1.0})
    assert stage.screen.tracked == [("adaptation 2/4", 10, 6, 48.0)]
    assert lines(run, "timings.jsonl")[0]["images_per_second"] == 16.0


def test_the_note_beside_the_bar(stage: Stage) -> None:
    """The screen adds how much is left of the run."""
    stage.train(steps=5, seconds=1.5)
    assert stage.screen.notes[-1] == "loss 0.750  lr 0.004  37 pairs  11 images/s"
    assert len(stage.screen.notes) == 5


def test_the_note_is_made_anew_about_once_a_second(stage: Stage) -> None:
    """Because reading the loss waits for the device."""
    stage.loop.mean_losses = lambda: {"loss": float(stage.loop.step)}
    stage.train(steps=10, seconds=0.3)
    assert stage.screen.notes[:3] == ["", "", ""]
    assert [note[:6] for note in stage.screen.notes[3:]] == ["loss 4"] * 4 + ["loss 8"] * 3


def test_outside_a_run_it_does_not_say_how_much_is_left(stage: Stage) -> None:
    stage.train()
    stage.report.write({"loss": 1.0})
    assert stage.screen.said == ["adaptation 2/4  loss 1  lr 0.004  16 images/s"]
