"""The kernels compute what the operations compute whose place they take.

Without a GPU Triton's interpreter runs them. That must be asked for before Triton is imported, so the checks in
fused_checks.py run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cdtrans.network import operations

CHECKS = Path(__file__).parent / "fused_checks.py"


def check(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_a_gpu() -> None:
    check({})


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux alone")
    check({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


class TestWhereTheyCannotBeBuilt:
    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        operations.build_kernels.cache_clear()

    def test_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "cdtrans.network.kernels", raising=False)
        assert operations.kernels(torch.device("cpu")) is None
        assert "triton" in operations.build_kernels(torch.device("cpu"))[1]

    def test_on_a_device_that_triton_does_not_know(self) -> None:
        assert operations.kernels(torch.device("cpu")) is None
        assert operations.build_kernels(torch.device("cpu"))[1].startswith("ValueError: ")

    def test_they_are_not_used(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert not operations.usable(torch.zeros(1))
