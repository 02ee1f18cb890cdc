"""Devices and precisions, on a machine that may or may not have a GPU."""

import importlib
from pathlib import Path

import pytest
import torch

import cdtrans
from cdtrans.runtime.device import autocast, between_passes, pick_device, pick_precision
from support import raises
from tiny_task import make_task

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (1, "cuda:0")])
def test_auto_is_a_gpu_if_there_is_one(gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert pick_device("auto") == torch.device(expected)


def test_a_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick_device("cuda") == torch.device("cuda:1"), "the one in use, with its number"
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with raises("no-device"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("cpu") == CPU
    with raises("no-device"):
        pick_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "", "meta", "mps:0"])
def test_other_names_are_refused(name: str) -> None:
    with raises("device-unknown"):
        pick_device(name)


def test_a_mac_s_gpu_is_taken_if_it_is_there_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with raises("no-device"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("mps") == MPS
    assert pick_device("auto") == CPU
    assert pick_precision("auto", MPS) == pick_precision("fp32", MPS) == "fp32"
    with raises("precision-of-device"):
        pick_precision("bf16", MPS)


def test_between_passes_only_mps_goes_to_the_cpu() -> None:
    assert [between_passes(device) for device in (CPU, CUDA, MPS)] == [CPU, CUDA, CPU]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("method", ["cotraining", "cdtrans", "shot", "mrkld_lrent"])
def test_a_run_whose_encoded_images_are_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As on a Mac; here a CUDA GPU stands in for its own."""
    task = make_task(tmp_path, device="cuda", precision="fp32", compile="off", source_epochs=1, epochs=2)
    for place in ("network.encoding", "runtime.device", "training.adaptation", "training.loop"):
        module = importlib.import_module(f"cdtrans.{place}")
        monkeypatch.setattr(module, "between_passes", lambda device: CPU)
    places = {"source": task.source, "target": task.target, "config": task.config, "quiet": True}
    cdtrans.adapt(**places, out=tmp_path / "run", method=method, guard=False)
    assert (tmp_path / "run" / "result.json").exists()


def test_the_precision_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert pick_precision("auto", CUDA) == expected
    assert [pick_precision(name, CUDA) for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    assert [pick_precision(name, CPU) for name in ("auto", "fp32", "bf16")] == ["fp32", "fp32", "bf16"]
    with raises("precision-of-device"):
        pick_precision("fp16", CPU)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_forward_passes_run_in_the_precision_asked_for(precision: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(2, 2)
    with autocast(CPU, precision):
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
