"""Runs that are healthy and runs that are spoilt: what the guard says of them, and what is true. docs/results/guard.md.

    python benchmarks/guard.py NAME=DIR ... --flags NAME="--backbone ... --weights FILE" --recipes instant best authors
        --out DIR --jobs 8

Each DIR holds one folder of class folders for each domain (or DOMAIN/images); every ordered pair of domains is a task.
A second call runs what is missing and prints the tables of everything that is there. Limits are tested on the data set
that they were not fitted to: those of the guard and the numbers of the estimate are fitted anew without it."""

import argparse
import io
import itertools
import json
import multiprocessing
import os
import shlex
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from recipe import call, place

from cdtrans.config import BEST, make_config, read_preset
from cdtrans.data.domains import scan_labelled
from cdtrans.errors import HARM
from cdtrans.trust import estimate, guard

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
CERTAIN = ("shuffled", "rate")  # must be harm
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
    """Of one domain: paths, and the names of their classes."""

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
    preset = flags[flags.index("--preset") + 1] if "--preset" in flags else None
    layers = [BEST] if task.recipe in ("best", "quick") else []
    return float(make_config(*layers, read_preset(preset) if preset else {}).lr)


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
    if code not in (0, HARM):
        print(task.name, "failed", code, flush=True)
        return
    result = json.loads((place / "result.json").read_text())
    found: dict[str, Any] = task._asdict() | {"verdict": result["guard"]["verdict"], "estimate": result["estimate"]}
    found |= {"source": str(task.source), "target": str(task.target), **result["support"].get("adapted", {})}
    found |= {"before": 0.0, "after": 0.0, "calibration": None}
    if scored:
        said = io.StringIO()
        with open(os.devnull, "w") as silence, redirect_stderr(silence), redirect_stdout(said):
            call(["eval", str(place), str(lists[2]), "--json"])
        scores = json.loads(said.getvalue())
        history = scores["accuracy_by_epoch"]
        found |= {"before": history[0], "after": history[result["judged_epoch"]]}
        found |= {"calibration": scores["calibration"]["error"]}
    line.write_text(json.dumps(found))
    told = f"{100 * found['before']:.0f} > {100 * found['after']:.0f}, {found['verdict']}"
    print(f"{task.name}: {told} ({time.monotonic() - started:.0f} s)", flush=True)


def tables(out: Path) -> None:
    rows = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    judged = [row for row in rows if "first" in row]
    for row in rows:
        row["healthy"] = row["condition"] in HEALTHY and row["after"] > row["before"]
        row["spoilt"] = row["condition"] in ("noise", "other", "few") or row["after"] <= row["before"] - 0.03
    print("| data | recipe | runs | healthy: better | cannot tell | harm | spoilt: better | certain: harm |")
    print("|---|---|---|---|---|---|---|---|")
    for data, recipe in sorted({(row["data"], row["recipe"]) for row in rows}):
        some = [row for row in rows if (row["data"], row["recipe"]) == (data, recipe)]
        good = [row["verdict"] for row in some if row["healthy"]]
        bad = [row["verdict"] for row in some if row["spoilt"] and row["condition"] not in CERTAIN]
        sure = [row["verdict"] for row in some if row["condition"] in CERTAIN]
        cells = [len(some), *(f"{good.count(v)} of {len(good)}" for v in ("better", "unknown", "harm"))]
        cells += [f"{bad.count('better')} of {len(bad)}", f"{sure.count('harm')} of {len(sure)}"]
        print(f"| {data} | {recipe} | {' | '.join(map(str, cells))} |")
    print("\nEach data set by limits and numbers that were fitted without it:")
    print("| left out | healthy: better | spoilt: better | mean error | width | held | ECE |")
    print("|---|---|---|---|---|---|---|")
    for data in sorted({row["data"] for row in judged}):
        print(f"| {data} | {' | '.join(left_out(judged, data))} |")


def left_out(rows: list[dict[str, Any]], data: str) -> Iterator[str]:
    def score(row: dict[str, Any]) -> float:
        return float(row["first"] - guard.SHIFT_COUNTS * row["shift"])

    others, these = ([row for row in rows if (row["data"] == data) is here] for here in (False, True))
    spoilt = [score(row) for row in others if row["spoilt"] and row["condition"] not in CERTAIN]
    limit = float(np.quantile(spoilt, 0.97)) if spoilt else guard.SUPPORTED
    for kind in ("healthy", "spoilt"):
        some = [score(row) > limit for row in these if row[kind] and row["condition"] not in CERTAIN]
        yield f"{sum(some)} of {len(some)}"
    train = [row for row in others if row["condition"] in HEALTHY]
    test = [row for row in these if row["condition"] in HEALTHY and score(row) > limit]
    if not train or not test:
        return
    fitted, *_ = np.linalg.lstsq(design(train), logit([row["after"] for row in train]), rcond=None)
    errors = 1 / (1 + np.exp(-design(test) @ fitted)) - np.array([row["after"] for row in test])
    middle = np.array([row["after"] for row in test]) + errors
    low, high = (middle - estimate.HALF_WIDTH).clip(0), (middle + estimate.HALF_WIDTH).clip(max=1)
    yield f"{np.abs(errors).mean():.3f}"
    yield f"{(high - low).mean():.3f}"
    yield f"{(np.abs(errors) <= estimate.HALF_WIDTH).mean():.0%} of {len(test)}"
    yield f"{np.mean([row['calibration'] for row in these if row['condition'] in HEALTHY]):.3f}"


def design(rows: list[dict[str, Any]]) -> np.ndarray:
    support, shift = (logit([row[name] for row in rows]) for name in ("mean", "shift"))
    return np.stack([np.ones(len(rows)), support, shift], axis=1)


def logit(shares: list[float]) -> np.ndarray:
    clipped = np.clip(np.array(shares, dtype=float), 0.02, 0.985)
    return np.asarray(np.log(clipped / (1 - clipped)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="NAME=DIR")
    parser.add_argument("--flags", nargs="*", default=[], help="NAME=flags of adapt for it")
    parser.add_argument("--recipes", nargs="+", default=["instant"], choices=RECIPES)
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--tasks", nargs="+", help="SOURCE:TARGET; all of them unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    flags = dict(pair.split("=", 1) for pair in arguments.flags)
    tasks = []
    for name, folder in (pair.split("=", 1) for pair in arguments.data):
        domains = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
        wanted = [tuple(t.split(":")) for t in arguments.tasks or ()] or list(itertools.permutations(domains, 2))
        for (source, target), condition, recipe in itertools.product(wanted, arguments.conditions, arguments.recipes):
            if recipe != "instant" or condition != "rate":
                there = [place(Path(folder), domain) for domain in (source, target)]
                tasks.append(Task(name, there[0], there[1], condition, recipe))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, task, shlex.split(flags.get(task.data, "")), arguments.out) for task in tasks]
        for future in futures:
            future.result()
    tables(arguments.out)


if __name__ == "__main__":
    main()
