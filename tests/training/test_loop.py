import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdtrans.config import make_config
from cdtrans.errors import Interrupted
from cdtrans.record.layout import STATE
from cdtrans.record.run import RunWriter
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.training.loop import Loop, all_finite, load_stage, step_seed
from cdtrans.training.optimisation import Optimisation
from commands import warm
from run_folders import DATA
from support import devices, raises, says
from tiny_task import make_task

EPOCHS, STEPS = 3, 4


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    run = new_run(tmp_path / "run")
    yield run
    run.close()


def new_run(folder: Path) -> RunWriter:
    return RunWriter.open(folder, make_config({"device": "cpu"}), DATA)


class Net(nn.Sequential):
    """All that a state must carry: weights, running statistics, and randomness in every step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))


class Stopped(Exception):
    pass


def train(run: RunWriter, *, stop_after: int | None = None, spoil: Any = None, **settings: Any) -> tuple[Net, list]:
    """A stage in the small. `spoil(epoch, step, model, loss)` gives another loss; `stop_after` updates it is over."""
    config = make_config({"device": "cpu", "precision": "fp32", "warmup_epochs": 1, "save_every": 0} | settings)
    model = Net()
    optimisation = Optimisation(model, config, lr=0.1, epochs=EPOCHS, device=torch.device("cpu"))
    loop = Loop(run, "source", model, optimisation, Screen(quiet=True), config=config, epochs=EPOCHS)
    updates, seen = 0, []
    for epoch in loop.epochs():
        optimisation.start_epoch(epoch, loop.step)
        for step in loop.steps(STEPS):
            out = model(torch.randn(6, 3))  # the loop has seeded this
            losses = torch.stack([out[:, 0].square().mean(), out[:, 1].abs().mean()])
            loss = losses.sum() if spoil is None else spoil(epoch, step, model, losses.sum())
            optimisation.start_step()
            optimisation.update(loss)
            loop.update(("square", "absolute"), losses.detach())
            updates += 1
            if updates == stop_after:
                raise Stopped
        run.log("epoch", epoch=epoch, losses=loop.mean_losses())
        seen.append((epoch, loop.mean_losses()))
    return model, seen


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# Seeds


def test_no_two_steps_share_a_seed() -> None:
    grid = itertools.product((0, 1, 2, 1234), ("init", "source", "adaptation"), range(22), range(100))
    seeds = [step_seed(*place) for place in grid] + [step_seed(1234, "adaptation", 1, n) for n in range(100, 50_000)]
    assert len(set(seeds)) == len(seeds)


def test_seeds_stay_what_they_are() -> None:
    """They decide every result: another value here changes what a published seed gives."""
    assert step_seed(1234, "init", 0, 0) == 304355641897145095
    assert step_seed(1234, "source", 1, 0) == 1076649750735257379
    assert step_seed(0, "adaptation", 40, 99) == 230718503740733182

    torch.Generator().manual_seed(step_seed(10**40, "source", 1, 1))  # one that torch takes


# Restoring


def test_only_whole_states_count_and_what_came_after_is_done_again(tmp_path: Path) -> None:
    whole, run = new_run(tmp_path / "whole"), new_run(tmp_path / "run")
    model, seen = train(whole)
    with pytest.raises(Stopped):
        train(run, stop_after=7, save_every=1000)  # never due: only the beginning is saved
    state = load_stage(run)
    assert state is not None
    assert (state.epoch, state.step) == (1, 0)
    run.log("torn", note="not in the saved state")
    again, seen_again = train(run)
    assert_equal(again.state_dict(), model.state_dict())
    assert seen_again == seen
    assert (run.folder / "log.jsonl").read_bytes() == (whole.folder / "log.jsonl").read_bytes()
    whole.close()
    run.close()


def test_the_state_of_another_stage_is_not_taken_up(run: RunWriter) -> None:
    config = make_config({"device": "cpu", "precision": "fp32"})
    train(run)
    model = Net()
    optimisation = Optimisation(model, config, lr=0.1, epochs=2, device=torch.device("cpu"))
    loop = Loop(run, "adaptation", model, optimisation, Screen(quiet=True), config=config, epochs=2)
    assert (loop.epoch, loop.step, loop.sums) == (1, 0, None)
    assert loop.fresh
    assert_equal(model.state_dict(), Net().state_dict())
    state = load_stage(run)
    assert state is not None
    assert state.stage == "adaptation"  # a kill from here on begins this stage anew


@pytest.mark.parametrize(("save_every", "saves"), [(0, 1 + EPOCHS * (STEPS + 1)), (1000, 1)])
def test_states_are_saved_as_often_as_asked_for(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch, save_every: float, saves: int
) -> None:
    count = 0
    save = Loop.save

    def counted(loop: Loop) -> None:
        nonlocal count
        count += 1
        save(loop)

    monkeypatch.setattr(Loop, "save", counted)
    train(run, save_every=save_every)
    assert count == saves


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": "x"}, {"epoch": 0}, {"step": None}, {"stage": 5}, {"names": 3}, {"parts": []}, {"log_size": -1}),
        *({"sums": "x"}, {"parts": {}}, {"parts": {"model": {"weight": torch.zeros(7)}}}, {"more": 3}),
        *([], 3, {}, {"stage": "source"}, b"torn"),
    ],
    ids=str,
)
def test_a_damaged_state_is_named(run: RunWriter, change: Any) -> None:
    """A changed one, if `change` has some of its names; otherwise `change` itself."""
    train(run)
    file = run.folder / STATE.name
    if isinstance(change, bytes):
        file.write_bytes(file.read_bytes()[:200])
    else:
        whole = torch.load(file, weights_only=True)
        known = isinstance(change, dict) and len(change) == 1 and change != {"stage": "source"}
        torch.save(whole | change if known else change, file)
    with raises("run-damaged"):
        train(run)


# Losses


def root_of_zero(model: Net, loss: Tensor) -> Tensor:
    """A finite loss that ruins the weights: its slope is not finite."""
    return loss + (model[0].weight * 0).sum().sqrt()


@pytest.mark.parametrize("place", [(1, 0), (2, 2), (EPOCHS, STEPS - 1)])
@pytest.mark.parametrize("save_every", [0, 1000])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), float("-inf"), None])
def test_a_loss_or_a_slope_that_is_not_finite_stops_it_and_is_never_saved(
    run: RunWriter, factor: float | None, save_every: float, place: tuple[int, int]
) -> None:
    def spoil(epoch: int, step: int, model: Net, loss: Tensor) -> Tensor:
        if (epoch, step) != place:
            return loss
        return root_of_zero(model, loss) if factor is None else loss * factor

    with raises("training-hopeless") as caught:
        train(run, spoil=spoil, save_every=save_every)
    if factor is not None or save_every == 0:  # otherwise a later step or the end of the epoch tells
        assert f"source stage, epoch {place[0]}, step {place[1] + 1}." in str(caught.value)
    state = load_stage(run)
    assert state is not None
    assert (state.epoch, state.step) == (place if save_every == 0 else (1, 0))
    assert all(bool(tensor.isfinite().all()) for tensor in state.parts["model"].values())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_all_finite_looks_at_weights_and_running_statistics(device: str, value: float) -> None:
    model = Net().to(device)
    with torch.no_grad():
        model[3].weight[0, 0] = 1e38  # large is not infinite
    assert all_finite(model)
    model[1].running_mean[2] = value
    assert not all_finite(model)
    model = Net().to(device)
    with torch.no_grad():
        model[3].weight[1, 1] = value
    assert not all_finite(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--source-lr", "1e30"], ["loss", "not finite", "source stage, epoch 1, step 2.", "last good state"]),
        # one step in all: no later loss would tell
        (["--lr", "1e10", "--epochs", "1", "--batch-size", "64"], ["scores of the target images", "not finite"]),
    ],
)
def test_a_run_that_diverges_ends_in_one_sentence_and_hands_over_no_model(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    task = make_task(tmp_path / "task")
    out = tmp_path / "run"
    ended = warm().run(task.adapt(out, *flags), tmp_path / "logs")
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: ")
    assert says(ended.err, *words)
    assert ended.err.count("\n") == 1
    assert not (out / "adapted").exists()
    assert not (out / "result.json").exists()
    saved = torch.load(out / STATE.name, weights_only=True)["parts"]["model"]
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())


# Being asked to stop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_the_step_with_the_state_saved(
    run: RunWriter, number: signal.Signals, code: int
) -> None:
    def spoil(epoch: int, step: int, model: Net, loss: Tensor) -> Tensor:
        if (epoch, step) == (2, 1):
            os.kill(os.getpid(), number)
        return loss

    with pytest.raises(Interrupted) as caught, StopSignals.caught():
        train(run, spoil=spoil, save_every=1000)
    assert caught.value.exit_code == code
    state = load_stage(run)
    assert state is not None
    assert (state.epoch, state.step) == (2, 2)
