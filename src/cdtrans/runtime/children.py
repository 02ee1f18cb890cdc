"""Processes that run `cdtrans`, started one after another by a benchmark.

Importing torch and timm takes a process four seconds of CPU, which is more than many short runs need. So on Linux one
process, the server, imports them once and forks the others. It has no GPU and no threads, which would not survive a
fork. macOS's frameworks do not survive it either, and Windows has no fork: there, every process starts from nothing."""

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Protocol

from cdtrans.errors import CdtransError
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.signals import die_with_parent, own_session

COMMAND = (sys.executable, "-m", "cdtrans")
PRELOADED = ("cdtrans.cli.entry", "cdtrans.run.session", "cdtrans.measure.evaluate")  # what `adapt` and `eval` need
LONGEST = 1 << 20  # bytes of a message
POLL_SECONDS = 0.01


class Child(Protocol):
    """As `subprocess.Popen`, as far as it is used."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> Any: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Children:
    """Starts `cdtrans` with arguments, in sessions of their own, so that Ctrl-C reaches only this process. The children
    end when this process ends. `side_by_side`: how many of them run at a time."""

    def __init__(self, side_by_side: int) -> None:
        self._server: Server | None = None
        self.environment = environment(side_by_side)

    def start(self, arguments: tuple[str, ...], out: IO[bytes], err: IO[bytes]) -> Child:
        if sys.platform != "linux":
            command, nothing = [*COMMAND, *arguments], subprocess.DEVNULL
            files: dict[str, Any] = {"stdin": nothing, "stdout": out, "stderr": err}
            return subprocess.Popen(command, env=self.environment, **files, **own_session())
        self._server = self._server or Server(self.environment)
        return self._server.fork(arguments, out, err)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()


def environment(side_by_side: int) -> dict[str, str]:
    """Of the children. Each computes with its share of the processors, unless the user has set the number of threads:
    by default torch takes all of them in each process, and they spend their time on switching."""
    if side_by_side == 1:
        return dict(os.environ)
    return {"OMP_NUM_THREADS": str(max(1, processor_count() // side_by_side)), **os.environ}


class Server:
    """The process that forks, seen from the benchmark."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                **own_session(),
            )

    def fork(self, arguments: tuple[str, ...], out: IO[bytes], err: IO[bytes]) -> "Forked":
        return Forked(self, self.ask({"start": arguments}, out.fileno(), err.fileno()))

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        try:
            socket.send_fds(self.channel, [json.dumps(request).encode()], files)
            answer = self.channel.recv(LONGEST)
        except OSError:
            answer = b""
        if not answer:
            raise CdtransError(
                "The process that starts the runs has ended, perhaps for lack of memory; run the same command again."
            )
        return json.loads(answer)

    def close(self) -> None:
        self.channel.close()
        self.process.wait()


class Forked:
    """A child of the server."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server, self.pid, self.code = server, pid, None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.server.ask({"poll": self.pid})
        return self.code

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(POLL_SECONDS)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:  # the server reaps it at a poll alone, so nobody else has its number
            os.kill(self.pid, number)


# What follows runs in the server.


def serve(channel: socket.socket) -> None:
    """Answer requests until the benchmark has ended. Returns in children too, after their command."""
    for module in PRELOADED:
        importlib.import_module(module)
    server = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, LONGEST, 2)
        if not message:
            return
        request = json.loads(message)
        if "start" in request:
            answer: int | None = os.fork()
            if answer == 0:
                become(request["start"], files, channel, server)
            for file in files:
                os.close(file)
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        channel.send(json.dumps(answer).encode())


def become(arguments: list[str], files: list[int], channel: socket.socket, server: int) -> None:
    """`cdtrans` with these arguments; leaves with its exit code."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # it ended before this process asked to be told
        os._exit(1)
    channel.close()
    for standard, file in enumerate(files, start=1):
        os.dup2(file, standard)
        os.close(file)
    sys.argv = [COMMAND[-1], *arguments]
    runpy.run_module(COMMAND[-1], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    with suppress(ConnectionError), socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours)
