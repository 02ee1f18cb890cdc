"""The command line in fresh processes, without waiting for torch to be imported each time: a warm server process has
imported everything and forks one child for each command. The children are real processes, and what happens to them
(SIGKILL, SIGINT, a full disk) is real. A cold server has not imported torch, for tests of what is done before that.

Children import this module, so it imports nothing slow."""

import atexit
import functools
import gc
import importlib
import os
import pkgutil
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

COLD = ["cdtrans.cli.app", "cdtrans.run.pipeline"]
UNLOADED = ("cdtrans.__main__", "cdtrans.network.kernels")  # need a GPU, or run at once
may_be_slow = True  # whether the test that runs now is marked `slow`; conftest.py sets it


@dataclass(frozen=True)
class Ended:
    code: int  # negative: the signal that killed it
    out: str
    err: str


class Process:
    """A command under way."""

    def __init__(self, process: BaseProcess, files: tuple[Path, Path]) -> None:
        self.process, self.files = process, files
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait_until(self, happened: Callable[[], bool], seconds: float = 60) -> bool:
        """True once it has happened, False if the process ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.poll() is not None
            if happened():
                return True
            if ended:
                return False
            time.sleep(0.002)
        raise AssertionError(f"waited {seconds} s in vain; the process printed {self.files[1].read_text()!r}")

    def wait(self, seconds: float = 120) -> Ended:
        self.process.join(seconds)
        code = self.poll()
        assert code is not None, f"waited {seconds} s in vain for {self.files[1].read_text()!r}"
        out, err = (file.read_text(encoding="utf-8", errors="surrogateescape") for file in self.files)
        return Ended(code, out, err)


@dataclass
class Order:
    """The work of a child. `constants`: other values of some, by their full name. `without`: modules that it cannot
    import. `look_for`: modules; at the end it prints those that it has imported, as a list on a line of its own."""

    arguments: list[str]
    files: tuple[Path, Path]
    folder: Path
    env: dict[str, str]
    crash: dict[str, Any] | None = None
    without: Sequence[str] = ()
    look_for: Sequence[str] = ()
    constants: dict[str, Any] = field(default_factory=dict)


class Server:
    """Forks the processes of one temperature; multiprocessing itself knows only one fork server."""

    def __init__(self, preload: list[str]) -> None:
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload(preload)
        self.started: list[BaseProcess] = []
        atexit.register(self.close)

    def start(
        self,
        arguments: list[str],
        logs: Path,
        *,
        folder: Path | None = None,
        env: dict[str, str] | None = None,
        **how: Any,
    ) -> Process:
        """`folder`: where it is started; the others are the fields of `Order`."""
        logs.mkdir(parents=True, exist_ok=True)
        files = logs / f"{len(self.started)}.out", logs / f"{len(self.started)}.err"
        cache = {"CDTRANS_CACHE": os.environ.get("CDTRANS_CACHE", str(logs / "cache"))}
        order = Order(arguments, files, folder or Path.cwd(), cache | (env or {}), **how)
        child: Any = get_context("forkserver").Process(target=_obey, args=(order,))
        with mock.patch.object(forkserver, "connect_to_new_process", self.server.connect_to_new_process):
            child.start()
        self.started.append(child)
        for file in files:
            file.touch()
        return Process(child, files)

    def run(self, arguments: list[str], logs: Path, **how: Any) -> Ended:
        return self.start(arguments, logs, **how).wait()

    def close(self) -> None:
        """A test that failed may have left a process."""
        for child in self.started:
            if child.exitcode is None:
                child.kill()


def warm() -> Server:
    """Started when it is first needed."""
    assert may_be_slow, "this test uses the warm process: mark it with pytest.mark.slow"
    return _warm()


@functools.cache
def _warm() -> Server:
    import cdtrans

    modules = [module.name for module in pkgutil.walk_packages(cdtrans.__path__, "cdtrans.")]
    return Server([name for name in modules if name not in UNLOADED])


@functools.cache
def cold() -> Server:
    return Server(COLD)


def start_ranks(count: int, arguments: list[str], logs: Path, **how: Any) -> list[Process]:
    """The command in so many ranks, as torchrun starts them."""
    port = random.SystemRandom().randrange(20_000, 32_000)  # the system gives these to no other connection meanwhile
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    return [warm().start(arguments, logs, env=shared | rank, **how) for rank in own]


def _obey(order: Order) -> None:
    """The child."""
    gc.freeze()  # imports of the server are no garbage
    os.fsync = lambda file: None  # no test cuts the power, and a kill loses nothing that was written
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, file in enumerate(order.files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), standard)
    os.chdir(order.folder)
    os.environ.update({"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | order.env)
    for name in order.without:
        sys.modules[name] = None  # type: ignore[assignment]
    constants = order.constants
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        constants = {"cdtrans.runtime.processes.METHOD": "fork"} | constants  # so that jobs have torch already
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    if order.crash:
        _crash_at(**order.crash)
    sys.argv = ["cdtrans", *order.arguments]
    try:
        importlib.import_module("cdtrans.cli.app").run_program()
    finally:
        if order.look_for:
            print([name for name in order.look_for if name in sys.modules])


def _crash_at(name: str, when: str, nth: int = 1) -> None:
    """SIGKILL this process just before or after the nth time that something takes the name `name`; before it, a file's
    draft is also cut in half, as if the kill had come while it was written."""
    replace, count = os.replace, 0

    def replace_or_die(draft: Any, final: Any) -> None:
        nonlocal count
        count += Path(final).name == name
        due = count == nth and Path(final).name == name
        if due and when == "before":
            if Path(draft).is_file():
                os.truncate(draft, Path(draft).stat().st_size // 2)
            os.kill(os.getpid(), 9)
        replace(draft, final)
        if due:
            os.kill(os.getpid(), 9)

    os.replace = replace_or_die
