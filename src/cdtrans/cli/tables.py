"""How results look in a terminal: a function for each verb, of its result, the screen and the arguments."""

from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from cdtrans.errors import counted, named, printable
from cdtrans.measure.intervals import wilson
from cdtrans.record import wording
from cdtrans.record.layout import ANSWERS, REPORT
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen

STATE_COLOURS = {"ok": "green", "warning": "yellow", "stop": "red"}
WIDEST_MATRIX = 12  # a wider confusion matrix does not fit in a terminal

Arguments = dict[str, Any]


def show_run(result: Any, screen: Screen, given: Arguments) -> None:
    screen.result(wording.done(result.outcome, result.run, with_estimate=screen.quiet))  # shown already if not quiet
    screen.say(wording.next_step(result.run))


def show_check(result: Any, screen: Screen, given: Arguments) -> None:
    """A row for each finding, with its advice below."""
    table = Table("", "subject", "found")
    for finding in result.findings:
        state = f"[{STATE_COLOURS[finding.state]}]{finding.state}[/]"
        advice = f"\n{finding.advice}" if finding.advice else ""
        table.add_row(state, escape(finding.subject), escape(f"{finding.statement}.{advice}"))
    screen.result(table)
    if result.skipped:
        screen.say(f"Not checked with a backbone: {result.skipped}.")
    screen.result(f"{result.verdict} Use --json for every name and number.")


def show_evaluation(result: Any, screen: Screen, given: Arguments) -> None:
    run, model = given["run"], given["model"]
    screen.result(score_table(result, model))
    screen.result(class_table(result))
    if len(result.classes) <= WIDEST_MATRIX:
        screen.result(confusion_table(result))
    else:
        screen.result(f"The confusion matrix of {len(result.classes)} classes is in --json.")
    if result.absent:
        screen.result(wording.of_absent_classes(result))
    if result.whole_target:
        screen.result(wording.EXACT)
    record = RunRecord(run)
    if result.comparison is not None:
        screen.result(wording.comparison(result, record.outcome, run))
    if record.has(REPORT) and record.evaluation == result:
        screen.say(f"'cdtrans report {run}' adds this to report.html.")


def score_table(result: Any, model: str) -> Table:
    """The requested model, and below it the source-only model, the last epoch and the best."""
    title = f"{counted(result.images, 'labelled image')}; in brackets: 95% interval"
    table = Table("model", "accuracy", "class-mean accuracy", title=title)
    name = wording.MODEL_NAMES[result.model]
    table.add_row(name if model == result.model else f"{model}: {name}", *result.scores.with_intervals())
    table.add_section()
    for name, scores in result.rows():
        table.add_row(name, *scores.with_intervals())
    return table


def class_table(result: Any) -> Table:
    """Per class: images, share right, and the most frequent wrong prediction."""
    scores = result.scores
    absent = counted(sum(not total for total in scores.images), "class has no image", "classes have no image")
    note = None if all(scores.images) else f"{absent} here"
    table = Table(whole("class"), "images", "right (95% interval)", whole("most often mistaken for"), caption=note)
    for k, (name, right, total) in enumerate(zip(result.classes, scores.right, scores.images, strict=True)):
        if not total:
            continue
        wrong = [0 if j == k else count for j, count in enumerate(scores.confusion[k])]
        most = max(wrong)
        taken_for = f"{result.classes[wrong.index(most)]} ({most})" if most else ""
        table.add_row(cell(name), str(total), wilson(right, total).around(right / total), cell(taken_for))
    return table


def confusion_table(result: Any) -> Table:
    """Rows are true classes, columns predicted ones."""
    names = [whole(cell(name)) for name in result.classes]
    table = Table(whole("true \\ predicted"), *names, title="confusion matrix")
    for name, row in zip(result.classes, result.scores.confusion, strict=True):
        table.add_row(cell(name), *map(str, row))
    return table


def show_export(result: Any, screen: Screen, given: Arguments) -> None:
    screen.result(f"Exported: {result.file} ({result.model}; {result.bytes / 1e6:.1f} MB)")
    screen.say(f"Checked on {result.checked} images: logits differ by {result.difference:.0e} of the largest one.")


def show_push(result: Any, screen: Screen, given: Arguments) -> None:
    screen.result(f"Uploaded: {result.address} ({result.model}; {result.bytes / 1e6:.1f} MB)")
    screen.say(f'cdtrans.load("hf://{given["name"]}") loads it.')


def show_demo(result: Any, screen: Screen, given: Arguments) -> None:
    table = Table("model", "accuracy on 1,797 handwritten digits", title="before and after adaptation")
    table.add_row("source only", f"{result.source_only_accuracy:.1%}")
    table.add_row("adapted, no target label used", f"{result.adapted_accuracy:.1%}")
    screen.result(table)
    report = " (open report.html)" if (result.run / REPORT.name).exists() else ""
    screen.result(f"Run folder: {result.run}{report}")


def show_cache(result: Any, screen: Screen, given: Arguments) -> None:
    table = Table(whole("images of"), "size", "images", "MB", "last used", title=str(result.folder))
    for s in result.stores:
        used = f"{s.last_used:%Y-%m-%d %H:%M}"
        table.add_row(cell(str(s.root)), str(s.size), f"{s.images:,}", f"{s.nbytes / 1e6:,.1f}", used)
    root = given["root"]
    nothing = f"Nothing is cached in {result.folder}{f' for {root} itself' if root else ''}."
    screen.result(table if result.stores else nothing)
    if result.below:
        below = named(result.below)
        screen.result(f"Folders below it are cached separately and not affected by --root {root}: {below}.")
    if given["clear"]:
        screen.result(f"Freed {result.freed / 1e6:,.1f} MB.")


def show_questions(result: Any, screen: Screen, given: Arguments) -> None:
    summary = result.summary()
    pages = {
        f"whether {counted(summary['classes'], 'class occurs', 'classes occur')}": summary["classes"],
        f"whether {counted(summary['belonging'], 'image')} show one of the classes": summary["belonging"],
        f"what {counted(summary['images'], 'image')} show: {summary['random']} chosen at random, to measure accuracy, "
        f"and {summary['informative']} doubtful and typical ones, to train on": summary["images"],
    }
    screen.result(f"The page asks {'; '.join(text for text, count in pages.items() if count)}. Skip what you like.")
    screen.result(f"Open {summary['page']} in a browser, or fill in {summary['labels']}.")
    screen.say(f"Then: cdtrans answer {result.run} {summary['labels']} (or the labels.csv that the page saved)")


def show_answers(result: Any, screen: Screen, given: Arguments) -> None:
    run = given["run"]
    outcome, about_classes = RunRecord(run).outcome, result.answers.occurs or result.answers.belongs
    shown = wording.answers_show(result.answers, outcome)
    if result.labelled or not about_classes:
        shown += wording.labels_show(result.labelled, result.measured, outcome, run)
    for sentence in shown:
        screen.result(sentence)
    screen.say(f"Stored in {run / ANSWERS.name}. Next, to use these answers: {result.command}")


def show_methods(result: Any, screen: Screen, given: Arguments) -> None:
    if given["name"] is None:
        table = Table("method", "step", "needs", "what it does", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for each in result:
            summary = f"{each['summary']} ({each['paper'] or 'this project'})"
            table.add_row(*map(escape, (each["name"], each["cost"], each["backbones"], summary)))
        screen.result(table)
        screen.say("step: time of a training step, CDTrans = 1.")
        screen.say("needs: a ViT, BatchNorm, gates as in seresnet50 (SE), or any backbone.")
        screen.say("Options of a method: 'cdtrans methods NAME'.")
        return
    (one,) = result
    reference = ", ".join(filter(None, (f"Reference: {one['paper']}" if one["paper"] else "", one["title"])))
    sentences = (f"{one['name']}: {one['summary']}", reference, f"Backbones: {one['backbones']}")
    screen.result(" ".join(f"{sentence}." for sentence in sentences if sentence))
    table = Table("option", "default", "meaning", title="options, given as --set OPTION=VALUE")
    for option in one["options"]:
        table.add_row(escape(option["name"]), escape(str(option["default"])), escape(option["help"]))
    screen.result(table if one["options"] else "It has no options.")


def show_study(result: Any, screen: Screen, given: Arguments) -> None:
    """The state of a benchmark or an ablation."""
    screen.result(f"{result.finished} of {result.asked} runs are finished: {result.out / result.table}")


def whole(header: str) -> Column:
    """A column whose cells and header continue on the next line where rich would cut them."""
    return Column(header, overflow="fold")


def cell(name: str) -> str:
    """A name on one line, with special characters escaped."""
    return escape(printable(name))
