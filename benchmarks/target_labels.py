"""The worth of a few labels of the target: `adapt --answers` against the same images added to the source.

    python benchmarks/target_labels.py DATA --weights FILE --out DIR --labels 1 3 10 --efforts instant full --jobs 8

DATA holds a folder of class folders for each domain (or DOMAIN/images). So many images of each class are drawn at
random and labelled; accuracy is that of the label-free choice on all other target images. A second call runs what is
missing and prints the table of everything that is there. docs/results/labels.md."""

import io
import itertools
import json
import statistics
import time
import zlib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
from guard import Images
from tasks import call, in_processes, place, run_parser, tasks_of

WAYS = ("target", "source")  # --answers, or added to the source


class Case(NamedTuple):
    source: str
    target: str
    labels: int  # for each class
    draw: int
    effort: str
    way: str

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def run(case: Case, data: Path, flags: list[str], out: Path) -> None:
    base, file = out / case.name, out / f"{case.name}.json"
    if file.exists():
        return
    started = time.monotonic()
    source, target = (Images.scan(place(data, domain)) for domain in (case.source, case.target))
    rng = np.random.default_rng(zlib.crc32(f"{case.target} {case.labels} {case.draw}".encode()))
    chosen = target.each(case.labels, rng) if case.labels else target.of(np.zeros(0, dtype=int))
    lists = {name: f"{base}.{name}" for name in ("source", "target", "rest", "labels")}
    added = zip(*chosen, strict=True) if case.way == "source" else ()
    Path(lists["source"]).write_text("".join(f"{p}\t{k}\n" for p, k in (*zip(*source, strict=True), *added)))
    Path(lists["target"]).write_text("".join(f"{p}\n" for p in target.paths))
    rest = target.of(~np.isin(target.paths, chosen.paths))
    Path(lists["rest"]).write_text("".join(f"{p}\t{k}\n" for p, k in zip(*rest, strict=True)))
    Path(lists["labels"]).write_text("path,label\n" + "".join(f"{p},{k}\n" for p, k in zip(*chosen, strict=True)))
    words = ["adapt", lists["source"], lists["target"], "--out", str(base), "--no-report", "--quiet", "--force"]
    words += [*flags, "--effort", case.effort, "--seed", str(1234 + case.draw), "--no-guard"]
    words += ["--answers", lists["labels"]] if case.labels and case.way == "target" else []
    found = io.StringIO()
    with open(f"{base}.log", "w", buffering=1) as log, redirect_stderr(log):
        with redirect_stdout(log):
            code = call(words)
        with redirect_stdout(found):
            code = code or call(["eval", str(base), lists["rest"], "--json"])
    if code:
        print(case.name, "failed", code, flush=True)
        return
    accuracy = json.loads(found.getvalue())["accuracy"]
    file.write_text(json.dumps(case._asdict() | {"accuracy": accuracy}))
    print(f"{case.name}: {100 * accuracy:.1f} ({time.monotonic() - started:.0f} s)", flush=True)


def table(out: Path) -> None:
    rows = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    print("| labels a class | effort | --answers | added to the source | difference | runs |")
    print("|---|---|---|---|---|---|")
    for labels, effort in sorted({(row["labels"], row["effort"]) for row in rows}):
        some = [row for row in rows if (row["labels"], row["effort"]) == (labels, effort)]
        by_way = {
            way: {(r["source"], r["target"], r["draw"]): 100 * r["accuracy"] for r in some if r["way"] == way}
            for way in WAYS
        }
        both = sorted(by_way["target"].keys() & by_way["source"].keys())
        means = [f"{statistics.mean(found.values()):.1f}" if found else "" for found in by_way.values()]
        differences = [by_way["target"][key] - by_way["source"][key] for key in both]
        error = statistics.stdev(differences) / len(both) ** 0.5 if len(both) > 1 else 0.0
        compared = f"{statistics.mean(differences):+.1f} ± {error:.1f}" if both else ""
        print(f"| {labels} | {effort} | {means[0]} | {means[1]} | {compared} | {len(some)} |")


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--labels", nargs="+", type=int, default=[0, 1, 3, 10], help="of each class")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--efforts", nargs="+", default=["instant"])
    arguments = parser.parse_args()
    flags = ["--backbone", arguments.backbone]
    flags += ["--weights", str(arguments.weights)] if arguments.weights else []
    tasks = tasks_of(arguments.data, arguments.tasks)
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = [
        Case(source, target, labels, draw, effort, way)
        for draw, effort, labels, (source, target), way in itertools.product(
            range(arguments.draws), arguments.efforts, arguments.labels, tasks, WAYS
        )
        if labels or way == "target"  # without labels both are the same
    ]
    in_processes(arguments.jobs, run, ((case, arguments.data, flags, arguments.out) for case in cases))
    table(arguments.out)


if __name__ == "__main__":
    main()
