"""Processes that a benchmark starts: forked from one that has imported torch, or started from nothing."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdtrans.runtime import processes

pytestmark = pytest.mark.slow  # torch is imported

LONG = ("demo", "--json", "--quiet")  # an hour from now it would still write into this folder
SCRIPT = f"""
import sys, time
from pathlib import Path
from cdtrans.runtime.processes import start_process
print("the script runs")
process = start_process({LONG!r}, Path("out"), Path("err"), side_by_side=2)
print(process.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def becomes_true(happens, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A user's program without a `__main__` guard that starts a long run, and the run's process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": tmp_path}
    with subprocess.Popen([sys.executable, "script.py"], start_new_session=True, **how) as program:
        assert program.stdout.readline() == "the script runs\n"
        yield program, int(program.stdout.readline())
        program.kill()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_it_runs_the_command_line_into_files(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes and odd arguments arrive, also where a fork is not safe."""
    monkeypatch.setattr(processes, "METHOD", method)
    out, err = tmp_path / "out", tmp_path / "err"
    good = processes.start_process(("methods", "--json"), out, err)
    good.join()
    assert (good.exitcode, err.read_text()) == (0, "")
    assert '"cotraining"' in out.read_text()
    bad = processes.start_process(("eval", "gone \udcff\n'\"", "x"), err, err)
    bad.join()
    assert bad.exitcode == 2
    assert err.read_text().startswith("error: ")
    assert "gone" in err.read_text()


def test_no_child_outlives_a_killed_benchmark(script: tuple[subprocess.Popen, int]) -> None:
    """The child has torch and a session of its own, and does not run the benchmark's script again."""
    program, run = script
    assert "libtorch" in Path(f"/proc/{run}/maps").read_text()
    assert becomes_true(lambda: os.getsid(run) == run)
    assert is_alive(run)
    program.kill()
    assert becomes_true(lambda: not is_alive(run))


def test_ctrl_c_reaches_the_benchmark_alone(script: tuple[subprocess.Popen, int], tmp_path: Path) -> None:
    """And not the server, which is in the benchmark's session."""
    program, run = script
    assert becomes_true(lambda: os.getsid(run) == run)
    server = int(Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()[1])
    os.killpg(program.pid, signal.SIGINT)
    time.sleep(0.2)
    assert is_alive(server)
    assert is_alive(run)
    assert "the script runs" not in (tmp_path / "out").read_text()


def test_a_run_can_be_ended(tmp_path: Path) -> None:
    for number, codes in ((signal.SIGTERM, (-signal.SIGTERM, 128 + signal.SIGTERM)), (signal.SIGKILL, (-9,))):
        run = processes.start_process(LONG, tmp_path / "out", tmp_path / "err")
        (run.terminate if number == signal.SIGTERM else run.kill)()
        run.join()
        assert run.exitcode in codes
        run.terminate()  # no error after the end


@pytest.mark.parametrize(
    ("side_by_side", "set_by_user", "threads"), [(3, None, 5), (3, "3", None), (1, None, None), (40, None, 1)]
)
def test_runs_side_by_side_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side_by_side: int, set_by_user: str | None, threads: int | None
) -> None:
    class Context:
        def Process(self, target, args):
            self.args = args
            return self

        def set_forkserver_preload(self, modules: list[str]) -> None: ...
        def start(self) -> None: ...

    monkeypatch.setattr(processes, "get_context", lambda method: Context())
    monkeypatch.setattr(processes, "processor_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    assert processes.start_process((), tmp_path, tmp_path, side_by_side=side_by_side).args[-1] == threads


def test_what_is_preloaded_exists() -> None:
    """The server skips a module that it cannot import."""
    for module in processes.PRELOADED:
        importlib.import_module(module)
