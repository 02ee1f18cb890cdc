"""Transition: what a run records of its own target images, by `RunRecord`."""

from pathlib import Path
from typing import Literal

import numpy as np

from cdtrans.record import run as writing
from cdtrans.record.record import RunRecord

LOGITS = "logits.npz"
VIEWS = "views.npz"


def confidences(run: Path, model: str = "chosen") -> np.ndarray:
    return RunRecord(run).confidences(model)


def target_logits(run: Path, model: str = "chosen") -> np.ndarray:
    return RunRecord(run).calibrated_logits(model)


def calibrated_with(run: Path, model: str = "chosen") -> Literal["labels", "estimate", "nothing"]:
    return RunRecord(run).calibrated_with(model)


def predictions_of(run: Path, model: str = "chosen") -> bytes:
    return writing.predictions_of(RunRecord(run), model)


def recalibrate(run: Path, temperature: float) -> None:
    writing.recalibrate(RunRecord(run), temperature)


def refresh(run: Path) -> None:
    writing.refresh(run)


def target_paths(run: Path) -> list[str]:
    return list(RunRecord(run).images.paths["target"])


def target_digests(run: Path) -> tuple[str, ...]:
    return RunRecord(run).images.digests["target"]
