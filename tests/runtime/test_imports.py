"""Slow imports: Ctrl-C waits for their end, and the garbage collector for nothing else."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cdtrans.runtime.signals import StopSignals, importing
from support import says
from tiny_task import make_source, make_target


def test_ctrl_c_takes_effect_at_the_end() -> None:
    done = []

    def work() -> None:
        with importing():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the import")
        done.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the import"]


def test_in_a_thread_the_main_ones_signals_are_left_alone() -> None:
    """A program that runs `adapt` in its main thread may load a model in another."""

    def load() -> None:
        with importing():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    with StopSignals.caught():
        thread = threading.Thread(target=load)
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)
        assert StopSignals.received == signal.SIGINT, "noted once"
        thread = threading.Thread(target=lambda: importing().__enter__())
        thread.start()
        thread.join()
        assert StopSignals.received == signal.SIGINT, "and not forgotten"


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_afterwards_as_it_was(before: bool) -> None:
    def fail() -> None:
        with importing():
            assert not gc.isenabled()
            raise ImportError

    if not before:
        gc.disable()
    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    """As from a terminal, where the process that decodes ahead gets it too; some moments used to be a crash."""
    places = [str(make_source(tmp_path / "source")), str(make_target(tmp_path / "target"))]
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda moment: interrupted(tmp_path / f"run-{moment}", places, moment), (0.1, 0.5))
    for code, err in ended:
        assert code == 130
        assert says(err, "error: interrupted")
        assert err.count("\n") == 1
    assert not list(tmp_path.glob("run*"))


def interrupted(out: Path, places: list[str], moment: float) -> tuple[int, str]:
    """Exit code and standard error of a run that gets Ctrl-C so many seconds after the first of torch was loaded."""
    command = [sys.executable, "-m", "cdtrans", "adapt", *places, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    maps, end = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 30
    while "libtorch" not in maps.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err
