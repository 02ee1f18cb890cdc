"""Runs that are healthy and runs that are spoilt: what the guard says of them, and what is true. docs/results/guard.md.

    python benchmarks/guard.py NAME=DIR ... --flags NAME="--backbone ... --weights FILE" --recipes instant best authors
        --out DIR --jobs 8
    python benchmarks/guard.py --rows docs/results/guard.json
    python benchmarks/guard.py --compared NAME=DIR ... --out DIR

Each DIR holds one folder of class folders for each domain (or DOMAIN/images); every ordered pair of domains is a task.
A second call runs what is missing and prints the tables of everything that is there; --rows prints those of recorded
runs. The limits are also fitted anew without each data set, and tested on it. --compared takes the runs of
`cdtrans bench` with several methods in DIR."""

import argparse
import io
import itertools
import json
import os
import shlex
import time
import zlib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tasks import call, in_processes, place, tasks_of

from cdtrans.config import make_config, read_recipe
from cdtrans.errors import VERDICT_AGAINST
from cdtrans.inputs.scan import scan_labelled
from cdtrans.record.outcome import Outcome
from cdtrans.record.record import RunRecord
from cdtrans.trust import guard

RECIPES = {
    "instant": ["--effort", "instant"],
    "best": [],
    "quick": ["--effort", "quick"],
    "authors": ["--recipe", "authors"],
    "dann": ["--method", "dann"],
    "mcd": ["--method", "mcd"],
    "rpll": ["--method", "rpll"],
    "mrkld_lrent": ["--method", "mrkld_lrent"],
}
SHORT = ["--source-epochs", "6", "--epochs", "8"]  # for recipes that train stage 1, in tasks of few images
CONDITIONS = ("healthy", "small5", "small20", "shuffled", "noise", "other", "few", "imbalanced", "rate")
HEALTHY = ("healthy", "small5", "small20", "imbalanced")
OTHERS = ("noise", "other", "few")  # must not be better
COMPARED = "compared"  # a run of `cdtrans bench`; no limit is fitted to it
NOISE = 300  # images


class Task(NamedTuple):
    data: str
    source: Path
    target: Path
    condition: str
    recipe: str

    @property
    def name(self) -> str:
        domains = (p.parent.name if p.name == "images" else p.name for p in (self.source, self.target))
        return "-".join((self.data, *domains, self.condition, self.recipe))


class Images(NamedTuple):
    """The images of one domain: paths, and the names of their classes."""

    paths: np.ndarray
    labels: np.ndarray

    @classmethod
    def scan(cls, folder: Path) -> "Images":
        domain = scan_labelled(folder, None)
        paths = [str(domain.root / path) for path in domain.paths]
        return cls(np.array(paths), np.array([domain.classes[label] for label in domain.labels]))

    def of(self, rows: np.ndarray) -> "Images":
        return Images(self.paths[rows], self.labels[rows])

    def each(self, count: int, rng: np.random.Generator) -> "Images":
        rows = [rng.permutation(np.flatnonzero(self.labels == k))[:count] for k in np.unique(self.labels)]
        return self.of(np.sort(np.concatenate(rows)))


def spoil(task: Task, flags: list[str], out: Path) -> tuple[Images, Images, list[str], bool]:
    """Source, target, more flags, and whether the target's labels are among the source's."""
    rng = np.random.default_rng(zlib.crc32(f"{task.source} {task.target} {task.condition}".encode()))
    source, target = Images.scan(task.source), Images.scan(task.target)
    classes = np.unique(source.labels)
    match task.condition:
        case "small5" | "small20":
            count = int(task.condition.removeprefix("small"))
            return source.each(count, rng), target.each(count, rng), [], True
        case "shuffled":
            return Images(source.paths, rng.permutation(source.labels)), target, [], True
        case "noise":
            return source, noise(out), [], False
        case "other":
            half = rng.permutation(classes)[: (len(classes) + 1) // 2]
            known = np.isin(target.labels, half)
            return source.of(np.isin(source.labels, half)), target.of(~known), [], False
        case "few":
            some = rng.permutation(classes)[: max(2, len(classes) // 6)]
            return source, target.of(np.isin(target.labels, some)), [], True
        case "imbalanced":
            rows = []
            for rank, k in enumerate(rng.permutation(classes)):
                members = rng.permutation(np.flatnonzero(target.labels == k))
                rows.append(members[: max(1, round(len(members) * 10 ** (-rank / (len(classes) - 1))))])
            return source, target.of(np.sort(np.concatenate(rows))), [], True
        case "rate":
            return source, target, ["--lr", str(100 * usual_rate(task, flags))], True
    return source, target, [], True


def usual_rate(task: Task, flags: list[str]) -> float:
    named = flags[flags.index("--recipe") + 1] if "--recipe" in flags else None
    layers = [read_recipe("best")] if task.recipe in ("best", "quick") else []
    return float(make_config(*layers, read_recipe(named) if named else {}).lr)


def noise(out: Path) -> Images:
    folder = out / "noise"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{n:03}.png" for n in range(NOISE)]
    for n, path in enumerate(paths):
        if not path.exists():
            side = 2 ** (3 + n % 6)  # from a few blots to grains
            pixels = np.random.default_rng(n).integers(0, 256, (side, side, 3), dtype=np.uint8)
            beside = path.with_suffix(f".{os.getpid()}")
            Image.fromarray(pixels).resize((256, 256)).save(beside, "png")
            beside.replace(path)
    return Images(np.array([str(p) for p in paths]), np.array(["?"] * NOISE))


def run(task: Task, flags: list[str], out: Path) -> None:
    place, line = out / task.name, out / f"{task.name}.json"
    if line.exists():
        return
    source, target, more, scored = spoil(task, flags, out)
    place.parent.mkdir(parents=True, exist_ok=True)
    lists = [out / f"{task.name}.{side}.txt" for side in ("source", "target", "labelled")]
    lists[0].write_text("".join(f"{p}\t{k}\n" for p, k in zip(*source, strict=True)))
    lists[1].write_text("".join(f"{p}\n" for p in target.paths))
    lists[2].write_text("".join(f"{p}\t{k}\n" for p, k in zip(*target, strict=True)))
    short = SHORT if task.condition.startswith("small") and task.recipe not in ("instant", "best", "quick") else []
    words = ["adapt", str(lists[0]), str(lists[1]), "--out", str(place), "--no-report", "--quiet", "--force"]
    started = time.monotonic()
    with open(out / f"{task.name}.log", "w", buffering=1) as log, redirect_stderr(log), redirect_stdout(log):
        code = call([*words, *flags, *RECIPES[task.recipe], *short, *more])
    if code not in (0, VERDICT_AGAINST):
        print(task.name, "failed", code, flush=True)
        return
    outcome = RunRecord(place).outcome
    found: dict[str, Any] = task._asdict() | {"verdict": outcome.verdict.kind}
    found |= {"source": str(task.source), "target": str(task.target)}
    if outcome.basis is not None and "adapted" in outcome.basis.support:
        found |= evidence_of(outcome) | {"features": outcome.basis.features}
    found |= {"before": 0.0, "after": 0.0}
    if scored:
        said = io.StringIO()
        with open(os.devnull, "w") as silence, redirect_stderr(silence), redirect_stdout(said):
            call(["eval", str(place), str(lists[2]), "--json"])
        scores = json.loads(said.getvalue())
        history = scores["accuracy_by_epoch"]
        found |= {"before": history[0], "after": history[outcome.adapted_epoch]}
    line.write_text(json.dumps(found))
    told = f"{100 * found['before']:.0f} > {100 * found['after']:.0f}, {found['verdict']}"
    print(f"{task.name}: {told} ({time.monotonic() - started:.0f} s)", flush=True)


def evidence_of(outcome: Outcome) -> dict[str, float]:
    """The numbers that the guard judges an adapted model by."""
    assert outcome.basis is not None, "it has source images"
    measures = {measure.code: measure.value for measure in outcome.verdict.measures}
    row = {**asdict(outcome.basis.support["adapted"]), "start": outcome.basis.support["source"].mean}
    return row | {"kept": measures["source-forgotten"], "learnable": measures["labels-not-learnable"]}


def compared(data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The finished runs of a benchmark with several methods, except those that do not begin with its start."""
    start = json.loads((folder / "bench.json").read_text())["recipe"]
    for run in sorted(folder.glob("*/*/seed-*")):
        record, (method, task, seed) = RunRecord(run), run.parts[-3:]
        if record.evaluation is None or record.config.recipe != start:
            continue
        outcome, measured = record.outcome, record.evaluation
        assert outcome.basis is not None, "it has source images"
        row: dict[str, Any] = {"data": data, "condition": COMPARED}
        row |= {"recipe": f"{method}, {start} start", "task": f"{task}-{seed}"}
        row |= {"before": measured.epochs[0].accuracy, "after": measured.epochs[outcome.adapted_epoch].accuracy}
        row |= evidence_of(outcome) | {"features": "pretrained"}
        row |= {"stayed": outcome.basis.stayed["adapted"], "calibration": measured.calibration_error}
        verdict = "unknown" if not passes(row) else "better"
        broken = row["mean"] < guard.CHANCE or row["start"] - row["mean"] > guard.FELL_FAR
        yield row | {"verdict": "harm" if broken else verdict}


def passes(row: dict[str, Any], limit: float = guard.SUPPORTED, fell: float = guard.FELL) -> bool:
    """Whether the guard has nothing against an adapted model, by these limits."""
    keeps = row["features"] != "pretrained" or row["start"] - row["mean"] <= fell
    return keeps and row["kept"] >= guard.FORGOTTEN and score(row) > limit


def score(row: dict[str, Any]) -> float:
    supported: float = row["first"] - guard.SHIFT_COUNTS * row["shift"]
    return supported


def tables(every: list[dict[str, Any]]) -> None:
    rows = [row for row in every if row["condition"] != COMPARED]
    if rows:
        fitted_tables(rows)
    if len(rows) < len(every):
        against = [row for row in every if row["condition"] == COMPARED]
        # later ones have their calibration; on the first, the limit on fallen support was found
        first, later = ([row for row in against if ("calibration" in row) is new] for new in (False, True))
        known = {row["recipe"] for row in rows} | {"cotraining", "cdtrans"}  # 'best' and 'authors'
        pretrained = [row for row in every if row.get("features") == "pretrained"]
        if first:
            compared_table("All methods compared by `cdtrans bench`, first runs", first)
            new = [row for row in first if row["recipe"].partition(",")[0] not in known]
            compared_table("Those of methods without a run above", new)
            change_of_support(pretrained, first)
        if later:
            for data in sorted({row["data"] for row in later}):
                of_data = [row for row in later if row["data"] == data]
                compared_table(f"Later runs, {data}", of_data)
                calibration_of(of_data)
            compared_table("Later runs", later)
            change_of_support(pretrained, later)
            calibration_of(later)


def calibration_of(rows: list[dict[str, Any]]) -> None:
    some = {
        "all": rows,
        "accuracy rose": [row for row in rows if row["after"] > row["before"]],
        "better": [row for row in rows if row["verdict"] == "better"],
    }
    means = (f"{name} {np.mean([row['calibration'] for row in r]):.3f} ({len(r)})" for name, r in some.items() if r)
    print(f"Expected calibration error: {', '.join(means)}")


def change_of_support(rows: list[dict[str, Any]], against: list[dict[str, Any]]) -> None:
    """How well it tells the compared runs that rose from those that lost 3 points, and its extremes in all runs."""
    rose = [row for row in against if row["after"] > row["before"]]
    fell = [row for row in against if row["after"] <= row["before"] - 0.03]
    for name, number in {
        "change of support": lambda row: row["mean"] - row["start"],
        "support": lambda row: row["mean"],
    }.items():
        above = [(number(a) > number(b)) + 0.5 * (number(a) == number(b)) for a in rose for b in fell]
        print(f"\n{name}: area under the curve {np.mean(above):.3f} ({len(rose)} rose, {len(fell)} lost 3 points)")
    without = sum(passes(row, fell=1.0) for row in fell)
    print(f"Without the limit on it, {without} of the {len(fell)} would be better.")
    up = [row["start"] - row["mean"] for row in rows if row["after"] > row["before"]]
    far = [100 * (row["after"] - row["before"]) for row in rows if row["start"] - row["mean"] > guard.FELL_FAR]
    print(f"It fell by {max(up):.2f} at most in {len(up)} runs that rose, and far in {len(far)}", end="")
    print(f", which changed by {max(far):.0f} to {min(far):.0f} points." if far else ".")


def small_data(rows: list[dict[str, Any]]) -> None:
    print("\nFew images a class:")
    print("| data | condition | recipe | runs | source only | adapted |\n|---|---|---|---|---|---|")
    some = [row for row in rows if row["condition"].startswith("small") and row["recipe"] in ("best", "instant")]
    for group in sorted({(row["data"], row["condition"], row["recipe"]) for row in some}):
        of_group = [row for row in some if (row["data"], row["condition"], row["recipe"]) == group]
        means = [f"{100 * np.mean([row[when] for row in of_group]):.1f}" for when in ("before", "after")]
        print(f"| {' | '.join([*group, str(len(of_group)), *means])} |")


def compared_table(title: str, rows: list[dict[str, Any]]) -> None:
    """By the change of accuracy, with the guard's own limits."""
    print(f"\n{title}:")
    print("| accuracy | runs | better | cannot tell | harm |")
    print("|---|---|---|---|---|")
    bounds = {"rose": (0.0, 1.0), "fell by less than 3 points": (-0.03, 0.0), "fell by 3 to 10": (-0.1, -0.03)}
    bounds |= {"fell by 10 to 20": (-0.2, -0.1), "fell by more": (-1.0, -0.2), "all": (-1.0, 1.0)}
    for name, (low, high) in bounds.items():
        some = [row for row in rows if low < row["after"] - row["before"] <= high]
        verdicts = [row["verdict"] for row in some]
        cells = [len(some), *(verdicts.count(verdict) for verdict in ("better", "unknown", "harm"))]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


def fitted_tables(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["rose"] = row["after"] > row["before"] and row["condition"] != "shuffled"
        fell = row["after"] <= row["before"] - 0.03
        row["healthy"] = row["condition"] in HEALTHY and row["after"] > row["before"]
        row["broken"] = row["condition"] == "rate" and row["after"] < row["before"] - 0.1
        row["certain"] = row["condition"] == "shuffled" or row["broken"]
        row["spoilt"] = not row["certain"] and (row["condition"] in OTHERS or fell)
    print(
        "| data | recipe | runs | healthy: better | cannot tell | harm | rose: harm | spoilt: better | certain: harm |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    groups = sorted({(row["data"], row["recipe"]) for row in rows})
    for name, some in [(g, [r for r in rows if (r["data"], r["recipe"]) == g]) for g in groups] + [(("all", ""), rows)]:
        verdicts = {
            "healthy": [row["verdict"] for row in some if row["healthy"]],
            "rose": [row["verdict"] for row in some if row["rose"]],
            "spoilt": [row["verdict"] for row in some if row["spoilt"]],
            "certain": [row["verdict"] for row in some if row["certain"]],
        }
        asked = [("healthy", v) for v in ("better", "unknown", "harm")]
        asked += [("rose", "harm"), ("spoilt", "better"), ("certain", "harm")]
        cells = [f"{verdicts[kind].count(verdict)} of {len(verdicts[kind])}" for kind, verdict in asked]
        print(f"| {name[0]} | {name[1]} | {len(some)} | {' | '.join(cells)} |")
    print("\nEach data set by limits that were fitted without it:")
    print("| left out | limit | fell | healthy: better | spoilt: better |")
    print("|---|---|---|---|---|")
    judged = [row for row in rows if "first" in row]
    for data in sorted({row["data"] for row in judged}):
        print(f"| {data} | {' | '.join(left_out(judged, data))} |")
    small_data(rows)
    print("\nSupport that fell far, in pretrained features, by a limit that was fitted without the data set:")
    print("| left out | limit | rose: harm | lost 20 points: harm |")
    print("|---|---|---|---|")
    pretrained = [row for row in judged if row["features"] == "pretrained"]
    for data in sorted({row["data"] for row in pretrained}):
        print(f"| {data} | {' | '.join(lost_support(pretrained, data))} |")


def left_out(rows: list[dict[str, Any]], data: str) -> Iterator[str]:
    """The limits are the highest score of a spoilt run of the other data sets whose support has not fallen, and the
    most that support fell in a healthy one."""
    others, these = ([row for row in rows if (row["data"] == data) is here] for here in (False, True))
    losses = [row["start"] - row["mean"] for row in others if row["healthy"] and row["features"] == "pretrained"]
    fell = max(losses, default=guard.FELL)
    limit = max([score(row) for row in others if row["spoilt"] and passes(row, -1.0, fell)], default=guard.SUPPORTED)
    yield f"{limit:.2f}"
    yield f"{fell:.2f}"
    for kind in ("healthy", "spoilt"):
        some = [passes(row, limit, fell) for row in these if row[kind]]
        yield f"{sum(some)} of {len(some)}"


def lost_support(rows: list[dict[str, Any]], data: str) -> Iterator[str]:
    """The limit is halfway between the runs of the other data sets that rose and those that lost 20 points."""

    def losses(some: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
        fell = [row for row in some if row["after"] <= row["before"] - 0.2 and row["condition"] not in OTHERS]
        rose, broken = ([row["start"] - row["mean"] for row in s] for s in ([r for r in some if r["rose"]], fell))
        return rose, broken

    rose, broken = losses([row for row in rows if row["data"] != data])
    if not rose or not broken:
        return
    limit = (max(rose) + min(broken)) / 2
    yield f"{limit:.2f}"
    for some in losses([row for row in rows if row["data"] == data]):
        yield f"{sum(loss > limit for loss in some)} of {len(some)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", help="NAME=DIR")
    parser.add_argument("--rows", type=Path, help="print the tables of these runs and do nothing else")
    parser.add_argument("--flags", nargs="*", default=[], help="NAME=flags of adapt for it")
    parser.add_argument("--recipes", nargs="+", default=["instant"], choices=RECIPES)
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--tasks", nargs="+", help="SOURCE:TARGET; all of them unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compared", nargs="+", default=[], help="NAME=DIR of a benchmark with several methods")
    arguments = parser.parse_args()
    if arguments.rows is None and arguments.out is None:
        parser.error("--out is missing")
    if arguments.compared:
        named = (pair.split("=", 1) for pair in arguments.compared)
        rows = [row for name, folder in named for row in compared(name, Path(folder))]
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "compared.json").write_text(json.dumps(rows))
        tables(rows)
        return
    if arguments.rows:
        tables(json.loads(arguments.rows.read_text()))
        return
    flags = dict(pair.split("=", 1) for pair in arguments.flags)
    tasks = []
    for name, folder in (pair.split("=", 1) for pair in arguments.data):
        wanted = tasks_of(Path(folder), arguments.tasks)
        for (source, target), condition, recipe in itertools.product(wanted, arguments.conditions, arguments.recipes):
            if recipe != "instant" or condition != "rate":
                there = [place(Path(folder), domain) for domain in (source, target)]
                tasks.append(Task(name, there[0], there[1], condition, recipe))
    arguments.out.mkdir(parents=True, exist_ok=True)
    calls = ((task, shlex.split(flags.get(task.data, "")), arguments.out) for task in tasks)
    in_processes(arguments.jobs, run, calls)
    read = [json.loads(file.read_text()) for file in sorted(arguments.out.glob("*.json"))]
    tables([row for rows in read for row in (rows if isinstance(rows, list) else [rows])])  # a list: of --compared


if __name__ == "__main__":
    main()
