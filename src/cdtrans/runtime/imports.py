"""How torch, timm and the like are imported: they take seconds, so all that can be told without them is told first."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cdtrans.runtime.signals import StopSignals


@contextmanager
def importing() -> Iterator[None]:
    """Around slow imports. What they make stays, so the garbage collector would go through it for nothing, which takes
    a fifth of the time. Ctrl-C takes effect when they are done: some libraries catch it there, or crash."""
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
