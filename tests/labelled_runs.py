"""A run folder with what `ask` and `answer` read, made without training, and its labels."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cdtrans.inputs.images import decode, pixel_digest, resized
from cdtrans.record import layout
from cdtrans.record.outcome import Choice, ClassSet
from cdtrans.record.record import RunRecord
from run_folders import make_card, outcome
from tiny_task import CLASSES, make_target

RESIZE = 18
IMAGES = 60


def make_run(folder: Path) -> Path:
    """folder/run, of the images in folder/target. The adapted model is better, and right where it is sure."""
    target = make_target(folder / "target", each=IMAGES // len(CLASSES))
    digests = {path.name: pixel_digest(resized(decode(path), RESIZE)) for path in target.iterdir()}
    names = sorted(digests, key=lambda name: digests[name])
    run = folder / "run"
    for model in ("source", "adapted"):
        make_card(run / model, CLASSES)
    (run / "config.yaml").write_text(yaml.safe_dump({"target": str(target), "resize": RESIZE}))
    write_outcome(run)
    with open(run / "images.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("domain", "index", "path", "digest"))
        rows.writerows(("target", n, name, digests[name]) for n, name in enumerate(names))
    rng = np.random.default_rng(0)
    true = np.array([int(name[:2]) % len(CLASSES) for name in names])
    confidence = rng.random(IMAGES)
    after = np.where(rng.random(IMAGES) < 0.4 + 0.6 * confidence, true, (true + 1) % 3)  # right where it is sure
    before = np.where(rng.random(IMAGES) < 0.5, true, (true + 2) % 3)
    none, features = np.zeros(0, np.int32), rng.normal(size=(2, IMAGES, 8)).astype(np.float16)
    sure = {"before": rng.random(IMAGES).astype(np.float16), "after": confidence.astype(np.float16)}
    of_source = ("sampled_source", "source_labels", "source_predicted", "source_confidence", "source_own")
    np.savez(
        run / "views.npz",
        **dict.fromkeys(of_source, none),
        **{"sampled_target": np.arange(IMAGES), "changed": np.zeros(IMAGES)},
        **{"before_source": np.zeros((0, 8)), "after_source": np.zeros((0, 8))},
        **{"before_target": features[0], "after_target": features[1]},
        **{"no_class": np.linspace(-1.7, 1.7, IMAGES), "doubt": np.linspace(0.04, 0.9, len(CLASSES))},
        **{"candidates": np.array([np.flatnonzero(true == k)[:9] for k in range(len(CLASSES))])},
        **{"target_before": before.astype(np.int32), "target_after": after.astype(np.int32)},
        **{f"confidence_{when}": values for when, values in sure.items()},
    )
    logits = {"source": (before, sure["before"]), "adapted": (after, sure["after"])}  # both far too sure
    scaled = {name: (1 + 20 * s.astype(float))[:, None] * np.eye(3)[k] for name, (k, s) in logits.items()}
    np.savez(run / "logits.npz", **scaled)
    return run


def write_outcome(run: Path, **changes: Any) -> None:
    """result.json of a run that uses its adapted model and knows its classes, but for these fields: `ask` has only page
    3 for it."""
    by_default = {"choice": Choice("adapted", 1), "adapted_epoch": 1, "class_set": ClassSet(by="told", others=False)}
    (run / layout.RESULT.name).write_text(json.dumps(asdict(outcome(**by_default | changes))))


def train_with(run: Path, *paths: str) -> None:
    """As if the run had been trained with the true labels of these images of its target."""
    images = RunRecord(run).images
    digests = dict(zip(images.paths["target"], images.digests["target"], strict=True))
    rows = (f"{path},{truth(path)},,{digests[path]}\n" for path in paths)
    (run / "given-answers.csv").write_text("path,label,part,digest\n" + "".join(rows))


def truth(path: str) -> str:
    """The class of an image of the target."""
    return CLASSES[int(Path(path).stem) % len(CLASSES)]


def fill(questions: Path, labels: Path, **changes: str) -> Path:
    """labels.csv of `ask` filled in with the true classes, or with what `changes` say: all=..., or part=..."""
    with open(questions, newline="") as lines:
        rows = list(csv.DictReader(lines))
    with open(labels, "w", newline="") as file:
        out = csv.DictWriter(file, ("path", "label", "part"))
        out.writeheader()
        for row in rows:
            if not row["path"]:
                out.writerow(row | {"part": "occurs"})
                continue
            right = "one of these classes" if row["part"] == "belongs" else changes.get("all", truth(row["path"]))
            out.writerow(row | {"label": changes.get(row["part"], right)})
    return labels
