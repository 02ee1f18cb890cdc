"""What a run has to do is known before it begins: every unit that is planned is counted in the end, and no other."""

import functools
import itertools
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cdtrans.config import make_config
from cdtrans.inputs.batches import Images
from cdtrans.methods.base import Method, Sizes
from cdtrans.methods.cdtrans import CDTrans
from cdtrans.methods.cotraining import CoTraining
from cdtrans.methods.instant import Instant
from cdtrans.methods.mcd import MCD
from cdtrans.network.backbone import create_backbone
from cdtrans.network.network import Network
from cdtrans.run import session
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.outlook import Outlook
from cdtrans.runtime.screen import Screen
from cdtrans.training import workload as workload_module
from cdtrans.training.state import Loop
from cdtrans.training.workload import Workload, measured_pace, stage_1_work
from tiny_task import QUICK, TINY, Task, make_task, tree

SIZES = Sizes(classes=3, source_images=100, target_images=40)


# The plan


def workload(kind: type[Method], held_out: int = 0, **settings: Any) -> Workload:
    return Workload(make_config({"batch_size": 16} | settings), kind, SIZES, held_out)


def test_training_on_the_source_takes_three_passes_of_an_image() -> None:
    config = make_config({"source_epochs": 5, "batch_size": 33})  # a last batch of one image is left out
    assert stage_1_work(config, 100) == pytest.approx(5 * 99 * 3)
    assert stage_1_work(config, 100, epoch=5, step=1) == pytest.approx(66 * 3)


def test_the_work_of_the_authors_recipe() -> None:
    """Target and held-out images, then both in every epoch; the source in every round and at the end; and as many
    pairs as there are images, in whole batches, of three branches each."""
    work = workload(CDTrans, held_out=10, epochs=5, rebuild_every=2)
    assert work.stage_2() == (40 + 10) + 5 * (40 + 10) + 3 * 100 + 100 + 5 * (128 * 9)
    assert work.stage_2(pairs=50) == (40 + 10) + 5 * (40 + 10) + 3 * 100 + 100 + 5 * (48 * 9)
    assert work.stage_2(pairs=7) == (40 + 10) + 5 * (40 + 10) + 3 * 100 + 100 + 5 * (7 * 9)


def test_the_work_of_other_methods() -> None:
    pairs = 1920  # of 19,200 in ten rounds
    assert workload(CoTraining, method="cotraining", epochs=10, rebuild_every=1).stage_2() == (
        40 + 10 * 40 + 10 * 100 + 100 + 10 * pairs * 7
    )
    assert workload(MCD, method="mcd", epochs=1).stage_2() == 40 + 40 + 100 + 100 + 96 * 20
    instant = {"method": "instant", "epochs": 1}
    assert workload(Instant, 10, **instant).stage_2() == (40 + 10) + 100 + (40 + 10) + 100
    assert workload(Instant, 10, source_fit="probe", **instant).stage_2() == 40 + 10 + 100, "every image once"


# The measurement


class Restless(nn.Module):
    """Everything that a forward pass could leave behind: running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.seen: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.seen.append(len(x))
        return self.drop(self.norm(x + torch.rand(())))  # type: ignore[no-any-return]


def some_images(count: int) -> Images:
    pixels = np.zeros((count, 6, 6, 3), dtype=np.uint8)
    places = {"crop": 4, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    return Images(pixels, np.arange(count), **places, device=torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace(training: bool) -> None:
    network: Any = Restless().train(training)
    network.norm.train(not training)  # a module's mode need not be that of the whole
    torch.manual_seed(3)
    before = {name: x.clone() for name, x in network.state_dict().items()}, torch.get_rng_state()
    assert measured_pace(network, some_images(9), make_config({"precision": "fp32"})) > 0
    assert network.seen == [4] * 5 + [64] * 5, "a batch to warm up, then four; as they took no time, larger ones"
    assert all(torch.equal(x, before[0][name]) for name, x in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (network.training, network.norm.training, network.drop.training) == (training, not training, training)


def test_measuring_a_slow_network_takes_two_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = Restless()
    clock = SimpleNamespace(monotonic=lambda: 0.6 * len(network.seen))
    monkeypatch.setattr(workload_module, "time", clock)
    assert measured_pace(network, some_images(3), make_config({"precision": "fp32"})) == pytest.approx(0.15)
    assert network.seen == [4] * 2, "also with fewer images than a batch"


# Whole runs


class Account(Screen):
    """A screen that keeps what was planned and how often the plan was corrected, and by how much."""

    def __init__(self) -> None:
        super().__init__()
        self.outlooks: list[Outlook] = []
        self.planned: list[float] = []
        self.corrections: list[float] = []
        self.said: list[str] = []
        self.said_at: list[float] = []

    def expect(self, units: float) -> None:
        assert self.outlook is not None
        self.corrections.append(units - self.outlook.ahead)
        super().expect(units)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.said_at.append(time.monotonic())

    @property
    def forecasts(self) -> list[str]:
        return [text for text in self.said if text.startswith(("This run", "About"))]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    return make_account(monkeypatch)


def make_account(patch: pytest.MonkeyPatch) -> Account:
    account, start_clock = Account(), session.start_clock

    def start(screen: Screen, *arguments: Any, **more: Any) -> None:
        start_clock(screen, *arguments, **more)
        assert screen.outlook is not None
        account.outlooks.append(screen.outlook)
        account.planned.append(screen.outlook.ahead)

    patch.setattr(session, "start_clock", start)
    return account


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    more = {"epochs": 4, "rebuild_every": 2, "source_epochs": 2, "select": "last"}
    return make_task(tmp_path_factory.mktemp("workload"), **(QUICK | more))


def run(task: Task, out: str | Path, screen: Screen | None = None, **settings: Any) -> None:
    places = {"source": task.source, "target": task.target, "out": task.folder / out, "config": task.config}
    adapt(**places, screen=screen, quiet=screen is None, **settings)  # type: ignore[arg-type]


def seconds_in(forecast: str) -> int:
    found = re.search(r"about (\d+) seconds", forecast, re.IGNORECASE)
    assert found, forecast
    return int(found[1])


BEST = {"method": "cotraining", "method_args": {"length": 0.01}, "source_fit": "probe", "neck": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "authors": {},
    "held_out": {"holdout": 0.2},
    "cotraining": BEST,
    "cotraining_held_out": BEST | {"holdout": 0.2},
    "cotraining_trained_source": BEST | {"source_fit": "train"},
    "instant": {"method": "instant", "epochs": 1, "source_fit": "probe", "holdout": 0.2},
    "instant_trained_source": {"method": "instant", "epochs": 1, "holdout": 0.2},
    "probe": {"source_fit": "probe"},
    "dann": {"method": "dann"},
    "mcd": {"method": "mcd", "epochs": 1, "method_args": {"hidden": 8}},
    "rpll": {"method": "rpll", "epochs": 1},
    "mrkld_lrent": {"method": "mrkld_lrent", "epochs": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_is_what_is_done(task: Task, account: Account, kind: str) -> None:
    run(task, kind, account, **KINDS[kind])
    (outlook,) = account.outlooks
    assert outlook.ahead == pytest.approx(0, abs=1e-6)
    assert account.outlook is None, "the run is over"
    # CDTrans knows a round's pairs when the round begins, in the first and third epoch; all others before the run
    surprises = [epoch for epoch, units in enumerate(account.corrections, 1) if abs(units) > 1e-6]
    assert set(surprises) <= ({1, 3} if kind in ("authors", "held_out", "probe") else set())


@pytest.mark.slow
def test_an_earlier_epoch_that_is_chosen_is_encoded_again(
    task: Task, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = itertools.count(10, -1)
    monkeypatch.setattr("cdtrans.trust.selection.consensus", lambda scores: float(next(falling)))
    run(task, "earlier", account, select="consensus")
    assert account.corrections[-1] == 21
    assert account.outlooks[0].ahead == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["train", "probe"])
def test_stage_1_of_another_run_is_no_work(task: Task, account: Account, fit: str) -> None:
    run(task, f"stage-1-{fit}", source_fit=fit)
    run(task, f"taken-{fit}", account, source_fit=fit, source_model=str(task.folder / f"stage-1-{fit}"))
    assert account.outlooks[0].ahead == pytest.approx(0, abs=1e-6)
    assert account.planned == [21 + 24 + 4 * (21 + 40 * 9) + 24 + 24], "no training on the source"
    (forecast,) = account.forecasts
    assert forecast == f"This run will take about {seconds_in(forecast)} seconds (4 epochs on cpu)."


@pytest.mark.slow
def test_the_guards_evidence_is_work(task: Task, account: Account) -> None:
    """Both domains are encoded with the pretrained backbone, also where another run's card names its weights."""
    weights = task.folder / "w.safetensors"
    backbone = create_backbone(TINY["backbone"], crop=16, drop_path=0.0, args=TINY["backbone_args"])
    save_file(backbone.state_dict(), weights)
    settings: dict[str, Any] = {"weights": str(weights), "pretrained": True, "method": "dann"}
    run(task, "evidence", account, **settings)
    run(task, "evidence-taken", account, **settings, source_model=str(task.folder / "evidence"))
    assert all((task.folder / out / "evidence.npz").exists() for out in ("evidence", "evidence-taken"))
    assert [outlook.ahead for outlook in account.outlooks] == pytest.approx([0, 0], abs=1e-6)
    assert account.corrections == pytest.approx([0] * 8), "known from the beginning"


# Where a run is stopped: stage, epoch, and the steps of the epoch that were done. With 24 images an epoch of the source
# has three steps; one of pairs has four at least.
IN_STAGE_1 = [("source", 1, 2), ("source", 2, 0), ("source", 2, 3)]
IN_STAGE_2 = [("adaptation", *place) for place in ((1, 0), (2, 3), (3, 0), (3, 1), (4, 2), (5, 0))]
STOPS = [("dann", stop) for stop in IN_STAGE_1]
STOPS += [("held_out", stop) for stop in IN_STAGE_2]
STOPS += [("cotraining_held_out", stop) for stop in IN_STAGE_2]
STOPS += [("instant", ("adaptation", epoch, 0)) for epoch in (1, 2)]
TRAINING = {"cotraining_held_out": "4 epochs", "instant": "no training,"}


@pytest.fixture(scope="module")
def whole(task: Task) -> Callable[[str], Account]:
    """kind -> the account of a whole run. At each of its stops the run folder was copied, as a kill would leave it."""

    @functools.cache
    def of(kind: str) -> Account:
        save, stops = Loop.save, [stop for stopped, stop in STOPS if stopped == kind]

        def save_and_copy(self: Loop) -> None:
            save(self)
            place = (self.stage, self.epoch, self.step)
            if place in stops and not left_at(task, kind, place).exists():
                shutil.copytree(task.folder / f"whole-{kind}", left_at(task, kind, place))

        with pytest.MonkeyPatch.context() as patch:
            account = make_account(patch)
            patch.setattr(Loop, "save", save_and_copy)
            run(task, f"whole-{kind}", account, save_every=0, **KINDS[kind])
        return account

    return of


def left_at(task: Task, kind: str, stop: tuple[str, int, int]) -> Path:
    return task.folder / f"left-{kind}-{'-'.join(map(str, stop))}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), STOPS, ids=str)
def test_a_resumed_run_plans_what_is_left(
    task: Task, whole: Callable[[str], Account], account: Account, kind: str, stop: tuple[str, int, int]
) -> None:
    before = whole(kind)
    out = left_at(task, kind, stop)
    assert (out / "state").exists()
    run(task, out, account, **KINDS[kind])
    assert account.outlooks[0].ahead == pytest.approx(0, abs=1e-6)
    _, first_epoch, steps = stop
    surprises = [epoch for epoch, units in enumerate(account.corrections, first_epoch) if abs(units) > 1e-6]
    planned_then = {epoch for epoch in (1, 3) if epoch > first_epoch or steps == 0}  # the others' pairs were saved
    assert set(surprises) <= (planned_then if kind == "held_out" else set())
    assert account.planned[0] <= before.planned[0]
    (first,), (second,) = before.forecasts, account.forecasts
    assert (
        first == f"This run will take about {seconds_in(first)} seconds ({TRAINING.get(kind, '2 + 4 epochs')} on cpu)."
    )
    assert second == f"About {seconds_in(second)} seconds are left."


@pytest.mark.slow
def test_nothing_of_it_changes_the_bytes_of_a_run(task: Task, account: Account) -> None:
    run(task, "quiet", drop_path=0.3)
    run(task, "loud", account, drop_path=0.3)
    assert account.forecasts
    assert tree(task.folder / "quiet") == tree(task.folder / "loud")


@pytest.mark.slow
def test_the_forecast_comes_before_training_and_is_about_right(
    task: Task, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backbone that takes 5 ms for an image, and twice as much again for its gradient."""
    features = Network._features

    def slow(self: Network, images: Tensor, *more: Any, **named: Any) -> Tensor:
        time.sleep(0.005 * len(images) * (3 if torch.is_grad_enabled() else 1))
        return features(self, images, *more, **named)

    monkeypatch.setattr(Network, "_features", slow)
    run(task, "slow", account, method="dann", source_epochs=1, epochs=2)
    end = time.monotonic()
    places = [n for n, text in enumerate(account.said) if text.startswith(("This run", "source 1/", "adaptation "))]
    assert [account.said[n].split()[0] for n in places] == ["This", "source", "adaptation", "adaptation"]
    real = end - account.said_at[places[0]]
    assert real / 3 < seconds_in(account.said[places[0]]) < real * 3
    for n in places[1:]:
        minutes, seconds = account.said[n].split()[-2].split(":")
        real = end - account.said_at[n] + 1  # the rest
        assert real / 3 - 1 < 60 * int(minutes) + int(seconds) < real * 3 + 1, account.said[n]
