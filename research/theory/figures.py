"""The figures of `python -m research.theory`: three SVG files that are the same bytes for the same numbers."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator, ScalarFormatter

from cdtrans.record.files import atomic
from research.theory.averaging import DELTA, Row
from research.theory.proof_steps import VIT_WIDTH

COLOURS = ("#1f6fb4", "#e08214", "#2a9d5c", "#8a4fbf")  # told apart in print and by the colour-blind
GREY = "#555555"
RING: dict[str, Any] = {"color": "#c0182b", "mfc": "none", "markersize": 10, "mew": 0.9}  # a counterexample
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "cdtrans",  # else every file has names of its own inside
}
NOISE = "noise |x − u| / σ"

Curves = dict[str, list[tuple[float, Row]]]


class Study(Protocol):
    """The parts of a study that the figures show."""

    @property
    def steps(self) -> dict[str, list[dict[str, Any]]]: ...
    def panel(self, name: str) -> Curves: ...


def draw_figures(study: Study, out: Path) -> None:
    with matplotlib.rc_context(STYLE):
        _save(nearest_figure(study), out / "nearest.svg")
        _save(softmax_figure(study), out / "softmax.svg")
        _save(steps_figure(study), out / "proof-steps.svg")


def nearest_figure(study: Study) -> Figure:
    """Theorem 1: the noise after averaging K neighbours."""
    panels = (
        ("nearest_dimension", "dimension (2 clusters of 256, K = 84)", "dimension d"),
        ("nearest_neighbours", "neighbours (2 clusters of 256, σ = 0.25)", "neighbours K"),
        ("nearest_clusters", "cluster count (512 inputs, K = 84, d = 74)", "clusters C"),
        ("nearest_members", "cluster size (2 clusters, least K, σ = 0.25)", "inputs in a cluster"),
    )
    return _four_panels(study, "Theorem 1: the mean of the K nearest", panels, claim=None)


def softmax_figure(study: Study) -> Figure:
    """Theorem 2: the noise after softmax attention."""
    panels = (
        ("softmax_dimension", "dimension (4 clusters of 64, least λ)", "dimension d"),
        ("softmax_temperature", "temperature (4 clusters of 64, d = 10¹² unless said)", "temperature 1/λ"),
        ("softmax_clusters", "cluster count (256 inputs, least λ, d = 10¹²)", "clusters C"),
        ("softmax_members", "cluster size (2 clusters, least λ, d = 10¹²)", "inputs in a cluster"),
    )
    return _four_panels(study, "Theorem 2: softmax attention", panels, claim=0.5)


def steps_figure(study: Study) -> Figure:
    """Lemma 1, the shell of Theorem 1, and the dimension that Theorem 2 asks for."""
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    lemma, shells, least = (study.steps[name] for name in ("lemma_1", "shell", "least_dimension"))
    for k, (column, name) in enumerate((("cosine", "true value"), ("lemma", "Lemma 1's bound"))):
        left.plot(*_columns(lemma, "separation", column), "o-", color=COLOURS[k], label=name)
    _label(left, "Lemma 1", "distance r of two unit centres", "|⟨u, u'⟩|")
    for k, (name, wide) in enumerate((("least d of Theorem 1", False), ("d = 10,000", True))):
        chosen = [s for s in shells if (s["dimension"] == 10**4) == wide]
        middle.plot(*_columns(chosen, "samples", "left"), "o-", color=COLOURS[k], label=name)
    middle.axhline(DELTA, color=GREY, linestyle="--", label=f"allowed: δ = {DELTA:g}")
    middle.set(xscale="log", ylim=(0, 1.05))
    _label(middle, "Theorem 1: an input outside the shell", "inputs m", "share of trials")
    for k, sigma in enumerate(dict.fromkeys(row["sigma"] for row in least)):
        chosen = [row for row in least if row["sigma"] == sigma]
        right.plot(*_columns(chosen, "clusters", "dimension"), "o-", color=COLOURS[k], label=f"σ = {sigma:g}")
    right.axhline(VIT_WIDTH, color=GREY, linestyle="--", label=f"DeiT-small: {VIT_WIDTH}")
    right.set(yscale="log", ylim=(100, 1e8))
    _whole_ticks(right)
    _label(right, "Theorem 2: least d (196 inputs)", "clusters C", "dimension d")
    for axes in (left, middle, right):
        axes.legend()
    return figure


def _four_panels(study: Study, title: str, panels: Iterable[tuple[str, str, str]], *, claim: float | None) -> Figure:
    figure = Figure(figsize=(10, 7.8), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    for axes, (panel, over, x) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        _curves(axes, study.panel(panel))
        axes.axhline(1, color=GREY, linewidth=1)
        if claim is not None:
            axes.axhline(claim, color=GREY, linewidth=1, linestyle=":")
        axes.set(xscale="log", yscale="log", ylim=(0.04, 20))
        if x in ("clusters C", "inputs in a cluster"):
            _whole_ticks(axes)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        _label(axes, over, x, NOISE)
    figure.legend(handles=_key(claim), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _curves(axes: Any, curves: Curves) -> None:
    """Mean (line), worst input (shade) and bound (dashes), in units of sigma; a marker is full where the conditions are
    met, and ringed where they are and the claim is false. Curves may coincide: the first is on top, and thinnest."""
    for k, (series, curve) in reversed(list(enumerate(curves.items()))):
        x, rows = [x for x, _ in curve], [row for _, row in curve]
        mean = [row.after / row.setting.sigma for row in rows]
        worst = [row.worst / row.setting.sigma for row in rows]
        bound = [row.averaging.bound(row.setting) / row.setting.sigma for row in rows]
        look: dict[str, Any] = {"color": COLOURS[k], "marker": "o", "markersize": 4 + 1.2 * k, "linestyle": ""}
        axes.fill_between(x, mean, worst, color=COLOURS[k], alpha=0.15, lw=0)
        axes.plot(x, bound, "--", color=COLOURS[k], lw=0.8 + 0.5 * k)
        axes.plot(x, mean, color=COLOURS[k], lw=1.2 + 0.9 * k, label=series)
        axes.plot(x, mean, **look, markevery=[bool(row.unmet) for row in rows], mfc="white")
        axes.plot(x, mean, **look, markevery=[not row.unmet for row in rows])
        axes.plot(x, mean, **(look | RING), markevery=[row.verdict == "fails" for row in rows], zorder=3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", ncols=2)


def _whole_ticks(axes: Any) -> None:
    """Powers of two, written out: the axis spans too little for powers of ten."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _key(claim: float | None) -> list[Any]:
    """The legend of all panels."""
    entries = [
        Line2D([], [], color=GREY, lw=1, label="before: σ"),
        Line2D([], [], color="black", label="after, mean"),
        Patch(color="black", alpha=0.15, label="up to the worst input"),
        Line2D([], [], color="black", linestyle="--", lw=1, label="bound of the proof"),
        Line2D([], [], color="black", marker="o", linestyle="", label="conditions met"),
        Line2D([], [], color="black", marker="o", mfc="white", linestyle="", label="not met"),
    ]
    if claim is not None:
        entries.insert(1, Line2D([], [], color=GREY, lw=1, linestyle=":", label="claim: σ/2"))
        entries.append(Line2D([], [], **RING, marker="o", linestyle="", label="conditions met, claim false"))
    return entries


def _columns(rows: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    return [row[x] for row in rows], [row[y] for row in rows]


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)


def _save(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    with atomic(path) as file:
        file.write(drawn.getvalue())
