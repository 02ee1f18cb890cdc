"""The tiny task with its answer key, and `cdtrans ablate` on it in a process whose runs are forked."""

import csv
from pathlib import Path
from typing import Any

from commands import Ended, Process, warm
from tiny_task import CLASSES, Task


def make_key(task: Task) -> Path:
    """The target's labels, as a list."""
    key = task.folder / "key.txt"
    key.write_text("".join(f"target/{n:02}.png {CLASSES[n % 3]}\n" for n in range(21)))
    return key


def start(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Process:
    places = [str(task.source), str(task.target), "--key", str(task.folder / "key.txt"), "--out", str(out)]
    arguments = ["ablate", name, *places, "--config", str(task.config), *flags]
    return warm().start(arguments, out.parent / "logs", **how)


def run(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Ended:
    return start(task, name, out, *flags, **how).wait()


def true_classes(run: Path) -> dict[int, int]:
    """The class of each target image by its index: its number modulo 3."""
    with open(run / "images.csv", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["domain"] == "target"]
    return {int(row["index"]): int(Path(row["path"]).stem) % 3 for row in rows}
