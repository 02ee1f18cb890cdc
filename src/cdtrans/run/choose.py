"""Change which model a finished run uses, without training: `cdtrans choose`."""

import json
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from cdtrans.errors import CdtransError, nearest
from cdtrans.record.files import atomic
from cdtrans.record.run_folder import (
    MODEL_NAMES,
    PREDICTIONS,
    RESULT,
    adapted_epoch,
    choose_command,
    chosen_by_person,
    read_result,
)
from cdtrans.runtime.imports import importing
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import predictions_of


class Choice(NamedTuple):
    """The model that a run uses now. The keys are promised by `choose --json`."""

    chosen_model: str
    chosen_epoch: int
    changed: bool


def choose(run: Path, model: str, screen: Screen) -> Choice:
    """Use the 'adapted' or the 'source' model from now on. result.json is written after the predictions, so that the
    same command completes the change after a kill. A report that shows the other choice never remains."""
    result = read_result(run)
    if model not in MODEL_NAMES:
        raise CdtransError(f"Unknown model '{model}': {nearest(model, list(MODEL_NAMES))}")
    if not adapted_epoch(result) or not (run / "adapted").is_dir():
        raise CdtransError(f"The run in '{run}' has no adapted model, so there is nothing to choose.")
    predictions = predictions_of(run, model)
    table = run / PREDICTIONS
    if result["chosen_model"] == model and table.exists() and table.read_bytes() == predictions:
        return Choice(model, int(result["chosen_epoch"]), changed=False)
    with importing():
        from cdtrans.record.run import lock_folder
        from cdtrans.reporting.page import NAME, write_report

    with lock_folder(run):
        had_report = (run / NAME).exists()
        (run / NAME).unlink(missing_ok=True)
        write(table, predictions)
        result = changed(result, model)
        write(run / RESULT, (json.dumps(result, indent=2, sort_keys=True) + "\n").encode())
        if had_report:
            write_report(run, screen)
    if (run / "model.onnx").exists():
        screen.warn(f"'{run / 'model.onnx'}' still holds the previous model; export it again.")
    return Choice(model, int(result["chosen_epoch"]), changed=True)


def changed(result: dict[str, Any], model: str) -> dict[str, Any]:
    """The result with another chosen model. What the guard said stays."""
    own = "source" if result["guard"]["verdict"] == "harm" else "adapted"
    return result | {
        "chosen_model": model,
        "chosen_epoch": adapted_epoch(result) if model == "adapted" else 0,
        "chosen_by": "run" if model == own else "person",
        "estimate": result["estimates"][model],
    }


def confirmation(run: Path, choice: Choice) -> str:
    name = MODEL_NAMES[choice.chosen_model]
    if not choice.changed:
        return f"The run in '{run}' already uses the {name} model; nothing was changed."
    epoch = f" of epoch {choice.chosen_epoch}" if choice.chosen_epoch else ""
    other = next(model for model in MODEL_NAMES if model != choice.chosen_model)
    back = choose_command(run, other)
    return f"The run in '{run}' now uses the {name} model{epoch}; '{back}' changes it back."


def write(file: Path, content: bytes) -> None:
    with atomic(file) as draft:
        draft.write(content)


def explanation(run: Path, result: dict[str, Any]) -> str:
    """The guard's paragraph, and how to use the other model."""
    guard = result.get("guard", {})  # runs of the first version have none
    paragraph = str(guard.get("paragraph", ""))
    if chosen_by_person(result):
        model = result["chosen_model"]
        return f"{paragraph} Since then the {MODEL_NAMES[model]} model was chosen by hand ('cdtrans choose')."
    if guard.get("verdict") == "harm" and adapted_epoch(result):
        return f"{paragraph} {use_anyway(run)}"
    return paragraph


def use_anyway(run: Path) -> str:
    """How to use the adapted model although the guard refused it."""
    return (
        f"To use the adapted model anyway: '{choose_command(run, 'adapted')}', or just once: 'cdtrans predict "
        f"{quote(str(run))} IMAGES --model adapted'."
    )
