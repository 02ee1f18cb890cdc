"""The figure of `cdtrans ablate noise`, after the paper's Fig. 2b."""

from pathlib import Path

from matplotlib.figure import Figure

from cdtrans.record.files import atomic
from cdtrans.studies.results import Spread

STYLES = (("#c0182b", "o-"), ("#2a9d5c", "s-"), ("#1f6fb4", "^--"))  # the paper's red, green and blue
GREY = "#777777"
DPI = 144

Curves = dict[str, list[tuple[float, Spread]]]  # name -> (percent of false pairs, accuracy in percent)


def write_figure(out: Path, curves: Curves, source_only: Spread | None, *, what: str) -> None:
    """Write a PNG to `out`; `what` describes the model. Points of unfinished runs may be missing."""
    with atomic(out) as file:
        figure(curves, source_only, what).savefig(file, format="png", dpi=DPI, metadata={"Software": None})


def figure(curves: Curves, source_only: Spread | None, what: str) -> Figure:
    whole = Figure(figsize=(5.6, 4.0), layout="constrained")
    axes = whole.subplots()
    for (name, points), (colour, style) in zip(curves.items(), STYLES, strict=True):
        levels = [level for level, _ in points]
        means = [mean.mean for _, mean in points]
        axes.plot(levels, means, style, color=colour, markersize=5, label=name)
        for level, s in points:
            if s.deviation is not None:
                axes.errorbar(level, s.mean, s.deviation, ecolor=colour, elinewidth=1, capsize=3)
    if source_only is not None:
        axes.axhline(source_only.mean, color=GREY, linewidth=1, linestyle=":", label="source only")
    axes.set_xlim(-3, 103)
    axes.set_xlabel("false positive pairs in the training data, %")
    axes.set_ylabel(f"accuracy on the target, %  ({what})")
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return whole
