"""Several methods on one benchmark: the numbers of every row, and a paired test against CDTrans."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cdtrans.inputs.benchmarks import Benchmark, FoundBenchmark
from cdtrans.paper.printed_tables import PrintedMean, printed_means
from cdtrans.studies.results import KINDS, RunResult, Spread, columns, spread, values

REFERENCE = "cdtrans"  # what the other methods are tested against
SOURCE_ONLY = "source_only"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A method's numbers in percent, or those of the source-only model."""

    method: str
    means: dict[str, Spread | None]  # by kind: of the tasks, over the seeds
    by_column: dict[str, Spread | None]  # the label-free choice by task or, for VisDA-2017, by class
    difference: float | None  # mean of the label-free choice's difference from the reference, over tasks and seeds
    p: float | None  # that such a difference is chance
    pairs: int  # of runs that were compared
    minutes: float | None  # of the device, for one run
    memory: float | None  # GiB of the GPU, the most of all runs
    curve: tuple[float, ...]  # mean accuracy of the tasks after every epoch, by target labels; the first is source only
    printed: tuple[PrintedMean, ...]
    note: str  # what is missing, and why

    def numbers(self) -> dict[str, Any]:
        """The promised keys of a method in `bench --json`."""
        return {
            "method": self.method,
            "mean": {kind: None if s is None else s.mean for kind, s in self.means.items()},
            "deviation": {kind: None if s is None else s.deviation for kind, s in self.means.items()},
            "label_free": {name: None if s is None else s.mean for name, s in self.by_column.items()},
            "difference": self.difference,
            "p": self.p,
            "pairs": self.pairs,
            "minutes": self.minutes,
            "memory": self.memory,
            "curve": list(self.curve),
            "paper": [mean._asdict() for mean in self.printed],
            "note": self.note,
        }


@dataclass(frozen=True)
class Comparison:
    """What is known of a comparison so far. The methods are in the order of the rows."""

    data: FoundBenchmark
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]  # that the means are of
    start: str
    backbone: str
    results: Mapping[str, Sequence[RunResult]]  # by method, of finished runs
    own_start: Sequence[str]  # methods that begin with another recipe than `start`
    misfits: Mapping[str, str]  # methods that cannot work with the backbone, and what they need
    failed: Mapping[str, int]  # runs, by method

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
        """`kind` is what stands for the method where one number does."""
        chosen = values(self.benchmark, results, kind)
        kinds = {name: name for name in KINDS if name != SOURCE_ONLY} if method != SOURCE_ONLY else {kind: kind}
        differences = [] if method == REFERENCE else self._differences(results, kind)
        return Row(
            method=method,
            means={name: spread(values(self.benchmark, results, of), self.columns) for name, of in kinds.items()},
            by_column={name: spread(chosen, [name]) for name in self.columns},
            difference=100 * statistics.fmean(differences) if differences else None,
            p=signed_rank_p(differences),
            pairs=len(differences),
            minutes=None if method == SOURCE_ONLY else _minutes(results),
            memory=None if method == SOURCE_ONLY else _memory(results),
            curve=() if method == SOURCE_ONLY else self._curve(results),
            printed=printed_means(self.benchmark.name).get(method, ()) if self.benchmark.in_paper else (),
            note=note,
        )

    def _differences(self, results: Sequence[RunResult], kind: str) -> list[float]:
        """From the reference's label-free choice, for every task and seed that both have."""
        reference = {(r.task, r.seed): r.scores["label_free"] for r in self.results.get(REFERENCE, ())}
        both = [r for r in results if kind in r.scores and (r.task, r.seed) in reference]
        return [r.scores[kind] - reference[r.task, r.seed] for r in both]

    def _curve(self, results: Sequence[RunResult]) -> tuple[float, ...]:
        """Of the seeds that have every task; empty if there are none, or if a run ended early."""
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
    """Of the runs that found stage 1 ready, if there are any."""
    without = [r for r in results if r.stage_1 != r.run]
    return statistics.fmean(r.device_seconds / 60 for r in without or results) if results else None


def _memory(results: Sequence[RunResult]) -> float | None:
    return max((r.peak_memory / GIB for r in results if r.peak_memory is not None), default=None)


def signed_rank_p(differences: Sequence[float]) -> float | None:
    """The two-sided p-value of Wilcoxon's signed-rank test, exact also where differences tie. None without any
    difference."""
    d = np.round(np.array(differences, dtype=float), 9)  # equal differences of accuracies may differ by rounding
    d = d[d != 0]
    if not len(d):
        return None
    _, place, counts = np.unique(np.abs(d), return_inverse=True, return_counts=True)
    twice_ranks = (2 * np.cumsum(counts) - counts + 1)[place]  # ties have their mean rank; twice it is an integer
    chance = np.zeros(twice_ranks.sum() + 1)  # of every sum of the positive ones' ranks, if signs are tossed
    chance[0] = 1
    for rank in twice_ranks:
        chance = 0.5 * (chance + np.concatenate([np.zeros(rank), chance[:-rank]]))
    smaller = min(twice_ranks[d > 0].sum(), twice_ranks[d < 0].sum())
    return min(1.0, 2 * float(chance[: smaller + 1].sum()))
