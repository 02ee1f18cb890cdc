"""Width and coverage of 95 % intervals of accuracy from few labels, by simulation on finished runs whose target labels
are known: the table of docs/results/labels.md.

usage: python benchmarks/intervals.py [--repeat 200] [--truth FOLDER] [--source-only] RUN ...
A RUN is a finished run folder whose target has class folders, or a file SOURCE-TARGET-SEED.trust.npz with the logits of
the target, `before` (the source-only model) and `after`, whose labels are FOLDER/truth-TARGET.npy. A cell is the width
as a share of Wilson's on the same labels, the coverage, and the coverage of the run with the lowest."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from cdtrans.measure.ask import draw_random
from cdtrans.measure.intervals import accuracy_interval, wilson as wilson_interval
from cdtrans.measure.matching import read_target
from cdtrans.record.outcome import Interval
from cdtrans.record.record import RunRecord

LABELS = (10, 20, 30, 60, 100)


class Case(NamedTuple):
    """A run whose target labels are known."""

    name: str
    confidence: np.ndarray  # [N]
    correct: np.ndarray  # [N] bool


Method = Callable[[Case, np.ndarray], Interval]


def read(place: Path, truth: Path | None, logits_of: str) -> Case:
    if place.is_dir():
        record = RunRecord(place)
        target = read_target(record)
        folders = [path.split("/")[0] for path in target.paths]
        predicted = [target.classes[k] for k in target.predicted[record.outcome.choice.model]]
        return Case(place.name, target.confidence, np.array(predicted) == np.array(folders))
    assert truth is not None, "npz files need --truth"
    with np.load(place) as arrays:
        logits = arrays[logits_of].astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    confidence = p.max(axis=1).astype(np.float16).astype(np.float64)  # as in views.npz
    labels = np.load(truth / f"truth-{place.name.split('-')[1]}.npy")
    return Case("/".join(place.parts[-3:]), confidence, logits.argmax(axis=1) == labels)


def wilson(case: Case, drawn: np.ndarray) -> Interval:
    return wilson_interval(int(case.correct[drawn].sum()), len(drawn))


def prediction_powered(case: Case, drawn: np.ndarray, *, tuned: bool, fitted: bool = False) -> Interval:
    """PPI (Angelopoulos et al., 2023) and, tuned, PPI++: the mean of f over all images, corrected by the labelled ones.
    With the finite population's variance and Student's quantile. f is the confidence, or, fitted, a logistic function
    of it, cross-fitted in five folds on the labels."""
    y, n, images = case.correct[drawn].astype(float), len(drawn), len(case.correct)
    f_all, f = case.confidence, case.confidence[drawn]
    if fitted:
        f_all, f = cross_fitted(case.confidence, drawn, y)
    spread = f.var(ddof=1)
    weight = float(np.cov(y, f)[0, 1] / spread) if tuned and spread > 0 else float(not tuned)
    estimate = float(weight * f_all.mean() + (y - weight * f).mean())
    half = student.ppf(0.975, n - 1) * np.sqrt((y - weight * f).var(ddof=1) / n * (1 - n / images))
    return Interval(estimate - half, estimate + half)


def cross_fitted(confidence: np.ndarray, drawn: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f of all images, the mean over the folds, and of the labelled ones, each by the fold it was not in."""
    logit = np.log(np.clip(confidence, 1e-3, 0.9995) / (1 - np.clip(confidence, 1e-3, 0.9995)))
    x = np.stack([np.ones_like(logit), (logit - logit.mean()) / max(logit.std(), 1e-9)], axis=1)
    everything, own = np.zeros(len(x)), np.zeros(len(drawn))
    for fold in range(5):
        left = np.arange(len(drawn)) % 5 == fold
        w = np.zeros(2)
        for _ in range(15):  # Newton's method; a weak prior keeps separable labels finite
            p = 1 / (1 + np.exp(-x[drawn[~left]] @ w))
            hessian = (x[drawn[~left]] * (p * (1 - p))[:, None]).T @ x[drawn[~left]] + np.eye(2) * 0.5
            w += np.linalg.solve(hessian, x[drawn[~left]].T @ (y[~left] - p) - 0.5 * w)
        f = 1 / (1 + np.exp(-x @ w))
        everything += f / 5
        own[left] = f[drawn[left]]
    return everything, own


def ours(case: Case, drawn: np.ndarray) -> Interval:
    return accuracy_interval(case.confidence, drawn, case.correct[drawn])[1]


METHODS: dict[str, tuple[Method, bool]] = {  # whether the labels are drawn in strata; else uniformly
    "Wilson": (wilson, False),
    "PPI": (lambda case, drawn: prediction_powered(case, drawn, tuned=False), False),
    "PPI++": (lambda case, drawn: prediction_powered(case, drawn, tuned=True), False),
    "PPI++, confidence fitted to the labels": (
        lambda case, drawn: prediction_powered(case, drawn, tuned=True, fitted=True),
        False,
    ),
    "strata, labels drawn uniformly": (ours, False),
    "**strata, labels drawn in strata**": (ours, True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--source-only", action="store_true", help="of npz files")
    parser.add_argument("--repeat", type=int, default=200)
    options = parser.parse_args()
    cases = [read(place, options.truth, "before" if options.source_only else "after") for place in options.runs]
    rng = np.random.default_rng(0)
    print("| interval | " + " | ".join(f"{n} labels" for n in LABELS) + " |\n|---" + "|---" * len(LABELS) + "|")
    for name, (method, stratified) in METHODS.items():
        cells = []
        for n in LABELS:
            found = np.array([simulate(case, method, n, stratified, options.repeat, rng) for case in cases])
            width, base, covered = found.mean(axis=0)
            cells.append(f"{width / base:.2f}, {100 * covered:.1f} %, {100 * found[:, 2].min():.0f} %")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def simulate(
    case: Case, method: Method, n: int, stratified: bool, repeat: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """The mean width, Wilson's on the same labels, and how often the truth is inside."""
    truth, widths, base, covered = case.correct.mean(), 0.0, 0.0, 0
    none = np.array([], dtype=np.int64)
    for _ in range(repeat):
        uniform = rng.choice(len(case.correct), n, replace=False)
        drawn = draw_random(case.confidence, n, none, rng) if stratified else uniform
        interval, reference = method(case, drawn), wilson(case, drawn)
        widths += interval.high - interval.low
        base += reference.high - reference.low
        covered += interval.low - 1e-9 <= truth <= interval.high + 1e-9
    return widths / repeat, base / repeat, covered / repeat


if __name__ == "__main__":
    main()
