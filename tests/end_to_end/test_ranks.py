"""Several processes under torchrun compute what one process computes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tiny_task import Task, log_lines, make_task

pytestmark = pytest.mark.slow

SECONDS = 120


def torchrun(task: Task, out: Path, ranks: int, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "cdtrans", *task.adapt(out, *flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """An odd batch, so that the shares of two ranks differ; no drop path, which each rank draws for itself."""
    return make_task(tmp_path_factory.mktemp("ranks"), batch_size=7, drop_path=0.0)


@pytest.fixture(scope="module")
def both(task: Task) -> tuple[Path, Path, str]:
    """The runs of one rank and of two, made at the same time, and what the two printed."""
    first = torchrun(task, task.folder / "one", 1)
    second = torchrun(task, task.folder / "two", 2, "--json")
    ended = [finish(process) for process in (first, second)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    return task.folder / "one", task.folder / "two", ended[1][1]


@pytest.fixture(scope="module")
def one(both: tuple[Path, Path, str]) -> Path:
    return both[0]


@pytest.fixture(scope="module")
def two(both: tuple[Path, Path, str]) -> tuple[Path, str]:
    return both[1:]


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
    chosen = json.loads((two[0] / "result.json").read_text())["chosen_epoch"]
    assert json.loads(two[1]).items() >= {"run": str(two[0]), "chosen_epoch": chosen, "harm": False}.items()


def test_a_rank_that_dies_ends_the_run_and_any_number_of_ranks_goes_on(task: Task, one: Path) -> None:
    out = task.folder / "killed"
    process = torchrun(task, out, 2)
    while not (out / "source").exists():  # stage 2 begins
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    victim = next(pid for pid in children(process.pid) if rank_of(pid) == "1")
    os.kill(victim, signal.SIGKILL)
    code, _, err = finish(process)
    assert code != 0
    # torchrun also tells the rank that is left to stop, which may come before that one misses its peer
    assert "other processes" in err or "Interrupted" in err, err
    assert not (out / "result.json").exists()
    code, _, err = finish(torchrun(task, out, 1))
    assert code == 0, err
    last = [[line for line in log_lines(run) if line["event"] == "epoch"][-1] for run in (one, out)]
    assert last[1]["loss_source"] == pytest.approx(last[0]["loss_source"], rel=5e-3, abs=5e-4)
    assert len(log_lines(out)) == len(log_lines(one))


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((e.split(b"=")[1].decode() for e in environment if e.startswith(b"RANK=")), "")
