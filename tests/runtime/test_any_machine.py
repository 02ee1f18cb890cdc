"""Features that other systems lack, taken away: it does not show that they work, only that nothing here insists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
