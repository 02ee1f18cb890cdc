"""A run folder with what `ask` and `answer` read, made without training, and its labels."""

import csv
import json
from pathlib import Path

import numpy as np
import yaml

from cdtrans.inputs.images import decode, pixel_digest, resized
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
        (run / model).mkdir(parents=True)
        (run / model / "model.json").write_text(json.dumps({"classes": CLASSES}))
    (run / "config.yaml").write_text(yaml.safe_dump({"target": str(target), "resize": RESIZE}))
    (run / "result.json").write_text(json.dumps({"chosen_epoch": 1, "chosen_model": "adapted", "judged_epoch": 1}))
    with open(run / "images.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("domain", "index", "path", "digest"))
        rows.writerows(("target", n, name, digests[name]) for n, name in enumerate(names))
    rng = np.random.default_rng(0)
    true = np.array([int(name[:2]) % len(CLASSES) for name in names])
    confidence = rng.random(IMAGES)
    after = np.where(rng.random(IMAGES) < 0.4 + 0.6 * confidence, true, (true + 1) % 3)  # right where it is sure
    before = np.where(rng.random(IMAGES) < 0.5, true, (true + 2) % 3)
    np.savez(
        run / "views.npz",
        target_before=before.astype(np.int32),
        target_after=after.astype(np.int32),
        confidence_before=rng.random(IMAGES).astype(np.float16),
        confidence_after=confidence.astype(np.float16),
        sampled_target=np.arange(IMAGES, dtype=np.int32),
        before_target=rng.normal(size=(IMAGES, 8)).astype(np.float16),
        after_target=rng.normal(size=(IMAGES, 8)).astype(np.float16),
    )
    return run


def train_with(run: Path, *paths: str) -> None:
    """As if the run had been trained with the true labels of these images of its target."""
    with open(run / "images.csv", newline="") as lines:
        digests = {row["path"]: row["digest"] for row in csv.DictReader(lines)}
    rows = (f"{path},{truth(path)},{digests[path]}\n" for path in paths)
    (run / "target_labels.csv").write_text("path,label,digest\n" + "".join(rows))


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
            label = changes.get(row["part"], changes.get("all", truth(row["path"])))
            out.writerow(row | {"label": label})
    return labels
