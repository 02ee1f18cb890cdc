"""Run folders for tests: with everything a report can show, stopped before stage 2, refused by the guard, and bare
records."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.measure.measured import evaluate
from cdtrans.record.layout import LOGITS, MEASURED, RESULT, DataRecord, DomainRecord
from cdtrans.record.model import FROM_SCRATCH, card_from, write_card
from cdtrans.record.outcome import Choice, Interval, Measure, Outcome, Verdict
from cdtrans.record.record import RunRecord
from cdtrans.record.run import predictions_of, rewrite
from cdtrans.runtime.screen import Screen

DATA = DataRecord(DomainRecord(3, "f", "f", "p", 0, {"a": 3}), DomainRecord(2, "g", "g", "q"))


def complete(run: Path, answers: Path) -> Path:
    """A finished run, measured with labels of its whole target."""
    evaluate(run, answers, screen=Screen(quiet=True), device="cpu")
    assert (run / MEASURED.name).exists()
    return run


def stopped(run: Path) -> Path:
    """A finished run made into one that the guard stopped before stage 2, after its first search for pairs."""
    for model in ("adapted", "last"):
        shutil.rmtree(run / model)
    for file in [*run.glob("predictions/epoch-*.npz"), *run.glob("pairs/round-*.npz")]:
        if file.name not in ("epoch-000.npz", "round-01.npz"):
            file.unlink()
    measures = (Measure("source-not-learnt", 0.3, 0.5, decisive=True),)
    change(
        run, verdict=Verdict("harm", measures), adapted_epoch=0, choice=Choice("source", 0), estimates={"source": None}
    )
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [x for x in lines if not (x["event"] == "scores" and x["epoch"]) and x.get("stage") != "adaptation"]
    (run / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines if x.get("round", 1) == 1))
    views = vars(RunRecord(run).views)
    before = {name: views[name.replace("after", "before")] for name in views if "after" in name}
    change_views(run, **before, changed=np.zeros_like(views["changed"]))
    with np.load(run / LOGITS.name) as arrays:
        source = arrays["source"]
    np.savez(run / LOGITS.name, source=source)
    return run


def change_views(run: Path, **arrays: np.ndarray) -> None:
    """A finished run whose models see the images differently."""
    np.savez(run / "views.npz", **vars(RunRecord(run).views) | arrays)


def change(run: Path, **fields: Any) -> Outcome:
    """A finished run with another outcome."""
    outcome = replace(RunRecord(run).outcome, **fields)
    rewrite(run, RESULT, outcome)
    return outcome


def refused(run: Path) -> Path:
    """A finished run made into one whose guard has refused the adapted model."""
    harm = Verdict("harm", (Measure("training-broken", 0.01, 0.05, decisive=True),))
    change(run, guard=True, verdict=harm, choice=Choice("source", 0))
    (run / "predictions.csv").write_bytes(predictions_of(RunRecord(run)))
    return run


def record(**parts: Any) -> RunRecord:
    """A run that left nothing behind but these parts."""
    bare: dict[str, Any] = {"log": (), "timings": (), "rounds": {}, "evaluation": None, "answers": None}
    made = RunRecord(Path("run"))
    made.__dict__.update(bare | {"classes": ("a", "b", "c"), "outcome": outcome()} | parts)
    return made


def outcome(**changes: Any) -> Outcome:
    """The outcome of a run that uses its adapted model, but for these fields."""
    fields: dict[str, Any] = {"verdict": Verdict("better", ()), "guard": True, "choice": Choice("adapted", 2)}
    fields |= {"adapted_epoch": 2, "estimates": {"source": Interval(0.4, 0.8), "adapted": Interval(0.47, 0.98)}}
    return Outcome(**fields | {"labels": 30, "selection": "consensus"} | changes)


def make_card(folder: Path, classes: tuple[str, ...]) -> None:
    """The card of a model without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"resize": 18, "crop": 16, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "precision": "fp32"}
    model = {"backbone": "vit_tiny_patch16_224", "backbone_args": {}, "weights": FROM_SCRATCH, "neck": "batchnorm"}
    training = {"classes": list(classes), "stage": "source", "epoch": 1, "versions": {}}
    write_card(folder, card_from(training | model | sizes))
