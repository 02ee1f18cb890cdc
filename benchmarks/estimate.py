"""The estimated accuracy against the true one, each data set by numbers that are fitted to the others. docs/results/
estimate.md.

    python benchmarks/estimate.py DATA ... --weights FILE --features DIR --runs NAME=DIR ... --out rows.json
    python benchmarks/estimate.py --rows rows.json [--guard guard.json]

DATA holds one folder of class folders for each domain (or DOMAIN/images): the instant effort on every ordered pair, on
whole domains, on imbalanced targets, and with one domain reduced to some images of each class. --runs takes finished
run folders anywhere below DIR whose backbone stage 1 leaves as it is and whose target images lie in class folders;
nothing is fitted to these. --guard takes the rows of benchmarks/guard.py: its runs on whole data sets that are judged
better. The first of them do not say how many predictions stayed with the source-only model; that is taken as none, and
the others have a table of their own."""

import argparse
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import both_domains, class_count, encoded_domains, feature_parser, thinned
from torch import Tensor
from torch.nn import functional as F

from cdtrans.measure.measured import calibration
from cdtrans.methods.instant import probe_on_both
from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe, label_target
from cdtrans.pairing.pairs import Domains
from cdtrans.record import layout
from cdtrans.record.outcome import Support, calibration_error
from cdtrans.record.probabilities import calibrated, probabilities, temperature
from cdtrans.record.record import RunRecord
from cdtrans.trust import estimate, guard
from cdtrans.trust.support import Evidence

Row = dict[str, Any]
SUPPORT = tuple(spec.name for spec in fields(Support))
REDUCED = [f"{each} {side} images a class" for side in ("source", "target") for each in (5, 10, 20, 40)]
CONDITIONS = ["whole", "imbalanced", *REDUCED]
RUN = "run"  # the condition of a finished run
FORMULAS = {
    "trust.estimate": ("agreement", "steady", "shift", "stayed"),
    "agreement, steady, stayed": ("agreement", "steady", "stayed"),
    "agreement, stayed": ("agreement", "stayed"),
    "support of the source-only model, gain, shift": ("start", "gain", "shift"),
}


def instant_rows(data: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    domains = encoded_domains(data, arguments)
    classes = class_count(domains)
    for (source, target), condition in itertools.product(itertools.permutations(domains, 2), CONDITIONS):
        (x, y, leading), (z, truth, _) = domains[source], domains[target]
        if condition == "imbalanced":
            rows = thinned(truth, 10, 0)
            z, truth = z[rows], truth[rows]
        elif condition != "whole":
            rng = np.random.default_rng(zlib.crc32(f"{source} {target} {condition}".encode()))
            each, side = condition.split()[:2]
            rows = some_of_each(y if side == "source" else truth, int(each), rng)
            x, y, z, truth = (x[rows], y[rows], z, truth) if side == "source" else (x, y, z[rows], truth[rows])
        both, of_source = both_domains(x, y, z, classes), Statistics.of(x)
        start = fit_probe(of_source.standardised(x), F.one_hot(y, classes).to(x), LOOSE)
        labels = label_target(both, classes=classes, leading=leading).probabilities
        probe, _, of_target = probe_on_both(both, labels)
        logits = {
            "source": of_source.standardised(z) @ start.weight + start.bias,
            "adapted": of_target.standardised(z) @ probe.weight + probe.bias,
        }
        task = {"data": data.name, "task": f"{source}>{target}", "condition": condition}
        yield from (task | row for row in measured(both, classes, leading, logits, truth))
        print(data.name, source, target, condition, flush=True)


def some_of_each(labels: Tensor, each: int, rng: np.random.Generator) -> Tensor:
    rows = [rng.permutation((labels == k).nonzero().squeeze(1).numpy())[:each] for k in labels.unique()]
    return torch.from_numpy(np.sort(np.concatenate(rows)))


def run_rows(name: str, folder: Path) -> Iterator[Row]:
    """The rows of runs that keep the features of all images."""
    for file in sorted(folder.rglob(layout.RESULT.name)):
        run, record = file.parent, RunRecord(file.parent)
        classes = record.classes
        images = [Path(path).parent.name for path in record.images.paths["target"]]
        if not set(images) <= set(classes) or record.logits.adapted is None:
            continue  # a target with other classes, or a run without stage 2
        x, z = (torch.from_numpy(x).float() for x in (record.views.before_source, record.views.before_target))
        y = torch.from_numpy(record.views.source_labels).long()
        logits = {"source": torch.from_numpy(record.logits.source), "adapted": torch.from_numpy(record.logits.adapted)}
        truth = torch.tensor([classes.index(label) for label in images])
        both = both_domains(x, y, z, len(classes))
        task = {"data": name, "task": str(run.relative_to(folder)), "condition": RUN}
        yield from (task | row for row in measured(both, len(classes), x.shape[1] // 2, logits, truth))


def measured(both: Domains, classes: int, leading: int, logits: dict[str, Tensor], truth: Tensor) -> Iterator[Row]:
    """A row for each model."""
    evidence = Evidence.of(both, classes, leading, pretrained=True)
    predicted = {model: x.argmax(dim=1) for model, x in logits.items()}
    found = {model: evidence.support(labels) for model, labels in predicted.items()}
    task = {"agreement": float(evidence.agreement), "steady": float(evidence.steady), "start": found["source"].mean}
    task["measurable"] = estimate.measurable(both.source_labels, len(truth))
    for model, support in found.items():
        right = predicted[model] == truth
        stayed = evidence.stayed(predicted[model], predicted["source"])
        middle = estimate.expected_accuracy(support, stayed, evidence)
        scaled = calibrated(logits[model].numpy(), temperature(logits[model].numpy(), middle))
        error = calibration_error(calibration(probabilities(scaled).max(axis=1), right.numpy()))
        row = {"model": model, "accuracy": float(right.double().mean()), "calibration": error, "stayed": stayed}
        yield row | task | asdict(support)


def better(row: Row) -> bool:
    """Whether the support allows a range: for the adapted model, if it has not fallen either."""
    fell = row["start"] - row["mean"] if row["model"] == "adapted" else 0.0
    support = Support(*(row[name] for name in SUPPORT))
    return guard.supported(support) and fell <= guard.FELL


def design(rows: list[Row], names: tuple[str, ...]) -> np.ndarray:
    columns = {
        "gain": np.array([row["mean"] - row["start"] for row in rows]),
        "stayed": np.array([row["stayed"] for row in rows]),
    }
    chosen = [columns[name] if name in columns else logit([row[name] for row in rows]) for name in names]
    return np.stack([np.ones(len(rows)), *chosen], axis=1)


def logit(shares: list[float]) -> np.ndarray:
    clipped = np.clip(np.array(shares, dtype=float), 0.02, 0.985)
    return np.asarray(np.log(clipped / (1 - clipped)))


def fitted(rows: list[Row], names: tuple[str, ...]) -> np.ndarray:
    """To both models of every task; what is gained by adaptation is that of the adapted ones alone."""
    some = [row for row in rows if row["measurable"] and ("gain" not in names or row["model"] == "adapted")]
    numbers, *_ = np.linalg.lstsq(design(some, names), logit([row["accuracy"] for row in some]), rcond=None)
    return np.asarray(numbers)


def told(rows: list[Row], names: tuple[str, ...], numbers: np.ndarray) -> list[str]:
    """Cells: runs, mean error, bias and width in points, and how many ranges hold the truth."""
    middle = 1 / (1 + np.exp(-design(rows, names) @ numbers))
    error = middle - np.array([row["accuracy"] for row in rows])
    width = (middle + estimate.HALF_WIDTH).clip(max=1) - (middle - estimate.HALF_WIDTH).clip(0)
    points = [f"{100 * np.abs(error).mean():.1f}", f"{100 * error.mean():+.1f}", f"{100 * width.mean():.1f}"]
    return [str(len(rows)), *points, f"{(np.abs(error) <= estimate.HALF_WIDTH).sum()} of {len(rows)}"]


def tables(rows: list[Row]) -> None:
    lab, data = [row for row in rows if row["condition"] != RUN], sorted({row["data"] for row in rows})
    print("Numbers of trust.estimate, fitted to all:", fitted(lab, FORMULAS["trust.estimate"]).round(2))
    print("\n| formula | left out | model | ranges | mean error | too high by | width | held |\n|" + "---|" * 8)
    for (formula, names), left_out, model in itertools.product(FORMULAS.items(), data, ("adapted", "source")):
        of_data = [row for row in rows if (row["data"], row["model"]) == (left_out, model)]
        test = [row for row in of_data if row["measurable"] and better(row)]
        if test:
            numbers = fitted([row for row in lab if row["data"] != left_out], names)
            print(f"| {formula} | {left_out} | {model} | {' | '.join(told(test, names, numbers))} |")
    print("\nThe adapted model, few images a class, a range wherever the support allows one:")
    print("| left out | images | ranges | mean error | too high by | width | held |\n|" + "---|" * 7)
    for left_out, condition in itertools.product(data, REDUCED):
        wanted = (left_out, condition, "adapted")
        of_data = [row for row in lab if (row["data"], row["condition"], row["model"]) == wanted]
        if test := [row for row in of_data if better(row)]:
            names = FORMULAS["trust.estimate"]
            numbers = fitted([row for row in lab if row["data"] != left_out], names)
            print(f"| {left_out} | {condition} | {' | '.join(told(test, names, numbers))} |")
    print("\nCalibration error of the adapted models, with the numbers of trust.estimate:")
    for name in data:
        of_data = [row for row in rows if (row["data"], row["model"], row["measurable"]) == (name, "adapted", True)]
        some = {"all": of_data, "better": [row for row in of_data if better(row)]}
        means = (f"{kind} {np.mean([row['calibration'] for row in r]):.3f} ({len(r)} runs)" for kind, r in some.items())
        print(f"{name}: {', '.join(means)}")


def recorded(rows: list[Row], runs: list[Row]) -> None:
    """The runs of benchmarks/guard.py, by the numbers of the other data sets, and the agreement of each task."""
    names, lab = FORMULAS["trust.estimate"], [row for row in rows if row["condition"] != RUN]
    whole = {
        (row["data"], row["task"]): row for row in lab if row["condition"] == "whole" and row["model"] == "adapted"
    }
    short = {(data, "-".join(part[0].upper() for part in task.split(">"))): (data, task) for data, task in whole}
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        task = (run["data"], run["task"].partition("-seed-")[0])
        task = short.get(task, (task[0], task[1].replace("-", ">")))
        if run["condition"] in ("healthy", "compared") and run["verdict"] == "better" and task in whole:
            row = whole[task] | {"shift": run["shift"], "accuracy": run["after"]}
            row["stayed"] = run.get("stayed", 0.0)
            groups.setdefault((run["data"], run["recipe"]), []).append(row)
    print("\n| left out | recipe | ranges | mean error | too high by | width | held |\n|" + "---|" * 7)
    every = {data: [r for (d, _), some in groups.items() if d == data for r in some] for data, _ in groups}
    for (data, recipe), some in [*sorted(groups.items()), *(((data, "all"), some) for data, some in every.items())]:
        numbers = fitted([row for row in lab if row["data"] != data], names)
        print(f"| {data} | {recipe} | {' | '.join(told(some, names, numbers))} |")


def main() -> None:
    parser = feature_parser(__doc__, "*")
    parser.add_argument("--rows", type=Path, help="print the tables of these rows and do nothing else")
    parser.add_argument("--guard", type=Path, help="with --rows: rows of benchmarks/guard.py")
    parser.add_argument("--runs", nargs="*", default=[], help="NAME=DIR")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.rows:
        rows = json.loads(arguments.rows.read_text())
        tables(rows)
        if arguments.guard:
            runs = json.loads(arguments.guard.read_text())
            for later in (False, True):
                recorded(rows, [run for run in runs if ("stayed" in run) is later])
        return
    rows = [row for data in arguments.data for row in instant_rows(data, arguments)]
    for name, folder in (pair.split("=", 1) for pair in arguments.runs):
        rows += run_rows(name, Path(folder))
    if arguments.out:
        short = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, short)) + "\n]\n")
    tables(rows)


if __name__ == "__main__":
    main()
