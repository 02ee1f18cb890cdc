"""Results as tables on the screen."""

from typing import Any

from rich.markup import escape
from rich.table import Table

STATE_COLOURS = {"ok": "green", "warning": "yellow", "stop": "red"}


def before_and_after(result: Any) -> Table:
    table = Table("model", "accuracy on 1,797 handwritten digits", title="before and after adaptation")
    table.add_row("source only", f"{result.source_only_accuracy:.1%}")
    table.add_row("adapted, no target label used", f"{result.adapted_accuracy:.1%}")
    return table


def finding_table(result: Any) -> Table:
    """A row for each finding, what to do below what was found."""
    table = Table("", "subject", "found")
    for finding in result.findings:
        state = f"[{STATE_COLOURS[finding.state]}]{finding.state}[/]"
        advice = f"\n{finding.advice}" if finding.advice else ""
        table.add_row(state, escape(finding.subject), escape(f"{finding.statement}.{advice}"))
    return table


def score_table(result: Any, model: str) -> Table:
    """The model that was asked for, and below it what the run was before, at its end and at its best."""
    table = Table("model", "accuracy", "class-mean accuracy", title=f"{result.scores.images} labelled images")
    table.add_row(
        f"{model} model ({result.model})", f"{result.scores.accuracy:.1%}", f"{result.scores.class_mean_accuracy:.1%}"
    )
    history = result.history
    if history is not None and len(history.accuracy) > 1:
        table.add_section()
        best = f"best epoch by these labels ({history.best_epoch})"
        for name, epoch in (("source-only (before adaptation)", 0), ("last epoch", -1), (best, history.best_epoch)):
            table.add_row(name, f"{history.accuracy[epoch]:.1%}", f"{history.class_mean_accuracy[epoch]:.1%}")
    return table


def class_table(result: Any) -> Table:
    """Per class: how many, how many right, and what the wrong ones were taken for most often."""
    table = Table("class", "images", "right", "most often taken for")
    for k, name in enumerate(result.classes):
        row = result.scores.confusion[k].copy()
        total, right = int(row.sum()), int(row[k])
        row[k] = 0
        taken_for = f"{result.classes[int(row.argmax())]} ({int(row.max())})" if row.max() > 0 else ""
        table.add_row(escape(name), str(total), f"{right / total:.1%}" if total else "-", escape(taken_for))
    return table


def confusion_table(result: Any) -> Table:
    """Rows are true classes, columns predicted ones."""
    table = Table("true \\ predicted", *map(escape, result.classes), title="confusion matrix")
    for name, row in zip(result.classes, result.scores.confusion.tolist(), strict=True):
        table.add_row(escape(name), *map(str, row))
    return table
