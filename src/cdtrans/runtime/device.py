"""The device and the precision of a run, and the memory of a GPU."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch

from cdtrans.config import require_device
from cdtrans.errors import DeviceError, SettingsError

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TOO_LITTLE = "The GPU has too little memory"  # how every sentence about it begins
_T = TypeVar("_T")


def pick_device(name: str) -> torch.device:
    """'auto' is a CUDA GPU if there is one. Such a GPU always has its number, so that equal devices compare equal."""
    require_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            "no-device", f"There is no device '{name}' here (GPUs: {torch.cuda.device_count()}); use --device cpu."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(
            "no-device", "There is no device 'mps' here (only Macs with Apple silicon have it); use --device cpu."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def between_passes(device: torch.device) -> torch.device:
    """The device that keeps encoded images, computes neighbours, graphs and scores, and sums losses: this needs
    float64, which MPS does not have."""
    return torch.device("cpu") if device.type == "mps" else device


def autocast(device: torch.device, precision: str, *, cache: bool = True) -> AbstractContextManager:
    """Run forward passes in this precision. The weights stay in float32; with `cache`, rounded copies are kept until
    the end of the context."""
    dtype = AUTOCAST[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=cache)


def pick_precision(name: str, device: torch.device) -> str:
    """'auto' is bf16 on a CUDA GPU that has it, fp16 on an older one, fp32 elsewhere."""
    if device.type == "mps" and name not in ("auto", "fp32"):
        raise SettingsError(
            "precision-of-device", "On the device 'mps' a run computes in float32; leave --precision out."
        )
    if name == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if name == "fp16" and device.type == "cpu":
        raise SettingsError("precision-of-device", "fp16 training needs a GPU; use --precision fp32 or bf16 on CPU.")
    return name


def ran_out(error: BaseException | None) -> bool:
    """Whether an error is that the GPU has no memory left, or followed from that."""
    return error is not None and (isinstance(error, torch.cuda.OutOfMemoryError) or ran_out(error.__context__))


class ToHost:
    """A tensor on its way to main memory. A GPU copies it while Python continues; `numpy` waits for it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.copy = x.to("cpu", non_blocking=x.is_cuda)  # into pinned memory
        self.arrived = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def numpy(self) -> np.ndarray:
        if self.arrived is not None:
            self.arrived.synchronize()
        array: np.ndarray = self.copy.numpy()
        return array


def free_memory() -> None:
    """Give back what nothing refers to any more. Not within `except`: the exception refers to what its frames do."""
    gc.collect()
    torch.cuda.empty_cache()


def until_it_fits(attempt: Callable[[], _T], use_less: Callable[[], None]) -> _T:
    """The result of the first attempt that the GPU's memory is enough for. After each other one `use_less` makes the
    next one smaller, or raises if nothing is left to try."""
    while True:
        try:
            return attempt()
        except torch.cuda.OutOfMemoryError:
            pass  # continue where the exception no longer refers to the tensors of this attempt
        use_less()
        free_memory()


def half(batch: int, work: str, advice: str) -> int:
    """Half as many images at once; an error that names the work and gives the advice if there is only one."""
    if batch == 1:
        raise DeviceError("gpu-memory", f"{TOO_LITTLE} to {work} a single image; {advice}.")
    return batch // 2
