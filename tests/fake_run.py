"""Completes a finished run with everything that a report can show. What takes a model is computed with the run's own
two models; the scores over the epochs, the rejected pairs and the verdict are made up.

    python tests/fake_run.py RUN [ANSWERS]    completes a folder, for looking at its report
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdtrans.classifier import read_result
from cdtrans.data.batches import Images
from cdtrans.data.stream import StreamedPixels
from cdtrans.evaluation.evaluate import evaluate
from cdtrans.model.card import load_model
from cdtrans.report.record import Record, read_record
from cdtrans.screen import Screen

SAMPLE = 1000  # images of a domain whose features a run keeps
REJECTED = 0.2  # of the proposed pairs
SCORES = ("confidence", "diversity", "information", "nuclear_norm", "clusters", "density", "centers", "consensus")


def complete(run: Path, answers: Path | None = None, **result: Any) -> Path:
    """`result` goes over what result.json says."""
    write_views(run)
    write_scores(run)
    write_agreement(run)
    write_rejected(run)
    estimate = {"low": 0.71, "high": 0.88, "sentence": "Estimated accuracy on the target: 71% to 88%."}
    guard = {"verdict": "kept", "paragraph": "The guard found nothing against the adapted model.", "findings": []}
    whole = read_result(run) | {"guard": guard, "estimate": estimate, "selection": "consensus"} | result
    (run / "result.json").write_text(json.dumps(whole))
    if answers is not None:
        summary = evaluate(run, answers, screen=Screen(quiet=True), device="cpu").summary()
        (run / "evaluation.json").write_text(json.dumps(summary))
    return run


def record(**parts: Any) -> Record:
    """A run that left nothing behind but these parts."""
    whole: dict[str, Any] = {
        "run": Path("run"),
        "result": {"chosen_epoch": 2, "chosen_model": "adapted"},
        "config": {},
        "environment": None,
        "data": None,
        "classes": ("a", "b", "c"),
        "source": (),
        "target": (),
        "log": [],
        "timings": [],
        "rounds": [],
        "views": None,
        "evaluation": None,
    }
    return Record(**whole | parts)


def write_views(run: Path) -> None:
    """views.npz: both domains as the source-only and the adapted model see them."""
    left, views = read_record(run), {}
    rng = np.random.default_rng(0)
    sampled = {d: np.sort(rng.permutation(len(getattr(left, d)))[:SAMPLE]) for d in ("source", "target")}
    labels = np.array([left.classes.index(path.split("/")[0]) for path in left.source], dtype=np.int32)
    probabilities = {}
    for when, folder in (("before", "source"), ("after", "adapted")):
        for domain in ("source", "target"):
            features, p = encode(run / folder, [left.root(domain) / path for path in getattr(left, domain)])
            views[f"{when}_{domain}"], probabilities[when, domain] = features[sampled[domain]], p
        views[f"target_{when}"] = probabilities[when, "target"].argmax(1).astype(np.int32)
        views[f"confidence_{when}"] = probabilities[when, "target"].max(1).astype(np.float16)
    moved = np.abs(probabilities["after", "target"] - probabilities["before", "target"]).sum(1) / 2
    p = probabilities["before", "source"]
    views |= {
        "sampled_source": sampled["source"].astype(np.int32),
        "sampled_target": sampled["target"].astype(np.int32),
        "changed": moved.astype(np.float16),
        "source_labels": labels,
        "source_predicted": p.argmax(1).astype(np.int32),
        "source_confidence": p.max(1).astype(np.float16),
        "source_own": p[np.arange(len(p)), labels].astype(np.float16),
    }
    np.savez(run / "views.npz", **views)


@torch.inference_mode()
def encode(folder: Path, files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """float16 [N, D] features and [N, K] probabilities."""
    model, card = load_model(folder)
    pixels, rows = StreamedPixels(files, card.resize), np.arange(len(files))
    images = Images(pixels, rows, crop=card.crop, mean=card.mean, std=card.std, device=torch.device("cpu"))
    out = [model.encode(batch) for batch in images.in_order(256)]
    features = torch.cat([o.feature for o in out]).half().numpy()
    return features, torch.cat([o.logits for o in out]).softmax(1).numpy()


def write_scores(run: Path) -> None:
    """A line of scores for every epoch that left predictions, rising with some noise."""
    rng = np.random.default_rng(0)
    epochs = len(list((run / "predictions").glob("epoch-*.npz")))
    with open(run / "log.jsonl", "a") as log:
        for epoch in range(epochs):
            rise = 1 - np.exp(-3 * epoch / epochs)
            values = {n: 0.4 + 0.05 * k + 0.2 * rise + 0.02 * rng.normal() for k, n in enumerate(SCORES)}
            log.write(json.dumps({"event": "scores", "epoch": epoch, **values}) + "\n")


def write_agreement(run: Path) -> None:
    """How well neighbours agree, in every round's line of the log."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    told = {"source_agreement": 0.91, "target_agreement": 0.87, "source_accuracy": 0.98}
    lines = [line | told if line["event"] == "pairs" else line for line in lines]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_rejected(run: Path) -> None:
    """Every round's file with pairs of differing labels beside the kept ones."""
    rng = np.random.default_rng(0)
    for file in sorted((run / "pairs").glob("*.npz")):
        with np.load(file) as arrays:
            kept = {name: arrays[name] for name in arrays.files}
        count = max(2, round(REJECTED * len(kept["source"])))
        shuffled = {"source": rng.permutation(len(kept["source"])), "target": rng.permutation(len(kept["source"]))}
        some = {name: values[shuffled[name.removesuffix("_labels")]][:count] for name, values in kept.items()}
        wrong = some["source_labels"] != some["target_labels"]
        whole = {name: np.concatenate([kept[name], some[name][wrong]]) for name in kept}
        np.savez(file, kept=np.arange(len(whole["source"])) < len(kept["source"]), **whole)


if __name__ == "__main__":
    complete(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
