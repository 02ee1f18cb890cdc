"""Ctrl-C and SIGTERM: noted, passed on, or kept until slow imports are done."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cdtrans.errors import Interrupted
from cdtrans.runtime.signals import StopSignals, importing
from support import says
from tiny_task import make_source, make_target


def test_a_second_signal_ends_it_at_once() -> None:
    def twice() -> None:
        with StopSignals.caught():
            os.kill(os.getpid(), signal.SIGINT)
            assert StopSignals.received == signal.SIGINT
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        twice()


def test_between_steps_the_first_signal_ends_it_at_once() -> None:
    done = []

    def work() -> None:
        with StopSignals.caught(at_once=True):
            with StopSignals.whole_steps():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("the step")
                StopSignals.received = None
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as error:
        work()
    assert (done, error.value.exit_code) == (["the step"], 143)


def test_the_first_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals.caught("Stopping."):
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr() == ("", "Stopping.\n")
    with StopSignals.caught():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr() == ("", "")


def test_the_handlers_from_before_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def fail() -> None:
        with StopSignals.caught():
            assert signal.getsignal(signal.SIGINT) is not before[signal.SIGINT]
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert {number: signal.getsignal(number) for number in before} == before
    assert StopSignals.received == signal.SIGINT, "whoever handles the failure may want to know"
    with StopSignals.caught():
        assert StopSignals.received is None


def test_in_another_thread_signals_are_left_to_whoever_runs_it() -> None:
    done = []

    def work() -> None:
        with StopSignals.caught():
            done.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [before]


# `cdtrans --version` with Ctrl-C at the moment that a module is looked for, or at the end.
INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from cdtrans.__main__ import main
try:
    main()
finally:
    print("the end", flush=True)
    if os.environ["AT"] == "the end":
        os.kill(os.getpid(), signal.SIGINT)
"""


def interrupted(at: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", INTERRUPTED, "--version"]
    environment = os.environ | {"AT": at}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, **how)


def ignoring() -> None:
    """As after nohup, or for a job in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("at", "before", "code", "err"),
    [
        *((module, None, 130, "error: Interrupted.\n") for module in ("cdtrans.cli.app", "typer")),
        ("the end", None, -signal.SIGINT, ""),
        ("typer", ignoring, 0, ""),
    ],
)
def test_ctrl_c_is_one_line_while_the_program_is_imported_and_none_at_the_end(
    at: str, before: Callable[[], None] | None, code: int, err: str
) -> None:
    ended = interrupted(at, preexec_fn=before)
    assert (ended.returncode, ended.stderr) == (code, err)
    assert ended.stdout.startswith("cdtrans ") == (not err)


# Slow imports


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
        assert StopSignals.received == signal.SIGINT, "noted once, and not forgotten"


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
        ended = pool.map(lambda moment: while_importing(tmp_path / f"run-{moment}", places, moment), (0.1, 0.5))
    for code, err in ended:
        assert code == 130
        assert says(err, "error: interrupted")
        assert err.count("\n") == 1
    assert not list(tmp_path.glob("run*"))


def while_importing(out: Path, places: list[str], moment: float) -> tuple[int, str]:
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
