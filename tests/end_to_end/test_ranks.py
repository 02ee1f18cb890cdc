"""Several processes under torchrun compute what one process computes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cdtrans.record.record import RunRecord
from commands import start_ranks, warm
from support import says
from tiny_task import Task, log_lines, make_task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """An odd batch, so that the shares of two ranks differ; no drop path, which each rank draws for itself."""
    return make_task(tmp_path_factory.mktemp("ranks"), batch_size=7, drop_path=0.0)


@pytest.fixture(scope="module")
def one(task: Task) -> Path:
    """The run of a process by itself."""
    ended = warm().run(task.adapt(task.folder / "one"), task.folder / "logs")
    assert ended.code == 0, ended.err
    return task.folder / "one"


@pytest.fixture(scope="module")
def two(task: Task) -> tuple[Path, str]:
    """The run of two ranks as a user starts them, and what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cdtrans"]
    command += task.adapt(task.folder / "two", "--json")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return task.folder / "two", done.stdout


def test_two_ranks_have_the_loss_curve_of_one(one: Path, two: tuple[Path, str]) -> None:
    ours, theirs = log_lines(one), log_lines(two[0])
    assert [line["event"] for line in ours] == [line["event"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=2e-3, abs=2e-4) if isinstance(value, float) else value), key


def test_two_ranks_find_the_pairs_of_one(one: Path, two: tuple[Path, str]) -> None:
    with np.load(one / "pairs/round-01.npz") as a, np.load(two[0] / "pairs/round-01.npz") as b:
        for name in a.files:
            assert a[name].tolist() == b[name].tolist()


def test_two_ranks_end_with_the_weights_of_one(one: Path, two: tuple[Path, str]) -> None:
    for stage in ("source", "adapted"):
        a, b = (load_file(run / stage / "model.safetensors") for run in (one, two[0]))
        for name, tensor in a.items():
            torch.testing.assert_close(b[name], tensor, atol=2e-3, rtol=2e-2, msg=lambda m, n=name: f"{n}: {m}")


def test_one_rank_speaks_for_all(two: tuple[Path, str]) -> None:
    chosen = RunRecord(two[0]).outcome.choice.epoch
    printed = "".join(line for line in two[1].splitlines() if not line.startswith("[Gloo]"))  # torch 2.8 and 2.9
    assert json.loads(printed).items() >= {"run": str(two[0]), "chosen_epoch": chosen, "harm": False}.items()


def test_a_rank_that_dies_ends_the_run_and_any_number_of_ranks_goes_on(task: Task, one: Path) -> None:
    out, logs = task.folder / "killed", task.folder / "logs"
    left, victim = start_ranks(2, task.adapt(out), logs)
    assert victim.wait_until((out / "source").exists)  # stage 2 begins
    victim.send(signal.SIGKILL)
    assert victim.wait().code == -signal.SIGKILL
    ended = left.wait()
    assert ended.code == 2
    assert says(ended.err, "error: ", "other processes")
    assert not (out / "result.json").exists()
    ended = warm().run(task.adapt(out), logs)
    assert ended.code == 0, ended.err
    last = [[line for line in log_lines(run) if line["event"] == "epoch"][-1] for run in (one, out)]
    assert last[1]["loss_source"] == pytest.approx(last[0]["loss_source"], rel=5e-3, abs=5e-4)
    assert len(log_lines(out)) == len(log_lines(one))
