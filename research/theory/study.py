"""The simulated settings of the supplement, and the folder of numbers and figures."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdtrans.errors import SettingsError
from cdtrans.record.files import atomic
from cdtrans.runtime.screen import Screen
from research.theory.averaging import (
    DELTA,
    Averaging,
    NearestMean,
    Row,
    Setting,
    SoftmaxMean,
    least_lambda,
    least_neighbours,
    least_setting,
    measure,
)
from research.theory.figures import draw_figures
from research.theory.proof_steps import PAST_ALL_CONDITIONS, VIT_PATCHES, VIT_WIDTH, proof_steps

TRIALS = 20  # enough to distinguish a claim of probability 0.8 or 0.85 from one that is never true
LEAST_WIDTH = 74  # the least d of Theorem 1 for 512 inputs: 8 log(512 / 0.05), rounded up
SHOWN = (
    "theorem",
    "case",
    "before",
    "after",
    "worst",
    "bound",
    "claim true",
    "verdict",
)  # these fit a terminal
COLUMNS = (*SHOWN[:2], "d", "C x m_k", "sigma", "K, lambda", *SHOWN[2:])


class Point(NamedTuple):
    """One setting to simulate: a named case of the table, or a place on a curve of a panel."""

    panel: str  # "cases" for the table
    series: str
    x: float
    setting: Setting
    averaging: Averaging


@dataclass(frozen=True)
class Study:
    """All results: the rows of each panel, and the steps of the proofs that can be checked separately."""

    seed: int
    trials: int
    points: tuple[Point, ...]
    rows: tuple[Row, ...]
    steps: dict[str, list[dict[str, Any]]]

    def panel(self, name: str) -> dict[str, list[tuple[float, Row]]]:
        """The curves of a panel: series -> (x, row) in order."""
        curves: dict[str, list[tuple[float, Row]]] = {}
        for point, row in zip(self.points, self.rows, strict=True):
            if point.panel == name:
                curves.setdefault(point.series, []).append((point.x, row))
        return curves

    def cases(self) -> dict[str, Row]:
        """The rows of the table."""
        return {name: curve[0][1] for name, curve in self.panel("cases").items()}

    def table(self, columns: tuple[str, ...] = COLUMNS) -> list[tuple[str, ...]]:
        """The cases as text; noise in units of sigma."""
        rows = [_cells(name, row) for name, row in self.cases().items()]
        return [tuple(cells[column] for column in columns) for cells in rows]

    def summary(self) -> list[dict[str, int]]:
        """For each theorem, over every setting: where its conditions are met, and what is true there."""
        counts = []
        for theorem in (1, 2):
            rows = [row for row in self.rows if row.averaging.theorem == theorem]
            met = [row for row in rows if not row.unmet]
            claim = sum(row.verdict == "holds" for row in met)
            bound = sum(row.bound_rate >= row.averaging.probability for row in met)
            loose = sum(row.verdict == "loose" for row in rows)
            counts.append(
                {
                    "theorem": theorem,
                    "settings": len(rows),
                    "conditions_met": len(met),
                    "claim_true_there": claim,
                    "bound_true_there": bound,
                    "claim_true_elsewhere": loose,
                }
            )
        return counts

    def findings(self) -> list[str]:
        """The summary in sentences, one for each theorem."""
        return [
            f"Theorem {s['theorem']}: {s['settings']} settings; its conditions are met in {s['conditions_met']}, where "
            f"its claim is true in {s['claim_true_there']} and the proof's bound in {s['bound_true_there']}; elsewhere "
            f"the claim is true in {s['claim_true_elsewhere']} of {s['settings'] - s['conditions_met']}."
            for s in self.summary()
        ]

    def record(self) -> dict[str, Any]:
        """theory.json."""
        panels = dict.fromkeys(point.panel for point in self.points if point.panel != "cases")
        return {
            "seed": self.seed,
            "delta": DELTA,
            "trials": self.trials,
            "summary": self.summary(),
            "cases": {name: row.record() for name, row in self.cases().items()},
            "panels": {
                name: {series: [{"x": x, **row.record()} for x, row in curve] for series, curve in curves.items()}
                for name, curves in ((name, self.panel(name)) for name in panels)
            },
            "proof_steps": self.steps,
        }


def run_study(out: Path, *, seed: int, screen: Screen) -> Study:
    """Simulate, and write theory.json and the figures into `out`."""
    if out.exists() and not out.is_dir():
        raise SettingsError("out-is-a-file", f"'{out}' is a file; --out must name a folder.")
    out.mkdir(parents=True, exist_ok=True)  # before the work: a folder that cannot be made is known at once
    study = simulate((*cases(), *nearest_panels(), *softmax_panels()), seed=seed, trials=TRIALS, screen=screen)
    draw_figures(study, out)
    with atomic(out / "theory.json") as file:
        file.write((json.dumps(study.record(), indent=1) + "\n").encode())
    return study


def simulate(points: tuple[Point, ...], *, seed: int, trials: int, screen: Screen) -> Study:
    """Measure every point; those of one setting share their inputs."""
    by_setting: dict[Setting, list[int]] = {}
    for i, point in enumerate(points):
        by_setting.setdefault(point.setting, []).append(i)
    rows: dict[int, Row] = {}
    with screen.track("simulating", len(points)) as task:
        for setting, indices in by_setting.items():
            averagings = [points[i].averaging for i in indices]
            rows.update(zip(indices, measure(setting, averagings, seed=seed, trials=trials), strict=True))
            task.advance(len(indices))
    return Study(seed, trials, points, tuple(rows[i] for i in range(len(points))), proof_steps(seed))


def _cells(name: str, row: Row) -> dict[str, str]:
    setting, averaging = row.setting, row.averaging
    noise = {"before": row.before, "after": row.after, "worst": row.worst, "bound": averaging.bound(setting)}
    return {
        "theorem": str(averaging.theorem),
        "case": name,
        "d": f"{setting.dimension:,}" if setting.dimension < PAST_ALL_CONDITIONS else f"{setting.dimension:.0e}",
        "C x m_k": f"{setting.clusters} x {setting.members}",
        "sigma": f"{setting.sigma:g}",
        "K, lambda": f"{averaging.parameter:.3g}",
        **{column: f"{value / setting.sigma:.3f}" for column, value in noise.items()},
        "claim true": f"{row.claim_rate:.0%}",
        "verdict": row.verdict + (f" (not {', '.join(row.unmet)})" if row.unmet else ""),
    }


def cases() -> Iterator[Point]:
    """The settings of the table, one for each thing that there is to say."""

    def case(name: str, setting: Setting, averaging: Averaging) -> Point:
        return Point("cases", name, 0, setting, averaging)

    nearest = NearestMean(least_neighbours(512))
    patches = Setting(VIT_WIDTH, 4, VIT_PATCHES // 4, 0.25)
    yield case("as asked", Setting(LEAST_WIDTH, 2, 256, 0.25), nearest)
    yield case("a fifth of the dimension", Setting(LEAST_WIDTH // 5, 2, 256, 0.25), nearest)
    yield case("4 dimensions, wider noise", Setting(4, 2, 256, 0.6), nearest)
    yield case("r < 2 sigma", Setting(LEAST_WIDTH, 2, 256, 1.0), nearest)
    yield case("K above the cluster's size", Setting(LEAST_WIDTH, 8, 64, 0.25), nearest)
    yield case("196 patches, K nearest", patches, NearestMean(least_neighbours(patches.samples)))

    for sigma in (0.25, 1.0):
        asked, lam = least_setting(4, 64, sigma)
        yield case(f"sigma = {sigma:g}, as asked", asked, SoftmaxMean(lam))
        yield case(f"sigma = {sigma:g}, without j = i", asked, SoftmaxMean(lam, itself=False))
    yield case("lambda = 60", Setting(PAST_ALL_CONDITIONS, 4, 64, 0.5), SoftmaxMean(60.0))
    yield case("lambda = 60, without j = i", Setting(PAST_ALL_CONDITIONS, 4, 64, 0.5), SoftmaxMean(60.0, itself=False))
    yield case("lambda = 30", Setting(PAST_ALL_CONDITIONS, 4, 64, 0.25), SoftmaxMean(30.0))
    yield case("lambda = 3", Setting(PAST_ALL_CONDITIONS, 4, 64, 0.25), SoftmaxMean(3.0))
    opposite, lam = least_setting(2, 128, 0.25, separation=2.0)
    yield case("opposite centres", opposite, SoftmaxMean(lam))
    yield case("196 patches, softmax", patches, SoftmaxMean(least_lambda(patches)))


def nearest_panels() -> Iterator[Point]:
    """Theorem 1 over dimension, K, cluster count and cluster size."""
    least = least_neighbours(512)
    for sigma in (0.25, 0.6, 1.0):
        for d in (4, 8, 16, 32, LEAST_WIDTH, 160, 1000, 10**4):
            yield Point("nearest_dimension", f"σ = {sigma:g}", d, Setting(d, 2, 256, sigma), NearestMean(least))
    for d in (4, LEAST_WIDTH, 1000):
        for k in (1, 2, 4, 8, 16, 32, 64, least, 128, 192, 256, 288, 384):
            yield Point("nearest_neighbours", f"d = {d}", k, Setting(d, 2, 256, 0.25), NearestMean(k))
    for sigma in (0.25, 1.0):
        for c in (2, 3, 4, 5, 6, 7, 8, 16, 32, 64):
            setting = Setting(LEAST_WIDTH, c, 512 // c, sigma)
            yield Point("nearest_clusters", f"σ = {sigma:g}", c, setting, NearestMean(least))
    for d in (4, 16, LEAST_WIDTH):
        for n in (80, 128, 256, 512):
            yield Point("nearest_members", f"d = {d}", n, Setting(d, 2, n, 0.25), NearestMean(least_neighbours(2 * n)))


def softmax_panels() -> Iterator[Point]:
    """Theorem 2 over dimension, temperature, cluster count and cluster size."""
    for sigma in (0.25, 1.0):
        for itself in (True, False):
            series = f"σ = {sigma:g}" + ("" if itself else ", without j = i")
            for power in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10):
                setting = Setting(round(10**power), 4, 64, sigma)
                averaging = SoftmaxMean(least_lambda(setting), itself)
                yield Point("softmax_dimension", series, setting.dimension, setting, averaging)
    for sigma, d in (*((sigma, PAST_ALL_CONDITIONS) for sigma in (0.25, 0.5, 1.0)), (0.5, VIT_WIDTH)):
        series = f"σ = {sigma:g}" + (f", d = {d}" if d == VIT_WIDTH else "")
        for lam in np.geomspace(0.5, 500, 19).round(3).tolist():
            yield Point("softmax_temperature", series, 1 / lam, Setting(d, 4, 64, sigma), SoftmaxMean(lam))
    for sigma in (0.25, 0.5, 1.0):
        for c in (2, 4, 8, 16, 32, 64, 128):
            setting = Setting(PAST_ALL_CONDITIONS, c, 256 // c, sigma)
            yield Point("softmax_clusters", f"σ = {sigma:g}", c, setting, SoftmaxMean(least_lambda(setting)))
    for sigma in (0.25, 0.5, 0.7, 1.0):
        for n in (2, 4, 8, 16, 32, 64, 128, 256):
            setting = Setting(PAST_ALL_CONDITIONS, 2, n, sigma)
            yield Point("softmax_members", f"σ = {sigma:g}", n, setting, SoftmaxMean(least_lambda(setting)))
