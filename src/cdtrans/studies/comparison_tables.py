"""A comparison of methods as compared.md, compared.tex, compared.csv and bench.html."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdtrans.reporting.templates import templates
from cdtrans.runtime.environment import package_version
from cdtrans.studies.comparison import REFERENCE, SOURCE_ONLY, Comparison, Row
from cdtrans.studies.results import KINDS, Spread, shared_stage_1
from cdtrans.studies.tables import NOTHING, PAPER_CLASSES, cost, escaped, latex_row

USES_LABELS = "best epoch by target labels*"
HEAD = (
    *("method", "last epoch", "label-free choice", USES_LABELS),
    *("against CDTrans", "minutes", "GiB", "the paper", "note"),
)
LEAST_P = 0.001  # shown in digits
STEP = 5  # percent; the ends of a scale are multiples of it
CURVE_WIDTH, CURVE_HEIGHT = 100, 50  # of the box that a curve is drawn in


@dataclass(frozen=True)
class Bar:
    """A row of the picture; places are percent of its width."""

    title: str
    text: str
    start: float  # source only
    end: float  # the label-free choice
    labels: float | None  # the best epoch by target labels

    @property
    def left(self) -> float:
        return min(self.start, self.end)

    @property
    def width(self) -> float:
        return abs(self.end - self.start)

    @property
    def better(self) -> bool:
        return self.end >= self.start


@dataclass(frozen=True)
class Curve:
    """A small picture: accuracy after every epoch, from source only (dashed) on."""

    title: str
    text: str
    points: str  # of the line, as SVG writes them
    start: float  # height of source only


def markdown(comparison: Comparison) -> str:
    before = "\n\n".join([f"# {title(comparison)}", *about(comparison)])
    parts = [before, _grid(HEAD, map(cells, comparison.rows)), f"## {_second_title(comparison)}"]
    parts += [_grid(_second_head(comparison), map(column_cells, comparison.rows)), *costs(comparison)]
    return "\n\n".join(parts) + "\n"


def latex(comparison: Comparison) -> str:
    """Two table environments that need no package."""
    caption = " ".join([f"{title(comparison)}.", *about(comparison), *costs(comparison)])
    first = _environment(HEAD, map(cells, comparison.rows), caption)
    head, rows = _second_head(comparison), map(column_cells, comparison.rows)
    return first + "\n" + _environment(head, rows, f"{_second_title(comparison)}.")


def csv_table(comparison: Comparison) -> str:
    """One line per method, all numbers in full."""
    kinds = [kind for kind in KINDS if kind != SOURCE_ONLY]
    head = ["method", *(name for kind in kinds for name in (kind, f"{kind}_deviation"))]
    head += ["difference", "p", "pairs", "minutes", "memory", "paper", "note", *comparison.columns]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in comparison.rows:
        spreads = [_shown(row, kind) for kind in kinds]
        numbers = [n for s in spreads for n in (s or (None, None))]
        tasks = [s.mean if s else None for s in row.by_column.values()]
        costs = [row.minutes, row.memory]
        tested = [row.difference, row.p, row.pairs]
        writer.writerow([row.method, *numbers, *tested, *costs, _printed(row), row.note, *tasks])
    return text.getvalue()


def page(comparison: Comparison) -> str:
    """One self-contained HTML file."""
    means = [mean.mean for row in comparison.rows for mean in row.means.values() if mean is not None]
    low, high = _scale(means)
    lowest, highest = _scale([accuracy for row in comparison.rows for accuracy in row.curve])
    return (
        templates("studies", "reporting")
        .get_template("page.html")
        .render(
            title=title(comparison),
            about=about(comparison),
            costs=costs(comparison),
            bars=bars(comparison, low, high),
            low=low,
            high=high,
            curves=curves(comparison, lowest, highest),
            lowest=lowest,
            highest=highest,
            box=(CURVE_WIDTH, CURVE_HEIGHT),
            head=HEAD,
            rows=[cells(row) for row in comparison.rows],
            second_title=_second_title(comparison),
            second_head=_second_head(comparison),
            second_rows=[column_cells(row) for row in comparison.rows],
            version=package_version("cdtrans"),
        )
    )


def title(comparison: Comparison) -> str:
    name, start = comparison.benchmark.title, comparison.start
    origin = "the best recipe's" if start == "best" else "the authors'"
    return f"{name}: methods compared, {comparison.backbone}, {origin} start"


def about(comparison: Comparison) -> list[str]:
    """The paragraphs before the numbers."""
    benchmark, tasks = comparison.benchmark, comparison.tasks
    metric = "Mean of the classes' accuracies" if benchmark.class_mean else "Accuracy"
    seeds = ", ".join(map(str, comparison.seeds))
    several = len(comparison.seeds) > 1
    over = f"mean ± standard deviation over seeds {seeds}" if several else f"one run each, seed {seeds}"
    of = f"all {len(tasks)} tasks" if len(tasks) == len(benchmark.tasks) else f"the tasks {', '.join(tasks)} only"
    notes = [
        f"{metric} on the target in percent, mean of {of}, {over}. A mean stands only where a seed has every task. "
        "*Uses target labels, to choose the epoch, so it is out of reach without them.",
        "Against CDTrans: mean difference of the label-free choices, and the p-value of Wilcoxon's signed-rank test "
        "over all pairs of runs of the same task and seed (two-sided, exact, not corrected for the number of methods; "
        "seeds of one task are not independent of each other). Minutes: of the device, for one run that found stage 1 "
        "ready. GiB: the most that the tensors of a run had of a GPU.",
    ]
    if benchmark.in_paper:
        notes[-1] += (
            " The paper: printed means with their backbones, most of them other ones; where the authors' code chose "
            "the epoch by target labels, compare with that column."
        )
    if REFERENCE not in comparison.results:
        notes.append("CDTrans is not among the methods, so nothing is tested against it.")
    if comparison.data.differences:
        notes.append(f"NOT THE PUBLISHED DATA: {'; '.join(comparison.data.differences)}.")
    return notes


def costs(comparison: Comparison) -> list[str]:
    """The paragraphs after the numbers."""
    finished = comparison.finished
    if not finished:
        return []
    return [cost(finished), shared_stage_1({result.run: result.stage_1 for result in finished})]


def cells(row: Row) -> tuple[str, ...]:
    means = (str(_shown(row, kind) or NOTHING) for kind in KINDS if kind != SOURCE_ONLY)
    minutes = NOTHING if row.minutes is None else f"{row.minutes:.2f}"
    memory = NOTHING if row.memory is None else f"{row.memory:.1f}"
    return (_title(row), *means, _against(row), minutes, memory, _printed(row) or NOTHING, row.note)


def column_cells(row: Row) -> tuple[str, ...]:
    return (_title(row), *(str(s or NOTHING) for s in row.by_column.values()))


def bars(comparison: Comparison, low: int, high: int) -> list[Bar]:
    """The methods that have a mean, the best first, from source only to the label-free choice."""

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    source, *methods = comparison.rows
    before = source.means[SOURCE_ONLY]
    made = []
    for row in methods:
        chosen, labels = row.means["label_free"], row.means["best_by_labels"]
        if chosen is not None:
            start = place(before.mean if before else low)
            made.append(
                Bar(_title(row), str(chosen), start, place(chosen.mean), None if labels is None else place(labels.mean))
            )
    return sorted(made, key=lambda bar: -bar.end)


def curves(comparison: Comparison, low: int, high: int) -> list[Curve]:
    """The methods whose runs have all their epochs, in the order of the bars."""

    def height(value: float) -> float:
        return CURVE_HEIGHT * (high - value) / (high - low)

    made = []
    for row in comparison.rows:
        chosen = row.means.get("label_free")
        if len(row.curve) > 1 and chosen is not None:  # else every run broke off in its first epoch
            step = CURVE_WIDTH / (len(row.curve) - 1)
            points = " ".join(f"{step * epoch:.1f},{height(value):.1f}" for epoch, value in enumerate(row.curve))
            made.append((chosen.mean, Curve(_title(row), f"{row.curve[-1]:.1f}", points, height(row.curve[0]))))
    return [curve for _, curve in sorted(made, key=lambda pair: -pair[0])]


def _scale(values: Sequence[float]) -> tuple[int, int]:
    """Percent: the ends of a scale that has room for these."""
    low, high = min(values, default=0), max(values, default=100)
    return max(0, STEP * (math.ceil(low / STEP) - 1)), min(100, STEP * (math.floor(high / STEP) + 1))


def _title(row: Row) -> str:
    if row.method == SOURCE_ONLY:
        return KINDS[SOURCE_ONLY]
    return "CDTrans" if row.method == REFERENCE else row.method


def _shown(row: Row, kind: str) -> Spread | None:
    """The source-only model has no epochs: it stands for both choices without labels."""
    if row.method == SOURCE_ONLY:
        return None if kind == "best_by_labels" else row.means[SOURCE_ONLY]
    return row.means[kind]


def _against(row: Row) -> str:
    if row.difference is None:
        return NOTHING
    chance = "" if row.p is None else " (p < 0.001)" if row.p < LEAST_P else f" (p = {row.p:.3f})"
    return f"{row.difference:+.1f}{chance}"


def _printed(row: Row) -> str:
    return "; ".join(f"{mean.mean} {mean.backbone}" for mean in row.printed)


def _second_title(comparison: Comparison) -> str:
    return f"The label-free choice by {'class' if comparison.benchmark.class_mean else 'task'}"


def _second_head(comparison: Comparison) -> tuple[str, ...]:
    return ("method", *(PAPER_CLASSES.get(name, name) for name in comparison.columns))


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _environment(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    lines = ["\\begin{table*}", "\\centering\\small", f"\\begin{{tabular}}{{l{'c' * (len(head) - 1)}}}", "\\hline"]
    lines += [latex_row(head), "\\hline", *map(latex_row, rows), "\\hline", "\\end{tabular}"]
    return "\n".join([*lines, f"\\caption{{{escaped(caption)}}}", "\\end{table*}"]) + "\n"
