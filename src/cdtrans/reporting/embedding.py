"""A t-SNE of both domains, before and after adaptation."""

from typing import NamedTuple

import numpy as np

from cdtrans.record.record import RunRecord
from cdtrans.reporting.sections import Missing

PLOTTED_IMAGES = 500  # images of each domain: t-SNE takes seconds at most, and more dots would overlap
PERPLEXITY = 30.0  # the usual value; smaller with few images
PLANE_SIDE, PLANE_MARGIN = 360, 8  # side and margin of a plot, in SVG units
COLOURS = 20  # distinguishable ones, .k0 to .k19 in style.css
LEGEND_CLASSES = 40  # classes up to which the legend is open; a longer one is collapsed
FEWEST = 5  # images of a domain; fewer make no useful plot

Mark = tuple[str, str, int]  # coordinates of a point, and the number of its colour


class Plane(NamedTuple):
    """One model's view of both domains: rings for source images, dots for target images."""

    name: str
    rings: tuple[Mark, ...]
    dots: tuple[Mark, ...]


class Embedding(NamedTuple):
    planes: tuple[Plane, ...]
    sources: int
    targets: int
    legend: tuple[tuple[str, int], ...]  # name and colour of every class
    colours: int  # different ones
    unfolded: bool  # whether the legend is
    side: int = PLANE_SIDE


def embedding(record: RunRecord) -> Embedding | Missing:
    views, outcome = record.views, record.outcome
    rows_s, rows_t = evenly_spread(len(views.sampled_source)), evenly_spread(len(views.sampled_target))
    if min(len(rows_s), len(rows_t)) < FEWEST:
        return Missing("There are too few images for a plot of the features.")
    labels, sampled = views.source_labels[views.sampled_source[rows_s]], views.sampled_target[rows_t]
    refused = " (not used)" if outcome.choice.model == "source" else ""
    shown = [("Before, source-only", views.before_source, views.before_target, views.target_before)]
    if outcome.adapted_epoch:
        name = f"After, epoch {outcome.adapted_epoch}{refused}"
        shown.append((name, views.after_source, views.after_target, views.target_after))
    features = [np.concatenate([source[rows_s], target[rows_t]]) for _, source, target, _ in shown]
    points = on_planes(np.stack(features), record)
    planes = []
    for (name, _, _, predicted), plane in zip(shown, points, strict=True):
        every = marks(mirrored_like(plane, points[0]), np.concatenate([labels, predicted[sampled]]))
        planes.append(Plane(name, every[: len(rows_s)], every[len(rows_s) :]))
    legend = tuple((name, k % COLOURS) for k, name in enumerate(record.classes))
    return Embedding(tuple(planes), len(rows_s), len(rows_t), legend, COLOURS, len(legend) <= LEGEND_CLASSES)


def evenly_spread(count: int) -> np.ndarray:
    """At most PLOTTED_IMAGES rows of `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, PLOTTED_IMAGES)).round().astype(int))


def on_planes(features: np.ndarray, record: RunRecord) -> np.ndarray:
    """[V, N, D] -> [V, N, 2] by cosine, like the search for pairs."""
    import torch
    from torch.nn import functional as F

    from cdtrans.reporting.attention import device_for
    from cdtrans.reporting.tsne import tsne

    x = F.normalize(torch.from_numpy(np.nan_to_num(features.astype(np.float32))).to(device_for(record)), dim=2)
    return tsne(x, min(PERPLEXITY, (x.shape[1] - 1) / 3)).cpu().numpy()


def mirrored_like(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The axes of t-SNE have no sign, so the second plot is mirrored to match the first."""
    return points * np.where((points * others).sum(axis=0) < 0, -1, 1)


def marks(points: np.ndarray, classes: np.ndarray) -> tuple[Mark, ...]:
    """[N, 2] coordinates and [N] classes, as marks that fill a square of PLANE_SIDE; both axes have the same scale."""
    low, high = points.min(axis=0), points.max(axis=0)
    scale = (PLANE_SIDE - 2 * PLANE_MARGIN) / max(float((high - low).max()), 1e-12)
    placed = (points - (low + high) / 2) * scale * (1, -1) + PLANE_SIDE / 2  # in SVG, y grows downwards
    every = zip(placed.tolist(), classes.tolist(), strict=True)
    return tuple((f"{x:.1f}", f"{y:.1f}", k % COLOURS) for (x, y), k in every)
