"""Several methods on one benchmark: the numbers of every row, a paired test against CDTrans, and the files that show
them: compared.md, compared.tex, compared.csv and bench.html."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdtrans.paper.printed_tables import PrintedMean, printed_means
from cdtrans.record.files import csv_lines
from cdtrans.reporting.page import templates
from cdtrans.runtime import package_version
from cdtrans.studies.results import SCORE_TITLES, BenchResults, RunResult, Spread, seed_spread, values
from cdtrans.studies.tables import NOTHING, Document, Table, column_titles, cost_notes, document

REFERENCE = "cdtrans"  # the method that the others are tested against
SOURCE_ONLY = "source_only"
METHOD_KINDS = tuple(kind for kind in SCORE_TITLES if kind != SOURCE_ONLY)
GIB = 2**30
HEAD = (
    *("method", "last epoch", "label-free choice", "best epoch by target labels*"),
    *("against CDTrans", "minutes", "GiB", "the paper", "note"),
)
LEAST_P = 0.001  # shown in digits
STEP = 5  # percent; the ends of a scale are multiples of it


@dataclass(frozen=True)
class MethodRow:
    """A method's numbers in percent, or those of the source-only model."""

    method: str
    means: dict[str, Spread | None]  # by kind: means over the tasks, with the deviation over the seeds
    by_column: dict[str, Spread | None]  # the label-free choice by task or, for VisDA-2017, by class
    difference: float | None  # mean of the label-free choice's difference from the reference, over tasks and seeds
    p: float | None  # probability of such a difference by chance
    pairs: int  # pairs of runs that were compared
    printed: tuple[PrintedMean, ...]
    minutes: float | None = None  # device time of one run
    memory: float | None = None  # GiB of the GPU, the most of all runs
    curve: tuple[float, ...] = ()  # mean accuracy over the tasks after every epoch; the first is source only
    note: str = ""  # missing runs and the cause

    @property
    def title(self) -> str:
        return {SOURCE_ONLY: SCORE_TITLES[SOURCE_ONLY], REFERENCE: "CDTrans"}.get(self.method, self.method)

    def shown(self, kind: str) -> Spread | None:
        """A mean in the tables. The source-only model has no epochs: it stands for both choices without labels."""
        return self.means.get(SOURCE_ONLY if self.method == SOURCE_ONLY and kind != "best_by_labels" else kind)

    def cells(self) -> tuple[str, ...]:
        """The row of the first table."""
        means = (str(self.shown(kind) or NOTHING) for kind in METHOD_KINDS)
        minutes = NOTHING if self.minutes is None else f"{self.minutes:.2f}"
        memory = NOTHING if self.memory is None else f"{self.memory:.1f}"
        return (self.title, *means, self._against(), minutes, memory, self.paper() or NOTHING, self.note)

    def _against(self) -> str:
        if self.difference is None:
            return NOTHING
        chance = "" if self.p is None else " (p < 0.001)" if self.p < LEAST_P else f" (p = {self.p:.3f})"
        return f"{self.difference:+.1f}{chance}"

    def paper(self) -> str:
        return "; ".join(f"{mean.mean} {mean.backbone}" for mean in self.printed)

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


def method_rows(bench: BenchResults) -> list[MethodRow]:
    """Source only, then the methods. Every run of one source and seed has the same source-only model, except those with
    a start of their own."""
    shared = [r for m, results in bench.by_method.items() if not bench.own_start(m) for r in results]
    source_only = {(r.task, r.seed): r for r in shared if SOURCE_ONLY in r.scores}
    rows = [_row(bench, SOURCE_ONLY, [*source_only.values()], (SOURCE_ONLY,), SOURCE_ONLY)]
    for method, results in bench.by_method.items():
        memory = max((r.peak_memory / GIB for r in results if r.peak_memory), default=None)
        rest = {"minutes": _minutes(results), "memory": memory, "note": _note(bench, method)}
        rows.append(_row(bench, method, results, METHOD_KINDS, "label_free", curve=_curve(bench, results), **rest))
    return rows


def _row(
    bench: BenchResults, method: str, results: Sequence[RunResult], kinds: Sequence[str], judged_by: str, **rest: Any
) -> MethodRow:
    """`judged_by`: the choice of epoch that is compared, for every task and seed that both have, with the label-free
    choice of the reference."""
    chosen = values(bench.benchmark, results, judged_by)
    compared = () if method == REFERENCE else bench.by_method.get(REFERENCE, ())
    reference = {(r.task, r.seed): r.scores["label_free"] for r in compared}
    both = [r for r in results if judged_by in r.scores and (r.task, r.seed) in reference]
    differences = [r.scores[judged_by] - reference[r.task, r.seed] for r in both]
    return MethodRow(
        method=method,
        means={kind: seed_spread(values(bench.benchmark, results, kind), bench.columns) for kind in kinds},
        by_column={name: seed_spread(chosen, [name]) for name in bench.columns},
        difference=100 * statistics.fmean(differences) if differences else None,
        p=signed_rank_p(differences),
        pairs=len(differences),
        printed=printed_means(bench.benchmark.name).get(method, ()),
        **rest,
    )


def _note(bench: BenchResults, method: str) -> str:
    wanted = len(bench.tasks) * len(bench.seeds)
    failed, missing = bench.failed.get(method, 0), wanted - len(bench.by_method[method])
    notes = []
    if method in bench.misfits:
        notes.append(bench.misfits[method])
    elif missing:
        notes += [f"{failed} of {wanted} failed"] if failed else []
        notes += [f"{missing - failed} of {wanted} to run"] if missing > failed else []
    if bench.own_start(method):
        notes.append("starts with its own recipe")
    return "; ".join(notes)


def _curve(bench: BenchResults, results: Sequence[RunResult]) -> tuple[float, ...]:
    """The mean over the seeds that have every task; empty without any, or if a run ended early."""
    seeds = [result.seed for result in results if result.curve]
    curves = [result.curve for result in results if seeds.count(result.seed) == len(bench.tasks)]
    if len({len(curve) for curve in curves}) != 1:
        return ()
    return tuple(100 * statistics.fmean(accuracies) for accuracies in zip(*curves, strict=True))


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


def comparison_document(bench: BenchResults, rows: Sequence[MethodRow]) -> Document:
    """A table of means, and one of the label-free choice by task or class."""
    by_column = [(row.title, *(str(s or NOTHING) for s in row.by_column.values())) for row in rows]
    title = f"The label-free choice by {'class' if bench.benchmark.class_mean else 'task'}"
    origin = "the best recipe's" if bench.start == "best" else "the authors'"
    return document(
        "compared.txt",
        f"{bench.benchmark.title}: methods compared, {bench.backbone}, {origin} start",
        (Table(HEAD, [[row.cells() for row in rows]]), Table(("method", *column_titles(bench)), [by_column], title)),
        bench=bench,
        benchmark=bench.benchmark,
        tested=REFERENCE in bench.by_method,
        cost=cost_notes(bench.finished),
    )


def csv_table(bench: BenchResults, rows: Sequence[MethodRow]) -> str:
    """One line per method, all numbers in full."""
    names = ("difference", "p", "pairs", "minutes", "memory")
    spreads = [name for kind in METHOD_KINDS for name in (kind, f"{kind}_deviation")]
    lines: list[list[object]] = [["method", *spreads, *names, "paper", "note", *bench.columns]]
    for row in rows:
        means = [number for kind in METHOD_KINDS for number in (row.shown(kind) or (None, None))]
        numbers, tasks = [getattr(row, name) for name in names], [s and s.mean for s in row.by_column.values()]
        lines.append([row.method, *means, *numbers, row.paper(), row.note, *tasks])
    return csv_lines(lines).decode("utf-8", "surrogateescape")


def html_page(shown: Document, rows: Sequence[MethodRow]) -> str:
    """One self-contained HTML file. Bars and curves are sorted by the label-free choice."""
    means = [mean.mean for row in rows for mean in row.means.values() if mean is not None]
    chosen = [(mean.mean, row) for row in rows if (mean := row.means.get("label_free")) is not None]
    charted = [row for _, row in sorted(chosen, key=lambda pair: -pair[0])]
    return (
        templates("studies", "reporting")
        .get_template("page.html")
        .render(
            document=shown,
            start=rows[0].means[SOURCE_ONLY],
            bars=charted,
            scale=_scale(means),
            curves=[row for row in charted if len(row.curve) > 1],  # other runs broke off in their first epoch
            curve_scale=_scale([accuracy for row in rows for accuracy in row.curve]),
            version=package_version("cdtrans"),
        )
    )


def _scale(values: Sequence[float]) -> tuple[int, int]:
    """The ends of a percent scale that has room for these values."""
    low, high = min(values, default=0), max(values, default=100)
    return max(0, STEP * (math.ceil(low / STEP) - 1)), min(100, STEP * (math.floor(high / STEP) + 1))
