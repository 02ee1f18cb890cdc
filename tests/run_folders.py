"""Run folders for the report's tests: with everything it can show, stopped before stage 2, as the first version left
them, and bare records."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.measure.evaluate import evaluate
from cdtrans.record.run_folder import EVALUATION
from cdtrans.reporting.record import Record
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import LOGITS

LATER = {"source_agreement", "target_agreement", "source_accuracy"}  # what the first version did not log of a round


def complete(run: Path, answers: Path) -> Path:
    """A finished run and what an answer key said of it."""
    evaluate(run, answers, screen=Screen(quiet=True), device="cpu")
    assert (run / EVALUATION).exists()
    return run


def stopped(run: Path) -> Path:
    """A finished run made into one that the guard stopped before stage 2, after its first search for pairs."""
    for model in ("adapted", "last"):
        shutil.rmtree(run / model)
    for file in [*run.glob("predictions/epoch-*.npz"), *run.glob("pairs/round-*.npz")]:
        if file.name not in ("epoch-000.npz", "round-01.npz"):
            file.unlink()
    result = json.loads((run / "result.json").read_text())
    guard = {"verdict": "harm", "opening": "The guard stopped the run.", "findings": [], "advice": "", "warning": ""}
    result |= {"chosen_model": "source", "chosen_epoch": 0, "judged_epoch": 0, "guard": guard}
    (run / "result.json").write_text(json.dumps(result | {"estimate": result["estimate"] | {"harm": True}}))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [x for x in lines if not (x["event"] == "scores" and x["epoch"]) and x.get("stage") != "adaptation"]
    (run / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines if x.get("round", 1) == 1))
    with np.load(run / "views.npz") as arrays:
        views = {name: arrays[name] for name in arrays.files}
    before = {name: views[name.replace("after", "before")] for name in views if "after" in name}
    np.savez(run / "views.npz", **views | before | {"changed": np.zeros_like(views["changed"])})
    with np.load(run / LOGITS) as arrays:
        source = arrays["source"]
    np.savez(run / LOGITS, source=source)
    return run


def older(run: Path) -> Path:
    """A finished run made into one of the first version, which chose the last epoch and looked at nothing."""
    (run / "views.npz").unlink()
    (run / LOGITS).unlink()
    (run / EVALUATION).unlink(missing_ok=True)
    result = json.loads((run / "result.json").read_text())
    chosen = {name: result[name] for name in ("chosen_epoch", "chosen_model")}
    (run / "result.json").write_text(json.dumps(chosen | {"selection": "last"}))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k not in LATER} for line in lines if line["event"] != "scores"]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file in (run / "pairs").iterdir():
        with np.load(file) as arrays:
            kept = {name: arrays[name][arrays["kept"]] for name in arrays.files if name != "kept"}
        np.savez(file, **kept)
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
        "answers": None,
    }
    return Record(**whole | parts)
