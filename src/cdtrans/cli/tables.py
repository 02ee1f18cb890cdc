"""Results as tables in the terminal."""

from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cdtrans.errors import counted, printable

STATE_COLOURS = {"ok": "green", "warning": "yellow", "stop": "red"}


def before_and_after(result: Any) -> Table:
    table = Table("model", "accuracy on 1,797 handwritten digits", title="before and after adaptation")
    table.add_row("source only", f"{result.source_only_accuracy:.1%}")
    table.add_row("adapted, no target label used", f"{result.adapted_accuracy:.1%}")
    return table


def finding_table(result: Any) -> Table:
    """A row for each finding, with its advice below."""
    table = Table("", "subject", "found")
    for finding in result.findings:
        state = f"[{STATE_COLOURS[finding.state]}]{finding.state}[/]"
        advice = f"\n{finding.advice}" if finding.advice else ""
        table.add_row(state, escape(finding.subject), escape(f"{finding.statement}.{advice}"))
    return table


def score_table(result: Any, model: str) -> Table:
    """The requested model, and below it the source-only model, the last epoch and the best."""
    title = f"{counted(result.scores.images, 'labelled image')}; in brackets: 95% interval"
    table = Table("model", "accuracy", "class-mean accuracy", title=title)
    table.add_row(f"{model}: {result.model}", *result.scores.with_intervals())
    table.add_section()
    for name, scores in result.history.rows() if result.history else ():
        table.add_row(name, *scores.with_intervals())
    return table


def class_table(result: Any) -> Table:
    """Per class: images, share right, and the most frequent wrong prediction."""
    table = Table(whole("class"), "images", "right (95% interval)", whole("most often mistaken for"))
    for k, (name, interval) in enumerate(zip(result.classes, result.scores.per_class_interval, strict=True)):
        row = result.scores.confusion[k].copy()
        total, right = int(row.sum()), int(row[k])
        row[k] = 0
        taken_for = f"{result.classes[int(row.argmax())]} ({int(row.max())})" if row.max() > 0 else ""
        share = interval.around(right / total) if total else "-"
        table.add_row(cell(name), str(total), share, cell(taken_for))
    return table


def confusion_table(result: Any) -> Table:
    """Rows are true classes, columns predicted ones."""
    names = [whole(cell(name)) for name in result.classes]
    table = Table(whole("true \\ predicted"), *names, title="confusion matrix")
    for name, row in zip(result.classes, result.scores.confusion.tolist(), strict=True):
        table.add_row(cell(name), *map(str, row))
    return table


def whole(header: str) -> Column:
    """A column whose cells and header continue on the next line where rich would cut them."""
    return Column(header, overflow="fold")


def cell(name: str) -> str:
    """A name on one line, with special characters escaped."""
    return escape(printable(name))
