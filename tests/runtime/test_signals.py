"""Ctrl-C and SIGTERM, noted or passed on."""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from cdtrans.runtime.signals import StopSignals


def test_a_second_signal_ends_it_at_once() -> None:
    def twice() -> None:
        with StopSignals.caught():
            os.kill(os.getpid(), signal.SIGINT)
            assert StopSignals.received == signal.SIGINT
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        twice()


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


@pytest.mark.parametrize("module", ["cdtrans.cli.app", "typer"])
def test_ctrl_c_while_the_program_is_imported_is_one_line(module: str) -> None:
    ended = interrupted(module)
    assert (ended.returncode, ended.stderr) == (130, "error: Interrupted.\n")


def test_ctrl_c_when_all_is_done_says_nothing() -> None:
    ended = interrupted("the end")
    assert ended.stdout.startswith("cdtrans ")
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    """As after nohup, or for a job in the background of a script."""
    ended = interrupted("typer", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert ended.stdout.startswith("cdtrans ")
    assert (ended.returncode, ended.stderr) == (0, "")
