"""The card beside a model's weights as a file: read it, write it, change its temperature. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from cdtrans.errors import CdtransError
from cdtrans.storage.files import atomic
from cdtrans.storage.run_folder import CARD

COLDEST, HOTTEST = 0.001, 1000.0  # beyond these, probabilities are all 0 and 1, or all equal


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a saved model as it is in the file. Older ones have no temperature, which means 1."""
    try:
        values = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CdtransError(f"'{folder}' holds no finished model; run 'cdtrans adapt' to its end first.") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise CdtransError(f"The model in '{folder}' is damaged: {error}.") from error
    if not isinstance(values, dict):
        raise CdtransError(f"The model in '{folder}' is damaged: its card is not a mapping.")
    _require_temperature(values.setdefault("temperature", 1.0), folder)
    return values


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
