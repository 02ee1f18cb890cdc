"""What other systems lack, taken away here: it does not show that they work, only that nothing here insists on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdtrans.record.files import try_lock
from cdtrans.runtime.ranks import processor_count
from tiny_task import make_task

WITHOUT = """
import os, sys
import torch, timm  # they may use what they like
import filelock
sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = None
for name in ("fork", "sched_getaffinity", "getuid", "killpg", "setsid"):
    delattr(os, name)
sys.platform = "darwin"
import cdtrans
cdtrans.adapt(sys.argv[1], sys.argv[2], config=sys.argv[3], out=sys.argv[4], quiet=True)
print(cdtrans.predict(sys.argv[4], sys.argv[2], quiet=True).images)
"""


def test_one_holder_at_a_time_and_the_next_after_it(tmp_path: Path) -> None:
    first = try_lock(tmp_path / "lock")
    assert first is not None
    assert try_lock(tmp_path / "lock") is None
    with first:
        pass
    second = try_lock(tmp_path / "lock")
    assert second is not None
    second.close()
    assert (tmp_path / "lock").exists()


def test_a_killed_holder_has_let_go(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    code = f"""
import pathlib, time
from cdtrans.record.files import try_lock
held = try_lock(pathlib.Path({str(file)!r}))
print(held is not None, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert try_lock(file) is None
        holder.kill()
    taken = try_lock(file)
    assert taken is not None
    taken.close()


def test_processors_that_the_system_cannot_count_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    for machine, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda machine=machine: machine)
        assert processor_count() == expected


@pytest.mark.slow
def test_a_run_without_fcntl_fork_and_affinity(tmp_path: Path) -> None:
    task = make_task(tmp_path, source_epochs=1, epochs=1)
    places = [task.source, task.target, task.config, tmp_path / "run"]
    ended = subprocess.run([sys.executable, "-c", WITHOUT, *places], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) == 21
