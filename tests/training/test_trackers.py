"""The curves reach each tracker as it wants them; the libraries are stand-ins that note what they are told."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdtrans.config import make_config
from cdtrans.record.run import Run
from cdtrans.training.trackers import open_tracker
from support import error_says


class StandIn:
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.append((name, arguments, named))

    def of(self, name: str) -> list[tuple[tuple, dict]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


def opened(folder: Path) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(folder, open(folder / ".lock", "w"))  # a lock makes it the writing one


@pytest.fixture
def run(tmp_path: Path) -> Run:
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


def test_weights_and_biases_counts_the_epochs_of_each_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = WandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config({"tracker": "wandb", "lr": 0.5})
    for stage in ("source", "adaptation"):
        tracker = open_tracker(config, run)
        assert tracker is not None
        tracker.log(stage, 3, {"loss": 0.25})
    ((_, first),) = wandb.of("init")
    assert (first["resume"], first["dir"], first["config"]["lr"]) == ("allow", str(run.folder.resolve()), 0.5)
    assert (("source/*",), {"step_metric": "source/epoch"}) in wandb.of("define_metric")
    assert wandb.of("log") == [(({f"{s}/loss": 0.25, f"{s}/epoch": 3},), {}) for s in ("source", "adaptation")]
    run.close()
    open_tracker(config, opened(run.folder))
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


def test_mlflow_continues_the_run_that_it_knows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = make_config({"tracker": "mlflow"})
    tracker = open_tracker(config, run)
    assert tracker is not None
    assert open_tracker(config, run) is not None, "stage 2 of the same process"
    tracker.log("adaptation", 2, {"loss": 0.5})
    assert mlflow.of("log_metrics") == [(({"adaptation/loss": 0.5},), {"step": 2})]
    assert mlflow.of("start_run") == [((), {"run_name": "first"})]
    assert mlflow.of("log_params")[0][0][0]["method"] == "cdtrans"
    run.close()
    open_tracker(config, opened(run.folder))
    assert mlflow.of("start_run")[1:] == [((), {"run_id": "abc"})], "a resumed one"


@pytest.mark.parametrize(("name", "kind", "starts"), [("wandb", WandB, "init"), ("mlflow", MLflow, "start_run")])
def test_runs_of_one_program_are_kept_apart_and_its_own_is_left_open(
    name: str, kind: type[WandB | MLflow], starts: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = kind()
    monkeypatch.setitem(sys.modules, name, library)
    config = make_config({"tracker": name})
    for each in (run, opened(tmp_path / "second")):
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
def test_a_package_that_is_missing_is_named(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with error_says(f"--tracker {name}", f"pip install cdtrans[{name}]"):
        open_tracker(make_config({"tracker": name}), run)


def test_only_one_of_several_processes_tracks_and_none_unasked(run: Run) -> None:
    assert open_tracker(make_config({}), run) is None
    assert open_tracker(make_config({"tracker": "wandb"}), Run(run.folder, None)) is None
