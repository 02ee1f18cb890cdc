"""Variants of a recipe on the tasks of a data set, several processes side by side: docs/results/recipe.md.

    python benchmarks/recipe.py DATA --weights FILE --out DIR --variants full instant --seeds 1234 1 2 --jobs 8

DATA holds a folder of class folders for each domain (or DOMAIN/images). Every run is an ordinary run folder below
--out, scored by `cdtrans eval` with the target's own class folders; a second call runs what is missing and prints the
tables of everything that is there. --tasks art_painting:sketch names tasks; without it all of them are run."""

import argparse
import gc
import io
import itertools
import json
import statistics
import time
from contextlib import redirect_stderr, redirect_stdout

from tasks import call, in_processes, place, run_parser, tasks_of

VARIANTS = {
    "full": [],
    "quick": ["--effort", "quick"],
    "instant": ["--effort", "instant"],
    "authors": ["--recipe", "authors"],
    "without graph labels": ["--set", "graph=0"],
    "without the moving average": ["--set", "graph=1"],
    "without masks": ["--set", "mask=false"],
    "without strong augmentation": ["--set", "strong=false", "--set", "mask=false"],
    "without information maximisation": ["--set", "information=0"],
    "without the target's loss": ["--set", "target=0"],
    "without layer decay": ["--layer-decay", "1"],
    "without taps": ["--taps", "1"],
    "without new labels": ["--rebuild-every", "10"],
}
COLUMNS = ("source_only_accuracy", "accuracy", "last_epoch_accuracy", "best_by_labels_accuracy")


def run(arguments: argparse.Namespace, seed: int, variant: str, task: tuple[str, str]) -> None:
    out = arguments.out / variant.replace(" ", "-").replace("'", "") / f"{task[0]}-{task[1]}-{seed}"
    scores, log = out.with_suffix(".json"), out.with_suffix(".log")
    if scores.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    source, target = (str(place(arguments.data, domain)) for domain in task)
    flags = ["--backbone", arguments.backbone, "--seed", str(seed), "--no-guard", "--no-report", "--quiet"]
    flags += ["--weights", str(arguments.weights)] if arguments.weights else []
    started, found = time.monotonic(), io.StringIO()
    with open(log, "w", buffering=1) as file, redirect_stderr(file):
        with redirect_stdout(file):
            code = call(["adapt", source, target, "--out", str(out), *flags, *VARIANTS[variant]])
        with redirect_stdout(found):
            code = code or call(["eval", str(out), target, "--json"])
    gc.unfreeze()
    gc.collect()
    if code == 0:
        scores.write_text(found.getvalue())
        values = json.loads(found.getvalue())
        words = " ".join(f"{100 * values[name]:.1f}" for name in COLUMNS)
    else:
        words = f"failed ({code}): {log.read_text().strip().splitlines()[-1]}"
    print(f"{variant} | {task[0]}>{task[1]} | {seed} | {words} | {time.monotonic() - started:.0f} s", flush=True)


def table(arguments: argparse.Namespace, variant: str, tasks: list[tuple[str, str]]) -> None:
    """The mean over the tasks, of each seed, then over the seeds; only seeds that have every task."""
    by_seed: dict[str, list[list[float]]] = {}
    for task in tasks:
        folder = arguments.out / variant.replace(" ", "-").replace("'", "")
        for file in folder.glob(f"{task[0]}-{task[1]}-*.json"):
            values = json.loads(file.read_text())
            by_seed.setdefault(file.stem.rpartition("-")[2], []).append([100 * values[name] for name in COLUMNS])
    whole = {
        seed: [statistics.mean(column) for column in zip(*rows, strict=True)]
        for seed, rows in by_seed.items()
        if len(rows) == len(tasks)
    }
    if whole:
        means = [statistics.mean(column) for column in zip(*whole.values(), strict=True)]
        choice = [row[1] for row in whole.values()]
        spread = f" ± {statistics.stdev(choice):.1f}" if len(choice) > 1 else ""
        print(
            f"| {variant} | {means[0]:.1f} | {means[1]:.1f}{spread} | {means[2]:.1f} | {means[3]:.1f} | {len(whole)} |"
        )


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--variants", nargs="+", default=["full"], choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234])
    arguments = parser.parse_args()
    tasks = tasks_of(arguments.data, arguments.tasks)
    calls = itertools.product([arguments], arguments.seeds, arguments.variants, tasks)  # whole tables first
    in_processes(arguments.jobs, run, calls)
    print(f"| mean of {len(tasks)} tasks | source only | label-free choice | last epoch | best by labels | seeds |")
    print("|---|---|---|---|---|---|")
    for variant in arguments.variants:
        table(arguments, variant, tasks)


if __name__ == "__main__":
    main()
