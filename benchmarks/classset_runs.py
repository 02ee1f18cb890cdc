"""Whole runs on targets with other classes than the source: docs/results/classsets.md.

    python benchmarks/classset_runs.py DATA --weights FILE --out RUNS --kind partial [--tasks A:B] [--effort full]
        [--say all noticed told] [--jobs 12]

For every task: a run to which nothing is said of the classes (`noticed`), one that takes all of them for granted
(`all`) and one that is told them (`told`). Printed: accuracy of the source-only, the adapted and the chosen model on
all target images, an image of no class counting as wrong; the verdict and the range; AUROC of `no_class`. With
`--absent`, for `partial`: accuracy on images of the target's domain whose classes the run takes for absent, and on the
target, with `--all-classes`."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from classsets import splits_of
from sklearn.metrics import roc_auc_score
from tasks import call, in_processes, place, run_parser, tasks_of

from cdtrans.inputs.scan import scan_labelled
from cdtrans.record.record import RunRecord
from cdtrans.serving.classifier import load

SAY = ("noticed", "all", "told")


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--kind", choices=("partial", "open", "open-partial", "closed"), default="partial")
    parser.add_argument("--effort", default="full")
    parser.add_argument("--say", nargs="+", choices=SAY, default=SAY)
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--absent", action="store_true")
    a = parser.parse_args()
    calls: list[tuple[Any, ...]] = [
        (a.data, *task, a.kind, a.split, a.effort, say, a.out, str(a.weights), str(a.seed), a.absent)
        for task in tasks_of(a.data, a.tasks)
        for say in a.say
    ]
    in_processes(a.jobs, one_run, calls)


def one_run(
    data: Path,
    source: str,
    target: str,
    kind: str,
    split: int,
    effort: str,
    say: str,
    out: Path,
    weights: str,
    seed: str,
    absent: bool,
) -> None:
    names = scan_labelled(place(data, source), None).classes
    shared, own, others = ([names[k] for k in part] for part in splits_of(len(names), kind)[split])
    run = out / f"{data.name}-{source}-{target}-{kind}-{split}-{effort}-{say}-{seed}"
    lists: list[Path] = []
    for domain, kept in ((source, shared + own), (target, shared + others)):
        scanned = scan_labelled(place(data, domain), None)
        rows = [(path, scanned.classes[k]) for path, k in zip(scanned.paths, scanned.labels, strict=True)]
        file = out / f"{run.name}-{len(lists)}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{place(data, domain) / path} {name}" if not lists else str(place(data, domain) / path)
            for path, name in rows
            if name in kept
        ]
        file.write_text("\n".join(lines) + "\n")
        lists.append(file)
    started = time.monotonic()
    said = {"noticed": "", "all": "all", "told": ",".join(shared)}[say]
    told: list[str] = ["--target-classes", said] if said else []
    words: list[str] = ["--weights", weights, "--backbone", "deit_tiny_patch16_224", "--effort", effort, "--seed", seed]
    code = call(["adapt", *map(str, lists), "--out", str(run), "--quiet", "--no-report", *words, *told])
    row = {"run": run.name, "code": code, "seconds": round(time.monotonic() - started, 1)} | scores(run, shared)
    if absent:
        scanned = scan_labelled(place(data, target), None)
        images = [
            (place(data, target) / p, scanned.classes[k]) for p, k in zip(scanned.paths, scanned.labels, strict=True)
        ]
        for part, kept in (("absent", own), ("target", shared)):
            row[f"{part}, all classes"] = all_classes(run, [image for image in images if image[1] in kept])
    print(json.dumps(row), flush=True)


def all_classes(run: Path, images: list[tuple[Path, str]]) -> dict[str, float]:
    """Accuracy on these images, with and without `--all-classes`."""
    paths, truth = zip(*images, strict=True)
    models = {
        "source, all classes": load(run, model="source", all_classes=True),
        "adapted": load(run, model="adapted"),
        "adapted, all classes": load(run, model="adapted", all_classes=True),
    }
    right = {n: [p.label == name for p, name in zip(m.predict(paths), truth, strict=True)] for n, m in models.items()}
    return {name: round(100 * float(np.mean(each)), 1) for name, each in right.items()}


def scores(run: Path, shared: list[str]) -> dict[str, Any]:
    record = RunRecord(run)
    if not record.finished:
        return {}
    outcome, classes = record.outcome, record.classes
    truth = [Path(path).parent.name for path in record.images.paths["target"]]
    known = np.array([name in shared for name in truth])
    models = {"source": record.logits.source, "adapted": record.logits.adapted}
    predicted = {n: [classes[k] for k in x.argmax(axis=1)] for n, x in models.items() if x is not None}
    right = {n: np.array([a == b and c for a, b, c in zip(p, truth, known, strict=True)]) for n, p in predicted.items()}
    found: dict[str, Any] = {n: round(100 * float(x.mean()), 1) for n, x in right.items()}
    found["chosen"] = found[outcome.choice.model]
    estimate = outcome.estimate
    rows: dict[str, Any] = {
        "absent": len(outcome.class_set.absent),
        "by": outcome.class_set.by,
        "verdict": outcome.verdict.kind,
    }
    rows["range"] = None if estimate is None else [round(100 * estimate.low, 1), round(100 * estimate.high, 1)]
    if not known.all():
        rows["known"] = {n: round(100 * float(x[known].mean()), 1) for n, x in right.items()}
        rows["auroc"] = round(100 * float(roc_auc_score(~known, record.views.no_class[: len(known)])), 1)
    return found | rows


if __name__ == "__main__":
    main()
