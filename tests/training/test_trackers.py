"""The curves reach each tracker as it wants them; the libraries are stand-ins that note what they are told."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdtrans.config import make_config
from cdtrans.storage.run import Run
from cdtrans.training.trackers import open_tracker
from support import error_says


class StandIn:
    """Notes every call; a method returns the stand-in itself, unless told otherwise."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            answer = self.answers.get(name, self)
            return answer() if callable(answer) else answer

        return call

    def of(self, name: str) -> list[tuple[tuple, dict]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "first").mkdir()
    return Run(tmp_path / "first", open(tmp_path / "lock", "w"))  # a lock makes it the writing one


def test_weights_and_biases_counts_the_epochs_of_each_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for stage in ("source", "adaptation"):  # each stage opens it, and so does a resumed run
        tracker = open_tracker(make_config({"tracker": "wandb", "lr": 0.5}), run)
        assert tracker is not None
        tracker.log(stage, 3, {"loss": 0.25})
    (_, first), (_, second) = wandb.of("init")
    assert first["id"] == second["id"]
    assert (first["resume"], first["dir"], first["config"]["lr"]) == ("allow", str(run.folder.resolve()), 0.5)
    assert (("source/*",), {"step_metric": "source/epoch"}) in wandb.of("define_metric")
    assert wandb.of("log") == [(({f"{s}/loss": 0.25, f"{s}/epoch": 3},), {}) for s in ("source", "adaptation")]


def test_mlflow_continues_the_run_that_it_knows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[object] = []
    mlflow = StandIn(
        active_run=lambda: active[0] if active else None, start_run=SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = make_config({"tracker": "mlflow"})
    tracker = open_tracker(config, run)
    assert tracker is not None
    active.append(object())
    assert open_tracker(config, run) is not None, "stage 2 of the same process"
    tracker.log("adaptation", 2, {"loss": 0.5})
    assert mlflow.of("log_metrics") == [(({"adaptation/loss": 0.5},), {"step": 2})]
    assert mlflow.of("start_run") == [((), {"run_name": "first"})]
    assert mlflow.of("log_params")[0][0][0]["method"] == "cdtrans"
    active.clear()
    open_tracker(config, run)
    assert mlflow.of("start_run")[1:] == [((), {"run_id": "abc"})], "a resumed one"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with error_says(f"--tracker {name}", f"pip install cdtrans[{name}]"):
        open_tracker(make_config({"tracker": name}), run)


def test_only_one_of_several_processes_tracks_and_none_unasked(run: Run) -> None:
    assert open_tracker(make_config({}), run) is None
    assert open_tracker(make_config({"tracker": "wandb"}), Run(run.folder, None)) is None
