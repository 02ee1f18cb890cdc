"""Tables of docs/results/compared.md from recorded rows: the results.jsonl of `cdtrans bench` with several methods.

    python benchmarks/compared.py FILE ... [--least-seeds 3] [--by-task]

One table for each file: means over the tasks, in percent, of the seeds for which a method has every task, with the
standard deviation over these seeds; the mean difference of the label-free choices from CDTrans over the tasks and seeds
that both have, and Wilcoxon's p. --least-seeds leaves out methods with fewer seeds. --by-task prints the label-free
choice by task instead."""

import argparse
import json
import statistics
from pathlib import Path
from typing import NamedTuple

from cdtrans.studies.comparison import GIB, REFERENCE, signed_rank_p
from cdtrans.studies.results import Spread

KINDS = ("last_epoch", "label_free", "best_by_labels")
SOURCE_ONLY = "source_only"


class RunResult(NamedTuple):
    """The part of a recorded row that the tables show."""

    task: str
    seed: int
    run: str
    stage_1: str
    scores: dict[str, float]
    device_seconds: float
    peak_memory: int | None


Rows = dict[str, list[RunResult]]


def read(file: Path) -> Rows:
    """The runs by method; every run of a task and seed has the same source-only model."""
    methods: Rows = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        result = RunResult(*(row[name] for name in RunResult._fields))
        methods.setdefault(result.run.partition("/")[0], []).append(result)
    return methods


def of_whole_seeds(results: list[RunResult], tasks: list[str]) -> dict[int, list[RunResult]]:
    """The runs by seed, of seeds that have every task."""
    seeds = {seed: [r for r in results if r.seed == seed] for seed in sorted({r.seed for r in results})}
    return {seed: runs for seed, runs in seeds.items() if {r.task for r in runs} == set(tasks)}


def mean(seeds: dict[int, list[RunResult]], kind: str, task: str | None = None) -> str:
    """Over the tasks, or of one, with the deviation over the seeds."""
    runs = ([r for r in runs if task in (None, r.task)] for runs in seeds.values())
    means = [100 * statistics.fmean(r.scores[kind] for r in some) for some in runs]
    return str(Spread(statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else None))


def difference(results: list[RunResult], reference: list[RunResult]) -> str:
    known = {(r.task, r.seed): r.scores["label_free"] for r in reference}
    found = [r.scores["label_free"] - known[r.task, r.seed] for r in results if (r.task, r.seed) in known]
    p = signed_rank_p(found)
    if p is None:
        return ""
    return f"{100 * statistics.fmean(found):+.1f} ({'<0.01' if p < 0.005 else f'{p:.2f}'})"


def table(methods: Rows, least: int, *, by_task: bool) -> None:
    tasks = sorted({r.task for results in methods.values() for r in results})
    whole = {method: of_whole_seeds(results, tasks) for method, results in methods.items()}
    whole = {method: seeds for method, seeds in whole.items() if len(seeds) >= least}
    order = sorted(whole, key=lambda method: -float(mean(whole[method], "label_free").split()[0]))
    start = whole.get(REFERENCE) or next(iter(whole.values()))
    head = tasks if by_task else ["last", "chosen", "best*", "against CDTrans (p)", "seeds", "s", "GiB"]
    print(f"| | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}")
    rest = [""] * (0 if by_task else 4)
    cells = [mean(start, SOURCE_ONLY, task) for task in tasks] if by_task else ["", mean(start, SOURCE_ONLY), ""]
    print(f"| source only | {' | '.join([*cells, *rest])} |")
    for method in order:
        seeds, results = whole[method], methods[method]
        name = "**CDTrans**" if method == REFERENCE else method
        if by_task:
            cells = [mean(seeds, "label_free", task) for task in tasks]
        else:
            tested = "" if method == REFERENCE else difference(results, methods.get(REFERENCE, []))
            found_stage_1 = [r for r in results if r.stage_1 != r.run] or results
            seconds = statistics.fmean(r.device_seconds for r in found_stage_1)
            memory = max(r.peak_memory or 0 for r in results) / GIB
            cells = [*(mean(seeds, kind) for kind in KINDS), tested, str(len(seeds)), f"{seconds:.1f}", f"{memory:.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--least-seeds", type=int, default=1)
    parser.add_argument("--by-task", action="store_true")
    arguments = parser.parse_args()
    for file in arguments.files:
        print(f"\n{file.stem}:\n")
        table(read(file), arguments.least_seeds, by_task=arguments.by_task)


if __name__ == "__main__":
    main()
