"""The versions and the device of a run, for environment.json."""

import platform
from importlib.metadata import version
from typing import Any

from cdtrans.config import Config

PACKAGES = ("cdtrans", "torch", "torchvision", "timm", "numpy", "pillow")


def environment(config: Config) -> dict[str, Any]:
    import torch

    device = torch.device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "packages": {p: package_version(p) for p in PACKAGES},
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
