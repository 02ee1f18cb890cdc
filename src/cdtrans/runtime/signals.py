"""Ctrl-C and SIGTERM: a request to end at the next whole step, with the state saved, or after slow imports."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from cdtrans.errors import Interrupted

STDERR = 2  # its file descriptor


class StopSignals:
    """`with StopSignals.caught()` notes a first signal in `received`, where it stays until the next `caught`, and
    writes the `notice` to standard error; a second one ends the process at once. With `at_once` the first one does,
    except within `whole_steps`."""

    received: int | None = None
    in_step = False

    @staticmethod
    @contextmanager
    def whole_steps() -> Iterator[None]:
        """Steps that a signal must not cut: whoever makes them looks at `received` after each."""
        StopSignals.in_step = True
        try:
            yield
        finally:
            StopSignals.in_step = False

    @staticmethod
    @contextmanager
    def caught(notice: str = "", *, at_once: bool = False) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            if StopSignals.received is not None:
                raise KeyboardInterrupt
            StopSignals.received = number
            if at_once and not StopSignals.in_step:
                raise Interrupted(number)
            if notice and sys.stderr is not None:
                gap = "\n" if os.isatty(STDERR) else ""  # below the progress bar and ^C
                with suppress(OSError):  # not print: its buffer may be in use at this moment
                    os.write(STDERR, f"{gap}{notice}\n".encode())

        if threading.current_thread() is not threading.main_thread():  # whoever runs us there handles signals
            yield
            return
        StopSignals.received = None
        ours = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not None]  # None: a C program's
        before = {s: signal.signal(s, note) for s in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def importing() -> Iterator[None]:
    """Wrap slow imports. The garbage collector is off, because their objects stay and scanning them takes a fifth of
    the time. Ctrl-C takes effect after them, because some libraries catch it during the import, or crash."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with StopSignals.caught():
            yield
    finally:
        if collecting:
            gc.enable()
    if StopSignals.received is not None and threading.current_thread() is threading.main_thread():
        signal.raise_signal(StopSignals.received)
