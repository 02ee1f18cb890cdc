"""Transition: the names and readers of before, by `layout` and `RunRecord`."""

from pathlib import Path
from typing import Any

from cdtrans.record import layout, wording
from cdtrans.record.layout import CARD, OWN
from cdtrans.record.outcome import Measure, Outcome
from cdtrans.record.record import RunRecord
from cdtrans.record.run import check_folder, require_output
from cdtrans.record.wording import choose_command

__all__ = ["CARD", "OWN", "check_folder", "choose_command", "require_output"]
CONFIG, RESULT, EVALUATION = layout.CONFIG.name, layout.RESULT.name, layout.MEASURED.name
ANSWERS, TIMINGS, PREDICTIONS = layout.ANSWERS.name, layout.TIMINGS.name, layout.PREDICTIONS.name
TARGET_LABELS, MODELS, AGAIN = layout.TARGET_LABELS.name, layout.MODELS, layout.REMOVE
MODEL_NAMES = {name: wording.MODEL_NAMES[name] for name in ("source", "adapted")}


def read_result(run: Path) -> dict[str, Any]:
    return as_before(RunRecord(run).outcome)


def as_before(outcome: Outcome) -> dict[str, Any]:
    """Transition: the outcome as result.json was written."""

    def estimate(model: str) -> dict[str, Any]:
        found = outcome.estimates[model]  # type: ignore[index]
        low, high = (None, None) if found is None else (found.low, found.high)
        return {"low": low, "high": high, "sentence": wording.estimate(outcome, model)}

    kind = "off" if outcome.verdict.kind == "harm" and not outcome.guard else outcome.verdict.kind

    def told(measure: Measure) -> dict[str, Any]:
        name, sentence = measure.code.replace("-", " "), wording.finding_sentence(measure) if measure.harm else ""
        what = wording.MEASURES[measure.code]
        return {
            "name": name,
            "what": what,
            "found": measure.value,
            "limit": measure.limit,
            "sentence": sentence,
            "harm": measure.harm,
            "decisive": measure.decisive,
        }

    guard = {
        "verdict": kind,
        "opening": wording.opening(outcome),
        "advice": wording.advice(outcome),
        "warning": wording.setback(outcome) if outcome.own_choice == "adapted" else "",
        "start": wording.crowd(outcome.crowd),
        "findings": [told(m) for m in outcome.verdict.findings],
        "measures": [told(m) for m in outcome.verdict.measures],
        "paragraph": " ".join(
            filter(None, (wording.evidence(outcome), wording.crowd(outcome.crowd), wording.advice(outcome)))
        ),
    }
    return {
        "chosen_epoch": outcome.choice.epoch,
        "chosen_model": outcome.choice.model,
        "chosen_by": outcome.choice.by,
        "judged_epoch": outcome.adapted_epoch,
        "selection": outcome.selection,
        "guard": guard,
        "evidence_features": outcome.basis.features if outcome.basis else None,
        "trained_with_key": outcome.trained_with_labels,
        "target_labels": outcome.target_labels,
        "estimate": estimate(outcome.choice.model),
        "estimates": {model: estimate(model) for model in outcome.estimates},
    }


def trained_labels(run: Path) -> dict[str, str]:
    return {each.digest: each.label for each in RunRecord(run).trained_labels}


def find_model(run: Path, model: str) -> tuple[str, bool]:
    record = RunRecord(run)
    name = record.model_name(model)
    return name, record.outcome.trained_with_labels and name != "source"


def adapted_epoch(result: dict[str, Any]) -> int:
    return int(result["judged_epoch"])


def chosen_by_person(result: dict[str, Any]) -> bool:
    return bool(result["chosen_by"] == "person")
