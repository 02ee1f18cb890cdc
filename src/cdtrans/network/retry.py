"""Work that is repeated in smaller parts when the GPU has too little memory for it."""

from collections.abc import Callable
from typing import TypeVar

import torch

from cdtrans.errors import DeviceError
from cdtrans.runtime.device import TOO_LITTLE, free_memory

T = TypeVar("T")


def until_it_fits(attempt: Callable[[], T], use_less: Callable[[], None]) -> T:
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
