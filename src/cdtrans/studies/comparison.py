"""Several methods on one benchmark: the numbers of every row, a paired test against CDTrans, and the files that show
them: compared.md, compared.tex, compared.csv and bench.html."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cdtrans.inputs.benchmarks import Benchmark, FoundBenchmark
from cdtrans.paper.printed_tables import PrintedMean, printed_means
from cdtrans.reporting.page import templates
from cdtrans.runtime import package_version
from cdtrans.studies.results import KINDS, RunResult, Spread, columns, shared_stage_1, spread, values
from cdtrans.studies.tables import NOTHING, PAPER_CLASSES, cost, grid, latex_row, latex_table, over_seeds

REFERENCE = "cdtrans"  # the method that the others are tested against
SOURCE_ONLY = "source_only"
METHOD_KINDS = tuple(kind for kind in KINDS if kind != SOURCE_ONLY)
GIB = 2**30
USES_LABELS = "best epoch by target labels*"
HEAD = (
    *("method", "last epoch", "label-free choice", USES_LABELS),
    *("against CDTrans", "minutes", "GiB", "the paper", "note"),
)
LEAST_P = 0.001  # shown in digits
STEP = 5  # percent; the ends of a scale are multiples of it


@dataclass(frozen=True)
class Row:
    """A method's numbers in percent, or those of the source-only model."""

    method: str
    means: dict[str, Spread | None]  # by kind: means over the tasks, with the deviation over the seeds
    by_column: dict[str, Spread | None]  # the label-free choice by task or, for VisDA-2017, by class
    difference: float | None  # mean of the label-free choice's difference from the reference, over tasks and seeds
    p: float | None  # probability of such a difference by chance
    pairs: int  # pairs of runs that were compared
    minutes: float | None  # device time of one run
    memory: float | None  # GiB of the GPU, the most of all runs
    curve: tuple[float, ...]  # mean accuracy over the tasks after every epoch; the first is source only
    printed: tuple[PrintedMean, ...]
    note: str  # missing runs and the cause

    @property
    def title(self) -> str:
        return {SOURCE_ONLY: KINDS[SOURCE_ONLY], REFERENCE: "CDTrans"}.get(self.method, self.method)

    def shown(self, kind: str) -> Spread | None:
        """A mean in the tables. The source-only model has no epochs: it stands for both choices without labels."""
        return self.means.get(SOURCE_ONLY if self.method == SOURCE_ONLY and kind != "best_by_labels" else kind)

    def numbers(self) -> dict[str, Any]:
        """The promised keys of a method in `bench --json`."""
        names = ("method", "difference", "p", "pairs", "minutes", "memory", "note")
        return {name: getattr(self, name) for name in names} | {
            "mean": {kind: s and s.mean for kind, s in self.means.items()},
            "deviation": {kind: s and s.deviation for kind, s in self.means.items()},
            "label_free": {name: s and s.mean for name, s in self.by_column.items()},
            "curve": list(self.curve),
            "paper": [mean._asdict() for mean in self.printed],
        }


@dataclass(frozen=True)
class Comparison:
    """A comparison so far. The methods are in the order of the rows."""

    data: FoundBenchmark
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]  # the means are over these
    start: str
    backbone: str
    results: Mapping[str, Sequence[RunResult]]  # finished runs by method
    own_start: Sequence[str]  # methods that begin with another recipe than `start`
    misfits: Mapping[str, str]  # methods that cannot work with the backbone, and what they need
    failed: Mapping[str, int]  # failed runs by method

    @property
    def benchmark(self) -> Benchmark:
        return self.data.benchmark

    @property
    def columns(self) -> tuple[str, ...]:
        return columns(self.benchmark) if self.benchmark.class_mean else self.tasks

    @property
    def finished(self) -> list[RunResult]:
        return [result for results in self.results.values() for result in results]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Source only, then the methods."""
        return (self._source_only(), *(self._row(method) for method in self.results))

    def _source_only(self) -> Row:
        """Every run of one source and seed has the same source-only model, except those with a start of their own."""
        shared = [r for m, results in self.results.items() if m not in self.own_start for r in results]
        by_run = {(r.task, r.seed): r for r in shared if SOURCE_ONLY in r.scores}
        return self._numbers(SOURCE_ONLY, SOURCE_ONLY, list(by_run.values()), "")

    def _row(self, method: str) -> Row:
        results, wanted = self.results[method], len(self.tasks) * len(self.seeds)
        failed, missing = self.failed.get(method, 0), wanted - len(results)
        notes = []
        if method in self.misfits:
            notes.append(self.misfits[method])
        elif missing:
            notes += [f"{failed} of {wanted} failed"] if failed else []
            notes += [f"{missing - failed} of {wanted} to run"] if missing > failed else []
        if method in self.own_start:
            notes.append("starts with its own recipe")
        return self._numbers(method, "label_free", results, "; ".join(notes))

    def _numbers(self, method: str, kind: str, results: Sequence[RunResult], note: str) -> Row:
        """`kind`: the choice of epoch that the method is judged by."""
        chosen = values(self.benchmark, results, kind)
        kinds = (kind,) if method == SOURCE_ONLY else METHOD_KINDS
        differences = [] if method == REFERENCE else self._differences(results, kind)
        return Row(
            method=method,
            means={name: spread(values(self.benchmark, results, name), self.columns) for name in kinds},
            by_column={name: spread(chosen, [name]) for name in self.columns},
            difference=100 * statistics.fmean(differences) if differences else None,
            p=signed_rank_p(differences),
            pairs=len(differences),
            minutes=None if method == SOURCE_ONLY else _minutes(results),
            memory=max((r.peak_memory / GIB for r in results if r.peak_memory and method != SOURCE_ONLY), default=None),
            curve=() if method == SOURCE_ONLY else self._curve(results),
            printed=printed_means(self.benchmark.name).get(method, ()) if self.benchmark.in_paper else (),
            note=note,
        )

    def _differences(self, results: Sequence[RunResult], kind: str) -> list[float]:
        """Differences from the reference's label-free choice, for every task and seed that both have."""
        reference = {(r.task, r.seed): r.scores["label_free"] for r in self.results.get(REFERENCE, ())}
        both = [r for r in results if kind in r.scores and (r.task, r.seed) in reference]
        return [r.scores[kind] - reference[r.task, r.seed] for r in both]

    def _curve(self, results: Sequence[RunResult]) -> tuple[float, ...]:
        """The mean over the seeds that have every task; empty without any, or if a run ended early."""
        seeds = [result.seed for result in results if result.curve]
        curves = [result.curve for result in results if seeds.count(result.seed) == len(self.tasks)]
        if len({len(curve) for curve in curves}) != 1:
            return ()
        return tuple(100 * statistics.fmean(accuracies) for accuracies in zip(*curves, strict=True))

    def summary(self) -> dict[str, Any]:
        """The promised keys of `bench --json` with several methods."""
        return {
            "start": self.start,
            "backbone": self.backbone,
            "tasks": list(self.tasks),
            "seeds": list(self.seeds),
            "methods": [row.numbers() for row in self.rows],
        }


def _minutes(results: Sequence[RunResult]) -> float | None:
    """Mean device time of the runs that found stage 1 ready; of all if there are none."""
    without = [r for r in results if r.stage_1 != r.run]
    return statistics.fmean(r.device_seconds / 60 for r in without or results) if results else None


def signed_rank_p(differences: Sequence[float]) -> float | None:
    """The two-sided p-value of Wilcoxon's signed-rank test, exact also with ties. None without any difference."""
    d = np.round(np.array(differences, dtype=float), 9)  # equal differences of accuracies may differ by rounding
    d = d[d != 0]
    if not len(d):
        return None
    _, place, counts = np.unique(np.abs(d), return_inverse=True, return_counts=True)
    twice_ranks = (2 * np.cumsum(counts) - counts + 1)[place]  # ties have their mean rank; twice it is an integer
    chance = np.zeros(twice_ranks.sum() + 1)  # probability of every sum of the positive ones' ranks under random signs
    chance[0] = 1
    for rank in twice_ranks:
        chance = 0.5 * (chance + np.concatenate([np.zeros(rank), chance[:-rank]]))
    smaller = min(twice_ranks[d > 0].sum(), twice_ranks[d < 0].sum())
    return min(1.0, 2 * float(chance[: smaller + 1].sum()))


def comparison_files(comparison: Comparison) -> dict[str, str]:
    """The contents of every file that shows a comparison, by name."""
    return {
        "compared.md": markdown(comparison),
        "compared.tex": latex(comparison),
        "compared.csv": csv_table(comparison),
        "bench.html": page(comparison),
    }


def markdown(comparison: Comparison) -> str:
    first, second = grid(HEAD, map(cells, comparison.rows)), grid(*_second_table(comparison))
    parts = [f"# {title(comparison)}", *about(comparison), first, f"## {_second_title(comparison)}", second]
    return "\n\n".join([*parts, *costs(comparison)]) + "\n"


def latex(comparison: Comparison) -> str:
    """Two table environments that need no package."""
    caption = " ".join([f"{title(comparison)}.", *about(comparison), *costs(comparison)])
    first, second = (HEAD, map(cells, comparison.rows)), _second_table(comparison)
    tables = ((*first, caption), (*second, f"{_second_title(comparison)}."))
    return "\n".join(
        latex_table(f"l{'c' * (len(head) - 1)}", [latex_row(head), "\\hline", *map(latex_row, rows), "\\hline"], text)
        for head, rows, text in tables
    )


def csv_table(comparison: Comparison) -> str:
    """One line per method, all numbers in full."""
    names = ("difference", "p", "pairs", "minutes", "memory")
    spreads = [name for kind in METHOD_KINDS for name in (kind, f"{kind}_deviation")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *spreads, *names, "paper", "note", *comparison.columns])
    for row in comparison.rows:
        means = [number for kind in METHOD_KINDS for number in (row.shown(kind) or (None, None))]
        numbers, tasks = [getattr(row, name) for name in names], [s and s.mean for s in row.by_column.values()]
        writer.writerow([row.method, *means, *numbers, _printed(row), row.note, *tasks])
    return text.getvalue()


def page(comparison: Comparison) -> str:
    """One self-contained HTML file. Bars and curves are sorted by the label-free choice."""
    source, *methods = comparison.rows
    means = [mean.mean for row in comparison.rows for mean in row.means.values() if mean is not None]
    charted = sorted(
        ((mean.mean, row) for row in methods if (mean := row.means["label_free"]) is not None),
        key=lambda pair: -pair[0],
    )
    second_head, second_rows = _second_table(comparison)
    return (
        templates("studies", "reporting")
        .get_template("page.html")
        .render(
            title=title(comparison),
            about=about(comparison),
            costs=costs(comparison),
            start=source.means[SOURCE_ONLY],
            bars=[row for _, row in charted],
            scale=_scale(means),
            curves=[row for _, row in charted if len(row.curve) > 1],  # other runs broke off in their first epoch
            curve_scale=_scale([accuracy for row in comparison.rows for accuracy in row.curve]),
            head=HEAD,
            rows=[cells(row) for row in comparison.rows],
            second_title=_second_title(comparison),
            second_head=second_head,
            second_rows=second_rows,
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
    of = f"all {len(tasks)} tasks" if len(tasks) == len(benchmark.tasks) else f"the tasks {', '.join(tasks)} only"
    notes = [
        f"{metric} on the target in percent, mean of {of}, {over_seeds(comparison.seeds)}. A mean stands only where a "
        "seed has every task. *Uses target labels, to choose the epoch, so it is out of reach without them.",
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
    return [cost(finished), shared_stage_1(finished)] if finished else []


def cells(row: Row) -> tuple[str, ...]:
    means = (str(row.shown(kind) or NOTHING) for kind in METHOD_KINDS)
    minutes = NOTHING if row.minutes is None else f"{row.minutes:.2f}"
    memory = NOTHING if row.memory is None else f"{row.memory:.1f}"
    return (row.title, *means, _against(row), minutes, memory, _printed(row) or NOTHING, row.note)


def _scale(values: Sequence[float]) -> tuple[int, int]:
    """The ends of a percent scale that has room for these values."""
    low, high = min(values, default=0), max(values, default=100)
    return max(0, STEP * (math.ceil(low / STEP) - 1)), min(100, STEP * (math.floor(high / STEP) + 1))


def _against(row: Row) -> str:
    if row.difference is None:
        return NOTHING
    chance = "" if row.p is None else " (p < 0.001)" if row.p < LEAST_P else f" (p = {row.p:.3f})"
    return f"{row.difference:+.1f}{chance}"


def _printed(row: Row) -> str:
    return "; ".join(f"{mean.mean} {mean.backbone}" for mean in row.printed)


def _second_title(comparison: Comparison) -> str:
    return f"The label-free choice by {'class' if comparison.benchmark.class_mean else 'task'}"


def _second_table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: the label-free choice by task or class."""
    head = ("method", *(PAPER_CLASSES.get(name, name) for name in comparison.columns))
    return head, [(row.title, *(str(s or NOTHING) for s in row.by_column.values())) for row in comparison.rows]
