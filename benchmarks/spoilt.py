"""The guard's test cases: a task spoilt in five ways, each a run of its own, all side by side.

usage: python benchmarks/spoilt.py SOURCE TARGET OUT RATE [flags of cdtrans adapt]
RATE is a learning rate 100 times too high: 0.8 for the default preset, 0.3 for digits.
SOURCE and TARGET are folders of class folders, or lists with labels. What the guard made of each run, and the accuracy
behind it, is printed as a table: docs/results/guard.md. Two cases, noise and classes that the source lacks, have no
right answer."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from cdtrans.data.domains import scan_labelled

NOISE_IMAGES = 800
FEW = 6  # one class in so many is left in the target of few classes


def images(domain: Path) -> list[tuple[Path, str]]:
    """Every file with the name of its class."""
    found = scan_labelled(domain)
    return [(file, found.classes[k]) for file, k in zip(found.files(), found.labels, strict=True)]


def write_list(file: Path, lines: list[tuple[Path, str]]) -> Path:
    file.write_text("".join(f"{path.resolve()} {label}\n" for path, label in lines))
    return file


def write_noise(folder: Path) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for n in range(NOISE_IMAGES):
        Image.fromarray(draw.integers(0, 256, (64, 64, 3), np.uint8)).resize((256, 256)).save(folder / f"{n:03}.jpg")
    return folder


def cases(source: Path, target: Path, out: Path, rate: str) -> dict[str, tuple[Path, Path, list[str], bool]]:
    """Name -> source, target, flags, and whether there is a right answer."""
    labelled, there = images(source), images(target)
    classes = sorted({label for _, label in labelled})
    shuffled = [label for _, label in labelled]
    random.Random(0).shuffle(shuffled)
    mixed = write_list(out / "shuffled.txt", [(file, k) for (file, _), k in zip(labelled, shuffled, strict=True)])
    first, rest = classes[: len(classes) // 2], classes[len(classes) // 2 :]
    half = write_list(out / "first-classes.txt", [(file, k) for file, k in labelled if k in first])
    others = write_list(out / "other-classes.txt", [(file, k) for file, k in there if k in rest])
    few = write_list(out / "few-classes.txt", [(file, k) for file, k in there if classes.index(k) % FEW == 1])
    return {
        "labels": (mixed, target, [], True),
        "noise": (source, write_noise(out / "noise-images"), [], False),
        "other-classes": (half, others, [], False),
        "few-classes": (source, few, [], True),
        "few-classes-unguarded": (source, few, ["--no-guard"], True),
        "rate": (source, target, ["--lr", rate], True),
    }


def main() -> None:
    source, target, out = map(Path, sys.argv[1:4])
    out.mkdir(parents=True)
    planned = cases(source, target, out, sys.argv[4])
    cdtrans = [sys.executable, "-m", "cdtrans"]
    running = {}
    for name, (s, t, flags, _) in planned.items():
        command = [*cdtrans, "adapt", str(s), str(t), "--out", str(out / name), "--force", *sys.argv[5:], *flags]
        log = (out / f"{name}.log").open("w")
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    print("| case | exit | evidence | warning | source only | chosen (epoch) | last | best by labels |")
    print("|---|---|---|---|---|---|---|---|")
    for name, process in running.items():
        code, (_, key, _, answer) = process.wait(), planned[name]
        result = json.loads((out / name / "result.json").read_text())
        found = ", ".join(f"{f['name']} ({100 * f['found']:.0f} %)" for f in result["guard"]["findings"])
        cells = ["no truth"] * 4
        if answer:
            subprocess.run(
                [*cdtrans, "eval", str(out / name), str(key), "--json"], check=True, stdout=subprocess.DEVNULL
            )
            by_epoch = json.loads((out / name / "evaluation.json").read_text())["accuracy_by_epoch"]
            chosen = result["chosen_epoch"]
            cells = [f"{100 * by_epoch[k]:.1f}" for k in (0, chosen, -1)] + [f"{100 * max(by_epoch):.1f}"]
            cells[1] += f" ({chosen})"
        warned = "yes" if result["guard"].get("warning") else ""
        print(f"| {name} | {code} | {found} | {warned} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
