"""Ctrl-C and SIGTERM, noted or passed on."""

import os
import signal
import threading

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
