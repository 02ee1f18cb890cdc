"""Inspect a run folder: its settings, whether it is finished, which models it has. Needs no torch, so that a wrong
folder is reported at once."""

import csv
import os
from pathlib import Path
from typing import Any

from cdtrans.config import DECIDED_LATE, RESUME_MAY_CHANGE, Config, flat, read_yaml
from cdtrans.errors import CdtransError, first_of, nearest
from cdtrans.record import wording
from cdtrans.record.files import intact, require_writable
from cdtrans.record.outcome import Measure, Outcome
from cdtrans.record.record import RunRecord

FIRST_FILES = (".lock", ".config.yaml.draft")  # left by a run that was killed right at the start
CONFIG = "config.yaml"  # the resolved settings; written when a run begins
RESULT = "result.json"  # of a finished run
CARD = "model.json"  # beside a model's weights
EVALUATION = "evaluation.json"  # of the `eval` with most images of the run's own target
ANSWERS = "answers.json"  # the labels that `answer` has read, with the results
TIMINGS = "timings.jsonl"  # a line for every stage: how long it took, and when it ended
PREDICTIONS = "predictions.csv"  # of the target, by the chosen model
TARGET_LABELS = "target_labels.csv"  # of the target images that the run was trained with (--target-labels)
OWN = {  # what a run consists of: files and folders that no verb may write to at a user's wish
    *(CONFIG, RESULT, EVALUATION, PREDICTIONS, TARGET_LABELS, "data.json", "environment.json", "images.csv", ".lock"),
    *("log.jsonl", "timings.jsonl", "logits.npz", "views.npz", "evidence.npz", ANSWERS, "report.html"),
    *("tensorboard", "wandb", "mlflow-run.txt"),
    *("source", "adapted", "last", "pairs", "predictions", "state"),
}
MODELS = ("chosen", "adapted", "last", "source")
AGAIN = "remove it and run the 'cdtrans adapt' command again"
MODEL_NAMES = {"source": "source-only", "adapted": "adapted"}  # the models that a run can choose, in words
choose_command = wording.choose_command


def check_folder(folder: Path, config: Config, *, resolved: bool = True) -> None:
    """Refuse a folder that holds something else, or a run of another configuration. Writes nothing. Before the
    configuration is resolved, which needs torch, only settings that resolving does not change are compared."""
    recorded = folder / CONFIG
    if recorded.exists():
        before = flat({"method_args": {}} | read_yaml(recorded))
        now = flat(config.to_dict())
        free = set(RESUME_MAY_CHANGE)
        if not resolved:
            free |= {*DECIDED_LATE, *(k for k in now if k.startswith("method."))}
        if (folder / RESULT).exists():
            free.remove("guard")  # it has judged
        changed = [k for k in now if k not in free and before.get(k, now[k]) != now[k]]
        if changed:
            what = first_of([f"{k}: {before[k]} there, {now[k]} now" for k in changed])
            raise CdtransError(f"'{folder}' holds another run ({what}); choose another --out to start a new one.")
    elif folder.exists() and (not folder.is_dir() or any(p.name not in FIRST_FILES for p in folder.iterdir())):
        raise CdtransError(f"'{folder}' exists and is not a run folder; choose another --out.")


def require_output(file: Path, what: str, flag: str, *inputs: Path | None) -> None:
    """Fail before the work and not after it: a file must be writable, and must not replace an input of the verb, a file
    inside an input folder, or a part of any run."""
    require_writable(file, what, flag)
    real = Path(os.path.realpath(file))
    for place in map(os.path.realpath, filter(None, inputs)):
        if file.exists() and Path(place) in (real, *real.parents):
            raise CdtransError(f"'{file}' is an input of this command and would be overwritten; choose another {flag}.")
    if (real.parent / CARD).exists():
        raise CdtransError(f"'{file.parent}' is the folder of a model and must not be changed; choose another {flag}.")
    for folder in real.parents:
        if (folder / CONFIG).exists() and real.relative_to(folder).parts[0] in OWN:
            raise CdtransError(
                f"'{file}' is a part of the run in '{folder}' and must not be changed; choose another {flag}."
            )


def read_result(run: Path) -> dict[str, Any]:
    """The result of a finished run: the chosen epoch, the chosen model and more."""
    if run.is_file():
        raise CdtransError(f"'{run}' is a file; give the run folder that 'cdtrans adapt' has written.")
    if not run.is_dir():
        raise CdtransError(
            f"The run folder '{run}' does not exist; make one with 'cdtrans adapt SOURCE TARGET --out {run}'."
        )
    file = run / RESULT
    if not file.exists():
        if not (run / CONFIG).exists():
            raise CdtransError(f"'{run}' holds no finished run; give the folder that 'cdtrans adapt' has written.")
        raise CdtransError(f"'{run}' holds no finished run; run its 'cdtrans adapt' command again to finish it.")
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
    """Digest -> label of the target images that a run was trained with (--target-labels): they cannot measure its
    models."""
    file = run / TARGET_LABELS
    if not file.exists():
        return {}
    with intact(file, AGAIN), open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return {row["digest"]: row["label"] for row in csv.DictReader(lines)}


def find_model(run: Path, model: str) -> tuple[str, bool]:
    """The folder name of a finished run's 'chosen', 'adapted', 'last' or 'source' model, and whether it was trained
    with target labels."""
    if model not in MODELS:
        raise CdtransError(f"Unknown model '{model}': {nearest(model, list(MODELS))}")
    result = read_result(run)
    if model in ("adapted", "last") and not (run / model).exists():
        raise CdtransError(f"The run in '{run}' has no {model} model: it ended before that; use --model source.")
    name = result["chosen_model"] if model == "chosen" else model
    return name, result.get("trained_with_key", False) and name != "source"


def adapted_epoch(result: dict[str, Any]) -> int:
    """The epoch of the adapted model, chosen or not; 0 if there is none."""
    return int(result.get("judged_epoch", result["chosen_epoch"]))  # runs of the first version chose it always


def chosen_by_person(result: dict[str, Any]) -> bool:
    """Whether a person has changed the run's choice."""
    return bool(result.get("chosen_by") == "person")
