"""The tiny task with its target labels, and `cdtrans ablate` on it in a process whose runs are forked."""

from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.record.record import RunRecord
from commands import Ended, Process, warm
from tiny_task import CLASSES, Task


def make_labels(task: Task) -> Path:
    """The target's labels, as a list."""
    labels = task.folder / "labels.txt"
    labels.write_text("".join(f"target/{n:02}.png {CLASSES[n % 3]}\n" for n in range(21)))
    return labels


def start(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Process:
    places = [str(task.source), str(task.target), "--labels", str(task.folder / "labels.txt"), "--out", str(out)]
    arguments = ["ablate", name, *places, "--config", str(task.config), *flags]
    return warm().start(arguments, out.parent / "logs", **how)


def run(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Ended:
    return start(task, name, out, *flags, **how).wait()


def true_classes(run: Path) -> np.ndarray:
    """The class of each target image: its number modulo 3."""
    return np.array([int(Path(path).stem) % 3 for path in RunRecord(run).images.paths["target"]])
