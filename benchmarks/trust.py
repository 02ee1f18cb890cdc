"""The label-free choice, the guard and the estimate in finished runs that were measured with target labels:
docs/results/selection.md.

usage: python benchmarks/trust.py RUN ...
       python benchmarks/trust.py --methods BENCH ...      regret by method, in folders of `cdtrans bench --method all`
Each measured with labels of its target, by `cdtrans eval` or `bench`."""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from cdtrans.config import HINTS
from cdtrans.methods import METHODS, method_class
from cdtrans.record import layout
from cdtrans.record.record import RunRecord


def read(run: Path) -> dict[str, Any]:
    record = RunRecord(run)
    measured = record.measured
    assert measured is not None, f"'{run}' is not measured"
    return {
        "name": "/".join(run.parts[-2:]),
        "accuracy": [scores.accuracy for scores in measured.epochs],
        "scores": record.events("scores")[1:],
        "outcome": record.outcome,
    }


def regrets(run: dict[str, Any]) -> dict[str, float]:
    """By rule: how far the epoch it chooses lies below the best by labels, in points."""
    found = {}
    for name in HINTS["select"].__args__:
        if name in ("last", *run["scores"][0]):
            best = max(run["scores"], key=lambda line: (0 if name == "last" else line[name], line["epoch"]))["epoch"]
            found[name] = 100 * (max(run["accuracy"][1:]) - run["accuracy"][best])
    return found


def by_method(folders: list[Path]) -> None:
    """Mean and worst regret of every score for every method."""
    found: dict[str, list[dict[str, float]]] = {}
    for folder in folders:
        start = json.loads((folder / "bench.json").read_text())["recipe"]
        for run in sorted(folder.glob("*/*/seed-*")):
            record = RunRecord(run)
            if record.has(layout.MEASURED) and record.config.recipe == start:  # not a method with its own start
                found.setdefault(run.parts[-3], []).append(regrets(read(run)))
    methods = {name: found[name] for name in METHODS if name in found and method_class(name).trains}
    rules = list(next(iter(methods.values()))[0])
    print(f"| method | runs | {' | '.join(rules)} |\n|{'---|' * (len(rules) + 2)}")
    methods["all"] = [run for runs in methods.values() for run in runs]
    for name, runs in methods.items():
        cells = [f"{mean(run[rule] for run in runs):.1f} ({max(run[rule] for run in runs):.0f})" for rule in rules]
        print(f"| {name} | {len(runs)} | {' | '.join(cells)} |")


def main() -> None:
    if sys.argv[1] == "--methods":
        by_method([Path(place) for place in sys.argv[2:]])
        return
    runs = [read(Path(place)) for place in sys.argv[1:]]
    print("| run | source only | chosen (epoch) | last | best by labels | guard | estimate | truth inside |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        accuracy, outcome = run["accuracy"], run["outcome"]
        chosen, band = outcome.choice.epoch, outcome.estimate
        shown, inside = "unknown", ""
        if band is not None:
            shown = f"{100 * band.low:.0f} to {100 * band.high:.0f}"
            inside = "yes" if band.low <= accuracy[chosen] <= band.high else "no"
        cells = [f"{100 * accuracy[k]:.1f}" for k in (0, chosen, -1)]
        print(
            f"| {run['name']} | {cells[0]} | {cells[1]} ({chosen}) | {cells[2]} | {100 * max(accuracy[1:]):.1f} | "
            f"{outcome.verdict.kind} | {shown} | {inside} |"
        )
    every = [regrets(run) for run in runs]
    print("\n| chosen by | regret, mean | regret, worst |\n|---|---|---|")
    for name in every[0]:
        values = [one[name] for one in every]
        print(f"| {name} | {mean(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
