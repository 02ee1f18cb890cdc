"""Runs of a benchmark as processes, each as `cdtrans ARGUMENTS` in a terminal would be.

Importing torch and timm takes four seconds of CPU, more than many short runs need. So on Linux one server process
imports them once and forks the others. It has no GPU, which would not survive a fork. macOS's frameworks do not survive
it either, and Windows has no fork: there, every process starts from nothing."""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from cdtrans.errors import DeviceError
from cdtrans.runtime.ranks import processor_count

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = ["cdtrans.cli.app", "cdtrans.run.finish", "cdtrans.training.source"]  # torch and timm come with them
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def start_process(arguments: Sequence[str], out: Path, err: Path, *, side_by_side: int = 1) -> BaseProcess:
    """Start `cdtrans` with its output appended to two files. It ends when this process does; Ctrl-C in the terminal
    reaches only this one. `side_by_side` processes share the processors, unless the user has set OMP_NUM_THREADS."""
    context: Any = get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    share = max(1, processor_count() // side_by_side)
    threads = None if side_by_side == 1 or "OMP_NUM_THREADS" in os.environ else share
    process: BaseProcess = context.Process(
        target=run_command, args=(list(arguments), str(out), str(err), dict(os.environ), threads)
    )
    try:
        with _starting():
            process.start()
    except (EOFError, ConnectionError) as error:
        raise DeviceError(
            "process-start", "A run could not be started, perhaps for lack of memory; run the same command again."
        ) from error
    return process


def run_command(arguments: list[str], out: str, err: str, environment: dict[str, str], threads: int | None) -> None:
    """The child: `cdtrans` with these arguments in a session of its own. Leaves with the exit code."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    for standard, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)
    sys.argv = ["cdtrans", *arguments]
    runpy.run_module("cdtrans", run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    """A run whose benchmark was killed must not keep a GPU or a lock; it saves its state and ends."""
    parent = parent_process()
    assert parent is not None, "multiprocessing has started this process"
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _starting() -> Iterator[None]:
    """Around the start of a process. multiprocessing would import the user's script in every child, and run it if it
    has no `__main__` guard. The server inherits the blocked signals: Ctrl-C must not end it while it imports torch."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    masks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if masks else set()
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
