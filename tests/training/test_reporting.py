"""The lines, log entries and curves of a stage, by a clock that the test moves."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdtrans.config import make_config
from cdtrans.record.run import RunWriter
from cdtrans.runtime import screen as screen_module
from cdtrans.runtime.screen import Pace, Screen
from cdtrans.training import loop as loop_module
from cdtrans.training.loop import Loop, open_tracker
from cdtrans.training.optimisation import Optimisation
from run_folders import DATA
from support import raises


class Heard(Screen):
    """A screen and its task that remember their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.tracked: list[tuple[str, int, int]] = []
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def track(self, description: str, total: int, done: int = 0, *, pace: Pace, stage: str) -> Iterator["Heard"]:
        self.tracked.append((description, total, done))
        self.pace = pace
        yield self

    def advance(self, done: int, note: str = "") -> None:
        self.notes.append(note)
        self.pace.advance(done)


class Stage:
    """Epoch 2 of 4, of 10 steps that take some seconds each."""

    def __init__(self, run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.screen = 100.0, Heard()
        for module in (loop_module, screen_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        model = nn.Linear(2, 1)
        config = make_config({"device": "cpu", "precision": "fp32"})
        optimisation = Optimisation(model, config, lr=0.1, epochs=4, device=torch.device("cpu"))
        self.loop = Loop(run, "adaptation", model, optimisation, self.screen, config=config, epochs=4)
        self.loop.epoch = 2
        monkeypatch.setattr(optimisation, "start_epoch", lambda epoch, done: 0.004)

    def train(self, seconds: float) -> None:
        def step(x: Tensor, value: float) -> Tensor:
            self.now += seconds
            return torch.tensor([value, 2 * value])

        step.names = ("loss_source", "loss_target")
        batches = [(torch.ones(1), float(n)) for n in range(10)]
        self.loop.train(step, batches, images=16, note="37 pairs", pairs=37)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    run = RunWriter.open(tmp_path / "run", make_config({"device": "cpu"}), DATA)
    yield run
    run.close()


@pytest.fixture
def stage(run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(run, monkeypatch)


def lines(run: RunWriter, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def test_the_line_and_the_entry_of_an_epoch(run: RunWriter, stage: Stage) -> None:
    stage.train(seconds=1.0)
    losses = {"loss_source": 4.5, "loss_target": 9.0}
    assert lines(run, "log.jsonl") == [
        {"event": "epoch", "stage": "adaptation", "epoch": 2, "lr": 0.004, **losses, "pairs": 37}
    ]
    (timing,) = lines(run, "timings.jsonl")
    assert abs(timing.pop("at") - time.time()) < 60
    assert timing == {"stage": "adaptation", "epoch": 2, "seconds": 10.0, "images_per_second": 16.0}
    line = "adaptation 2/4  loss_source 4.5  loss_target 9  pairs 37  lr 0.004  16 images/s  0:20 left"
    assert stage.screen.lines == [line]


def test_the_note_beside_the_bar_is_made_anew_about_once_a_second(stage: Stage) -> None:
    """Reading the loss waits for the device. A resumed epoch is timed by its own steps."""
    stage.loop.step, stage.loop.sums = 4, torch.zeros(2)
    stage.train(seconds=0.6)
    assert stage.screen.tracked == [("adaptation 2/4", 40, 14)]
    assert stage.screen.notes[:2] == ["", "loss 4.500  lr 0.004  37 pairs  27 images/s"]
    assert [note[:6] for note in stage.screen.notes[2:]] == ["loss 4", "loss 8", "loss 8", "loss 1"]


# Trackers: the libraries are stand-ins that note what they are told


class StandIn:
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.append((name, arguments, named))

    def of(self, name: str) -> list[tuple[tuple, dict]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


def opened(folder: Path) -> RunWriter:
    folder.mkdir(exist_ok=True)
    return RunWriter(folder, open(folder / ".lock", "w"))  # a lock makes it the writing one


@pytest.fixture
def first_run(tmp_path: Path) -> RunWriter:
    return opened(tmp_path / "first")


class WandB(StandIn):
    """`run` is the open one, as in wandb."""

    def __init__(self) -> None:
        super().__init__()
        self.run: StandIn | None = None

    def init(self, **named: Any) -> StandIn:
        self.calls.append(("init", (), named))
        self.run = self
        return self

    def finish(self) -> None:
        self.run = None


def test_weights_and_biases_counts_the_epochs_of_each_stage(
    first_run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = WandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config({"tracker": "wandb", "lr": 0.5})
    for stage in ("source", "adaptation"):
        track = open_tracker(config, first_run)
        assert track is not None
        track(stage, 3, {"loss": 0.25})
    ((_, first),) = wandb.of("init")
    assert (first["resume"], first["dir"], first["config"]["lr"]) == ("allow", str(first_run.folder.resolve()), 0.5)
    assert (("source/*",), {"step_metric": "source/epoch"}) in wandb.of("define_metric")
    assert wandb.of("log") == [(({f"{s}/loss": 0.25, f"{s}/epoch": 3},), {}) for s in ("source", "adaptation")]
    first_run.close()
    open_tracker(config, opened(first_run.folder))
    assert wandb.of("init")[1][1]["id"] == first["id"], "a resumed one"


class MLflow(StandIn):
    """One run is active at a time, as in mlflow."""

    def __init__(self) -> None:
        super().__init__()
        self.active: object = None

    def active_run(self) -> object:
        return self.active

    def start_run(self, **named: Any) -> object:
        assert self.active is None, "mlflow refuses a second one"
        self.calls.append(("start_run", (), named))
        self.active = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
        return self.active

    def end_run(self) -> None:
        self.active = None


def test_mlflow_continues_the_run_that_it_knows(first_run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = make_config({"tracker": "mlflow"})
    track = open_tracker(config, first_run)
    assert track is not None
    assert open_tracker(config, first_run) is not None, "stage 2 of the same process"
    track("adaptation", 2, {"loss": 0.5})
    assert mlflow.of("log_metrics") == [(({"adaptation/loss": 0.5},), {"step": 2})]
    assert mlflow.of("start_run") == [((), {"run_name": "first"})]
    assert mlflow.of("log_params")[0][0][0]["method"] == "cdtrans"
    first_run.close()
    open_tracker(config, opened(first_run.folder))
    assert mlflow.of("start_run")[1:] == [((), {"run_id": "abc"})], "a resumed one"


@pytest.mark.parametrize(("name", "kind", "starts"), [("wandb", WandB, "init"), ("mlflow", MLflow, "start_run")])
def test_runs_of_one_program_are_kept_apart_and_its_own_is_left_open(
    name: str,
    kind: type[WandB | MLflow],
    starts: str,
    first_run: RunWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = kind()
    monkeypatch.setitem(sys.modules, name, library)
    config = make_config({"tracker": name})
    for each in (first_run, opened(tmp_path / "second")):
        open_tracker(config, each)
        each.close()
    assert len(library.of(starts)) == 2
    getattr(library, starts)()  # by the program
    third = opened(tmp_path / "second")
    open_tracker(config, third)
    third.close()
    assert len(library.of(starts)) == 3
    assert (library.run if name == "wandb" else library.active) is not None


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(name: str, first_run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with raises("tracker-missing"):
        open_tracker(make_config({"tracker": name}), first_run)


def test_only_one_of_several_processes_tracks_and_none_unasked(first_run: RunWriter) -> None:
    assert open_tracker(make_config({}), first_run) is None
    assert open_tracker(make_config({"tracker": "wandb"}), RunWriter(first_run.folder, None)) is None
