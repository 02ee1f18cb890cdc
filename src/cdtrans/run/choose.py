"""Change which model a finished run uses, without training: `cdtrans choose`."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cdtrans.config import RunFolder
from cdtrans.errors import RunError
from cdtrans.record import wording
from cdtrans.record.layout import ADAPTED, ONNX, PREDICTIONS, REPORT, RESULT
from cdtrans.record.outcome import Choice, ModelName
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import importing
from cdtrans.schema import Help, checked


class Chosen(NamedTuple):
    """The model that a run uses now, and whether that is new."""

    run: Path
    choice: Choice
    changed: bool

    def summary(self) -> dict[str, Any]:
        """The promised keys of `choose --json`."""
        choice = {"chosen_model": self.choice.model, "chosen_epoch": self.choice.epoch}
        return {"run": str(self.run), **choice, "changed": self.changed}

    def __str__(self) -> str:
        return wording.choice_confirmed(self.run, self.choice, changed=self.changed)


@checked()
def choose(
    run: RunFolder,
    model: Annotated[ModelName, Help("adapted, or source (not adapted).", "MODEL")],
    *,
    screen: Screen | None = None,
) -> Chosen:
    """Use the 'adapted' or the 'source' model from now on. The outcome is written after the predictions, so that the
    same command completes the change after a kill. A report that shows the other choice never remains."""
    run, screen = Path(run), screen or Screen(quiet=True)
    record = RunRecord(run)
    outcome = record.outcome
    if not outcome.adapted_epoch or not record.has_model(ADAPTED):
        raise RunError("model-missing", f"The run in '{run}' has no adapted model, so there is nothing to choose.")
    with importing():
        from cdtrans.record.run import lock_folder, predictions_of, rewrite
        from cdtrans.reporting.page import write_report

    with lock_folder(run):
        record = RunRecord(run)  # as it is now: another command may just have changed it
        outcome, predictions, table = record.outcome, predictions_of(record, model), run / PREDICTIONS.name
        if outcome.choice.model == model and table.exists() and table.read_bytes() == predictions:
            return Chosen(run, outcome.choice, changed=False)
        outcome = outcome.choose(model)
        had_report = record.has(REPORT)
        (run / REPORT.name).unlink(missing_ok=True)
        rewrite(run, PREDICTIONS, predictions)
        rewrite(run, RESULT, outcome)
        if had_report:
            write_report(RunRecord(run), screen)
    if (run / ONNX).exists():
        screen.warn(f"'{run / ONNX}' still holds the previous model; export it again.")
    return Chosen(run, outcome.choice, changed=True)
