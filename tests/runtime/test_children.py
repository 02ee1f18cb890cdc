"""Processes that a benchmark starts: forked from one that has imported torch, or started from nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cdtrans.errors import CdtransError
from cdtrans.runtime.children import Child, Children, Forked, environment

pytestmark = pytest.mark.slow  # torch is imported

LONG = ("demo", "--json", "--quiet")  # an hour from now it would still write into this folder

SIDE_BY_SIDE = 2


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children(SIDE_BY_SIDE) as children:
        yield children


class Started(NamedTuple):
    child: Child
    out: Path
    err: Path

    @classmethod
    def by(cls, children: Children, place: Path, *arguments: str) -> "Started":
        out, err = place / "out", place / "err"
        with open(out, "wb") as to, open(err, "wb") as errors:
            return cls(children.start(arguments, to, errors), out, err)

    def code(self) -> int | None:
        self.child.wait()
        return self.child.poll()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


def test_it_runs_the_command_line_into_files(children: Children, tmp_path: Path) -> None:
    started = Started.by(children, tmp_path, "methods", "--json")
    assert started.code() == 0
    assert '"cotraining"' in started.out.read_text()
    assert started.err.read_text() == ""


def test_exit_codes_and_odd_arguments_arrive(children: Children, tmp_path: Path) -> None:
    started = Started.by(children, tmp_path, "eval", "gone \udcff\n'\"", "x")
    assert started.code() == 2
    assert started.out.read_text() == ""
    assert started.err.read_text().startswith("error: ")
    assert "gone" in started.err.read_text()


def test_it_starts_with_torch_imported(children: Children, tmp_path: Path) -> None:
    """Which is what it is for: the start of a process that imports it takes more CPU than this whole one."""
    started = Started.by(children, tmp_path, *LONG)
    maps = Path(f"/proc/{started.child.pid}/maps").read_text()
    started.child.kill()
    assert started.code() == -signal.SIGKILL
    assert "libtorch" in maps


def test_the_server_has_no_threads_and_no_gpu(children: Children) -> None:
    assert children._server is not None
    place = Path(f"/proc/{children._server.process.pid}")
    assert "/dev/nvidia" not in place.joinpath("maps").read_text()
    assert "Threads:\t1\n" in place.joinpath("status").read_text()


def test_runs_side_by_side_share_the_processors(children: Children, tmp_path: Path) -> None:
    started = Started.by(children, tmp_path, *LONG)
    variables = Path(f"/proc/{started.child.pid}/environ").read_bytes().split(b"\0")
    started.child.kill()
    started.child.wait()
    assert f"OMP_NUM_THREADS={environment(SIDE_BY_SIDE)['OMP_NUM_THREADS']}".encode() in variables


@pytest.mark.parametrize(("set_by_user", "threads"), [(None, "5"), ("3", "3")])
def test_the_number_of_threads_that_a_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, threads: str
) -> None:
    monkeypatch.setattr("cdtrans.runtime.children.processor_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    assert environment(3)["OMP_NUM_THREADS"] == threads


def test_more_runs_than_processors_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdtrans.runtime.children.processor_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(16)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(1)


def test_it_is_out_of_reach_of_ctrl_c_and_can_be_ended(children: Children, tmp_path: Path) -> None:
    started = Started.by(children, tmp_path, *LONG)
    wait_for = time.monotonic() + 10
    while os.getsid(started.child.pid) != started.child.pid and time.monotonic() < wait_for:
        time.sleep(0.01)
    assert os.getsid(started.child.pid) == started.child.pid
    started.child.terminate()
    assert started.code() in (-signal.SIGTERM, 128 + signal.SIGTERM)
    started.child.terminate()  # of one that has ended is no error


def test_no_child_outlives_a_killed_benchmark(tmp_path: Path) -> None:
    code = (
        "import sys, time; from cdtrans.runtime.children import Children;"
        f"child = Children(1).start({LONG!r}, sys.stderr.buffer, sys.stderr.buffer);"
        "print(child.pid, child.server.process.pid, flush=True); time.sleep(600)"
    )
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "-c", code], **how) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        parent.kill()
    assert all(map(gone, pids))


def test_if_the_server_is_killed_the_benchmark_says_so(tmp_path: Path) -> None:
    with Children(1) as children:
        started = Started.by(children, tmp_path, *LONG)
        assert isinstance(started.child, Forked)
        started.child.server.process.kill()
        with pytest.raises(CdtransError, match="run the same command again") as caught:
            started.child.wait()
        assert "\n" not in str(caught.value)
        assert gone(started.child.pid)


def test_where_a_fork_is_not_safe_every_process_starts_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("cdtrans.runtime.children.processor_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Children(2) as children:
        started = Started.by(children, tmp_path, "methods", "--json")
        assert isinstance(started.child, subprocess.Popen)
        if Path("/proc").exists():  # this machine is none of those
            assert b"OMP_NUM_THREADS=3\0" in Path(f"/proc/{started.child.pid}/environ").read_bytes()
        assert started.code() == 0
        assert '"cotraining"' in started.out.read_text()
