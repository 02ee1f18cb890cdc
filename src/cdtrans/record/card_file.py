"""The card beside a model's weights as a file: read it, write it, change its temperature. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from cdtrans.config import LARGEST_SIDE
from cdtrans.errors import CdtransError
from cdtrans.record.files import atomic, intact
from cdtrans.record.run_folder import CARD
from cdtrans.record.shapes import Misfit, require

RESTORE = "restore it, or run 'cdtrans adapt' again with another --out"
SIDE = range(1, LARGEST_SIDE + 1)
SHAPE = {
    **{"classes": [str], "backbone": str, "backbone_args": dict, "weights": str, "neck": {"batchnorm", "none"}},
    **{"resize": SIDE, "crop": SIDE, "precision": {"fp32", "bf16", "fp16"}, "mean": [float], "std": [float]},
    **{"stage": str, "epoch": int, "head": dict, "method": str, "taps": range(1, 1000), "target_labels": int},
    **{"versions": dict, "transferability": bool},
}
COLDEST, HOTTEST = 0.001, 1000.0  # beyond these, probabilities are all 0 and 1, or all equal


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a saved model as it is in the file. Older ones have no temperature, which means 1."""
    file = folder / CARD
    if not file.exists():
        raise CdtransError(f"'{folder}' holds no finished model; {RESTORE}.")
    with intact(file, RESTORE):
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        check_card(values)
    _require_temperature(values.setdefault("temperature", 1.0), folder)
    return values


def check_card(values: dict[str, Any]) -> None:
    """Raise Misfit for values that no card has."""
    require(values, SHAPE)
    if values.get("resize", 1) < values.get("crop", 1):
        raise Misfit(f"resize is {values['resize']}, and crop {values['crop']}")
    mean, std = (values.get(name, [1.0] * 3) for name in ("mean", "std"))
    if not len(mean) == len(std) == 3 or min(std) <= 0:
        raise Misfit(f"mean is {mean}, and std {std}")


def write_card(folder: Path, values: dict[str, Any]) -> None:
    with atomic(folder / CARD) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def set_temperature(folder: Path, value: float) -> None:
    """Change the temperature of a saved model, such as RUN/adapted. The weights are not touched. What the run recorded
    with the old temperature stays: `serving.recorded.recalibrate` changes that too."""
    _require_temperature(value, folder)
    write_card(folder, read_card(folder) | {"temperature": float(value)})


def _require_temperature(value: object, folder: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not COLDEST <= value <= HOTTEST:
        shown = repr(value)[:40]
        raise CdtransError(
            f"The temperature of the model in '{folder}' must be a number from {COLDEST:g} to {HOTTEST:g}, not {shown}."
        )
