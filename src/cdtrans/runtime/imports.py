"""Import torch, timm and the like late: they take seconds, and many errors can be reported without them."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cdtrans.runtime.signals import StopSignals


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
