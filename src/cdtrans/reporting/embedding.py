"""A t-SNE of both domains, before and after adaptation."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from cdtrans.reporting.gallery import device_for
from cdtrans.reporting.record import Record
from cdtrans.reporting.sections import Missing
from cdtrans.reporting.tsne import tsne

SAMPLE = 500  # images of each domain: t-SNE takes seconds at most, and more dots would overlap
PERPLEXITY = 30.0  # the usual value; smaller with few images
SIDE, MARGIN = 360, 8  # of a plot, in SVG units
COLOURS = 20  # distinguishable ones, .k0 to .k19 in style.css
LISTED = 40  # classes up to which the legend is open; a longer one is collapsed
FEWEST = 5  # images of a domain; fewer make no useful plot


class Mark(NamedTuple):
    """A point of the plot and the number of its colour."""

    x: str
    y: str
    colour: int


@dataclass(frozen=True)
class Plane:
    """One model's view of both domains: rings for source images, dots for target images."""

    SIDE: ClassVar[int] = SIDE
    name: str
    rings: tuple[Mark, ...]
    dots: tuple[Mark, ...]


@dataclass(frozen=True)
class Embedding:
    COLOURS: ClassVar[int] = COLOURS
    LISTED: ClassVar[int] = LISTED
    planes: tuple[Plane, ...]
    sources: int
    targets: int


def embedding(record: Record) -> Embedding | Missing:
    sampled = record.view_arrays("sampled_source", "sampled_target", "source_labels")
    before = record.view_arrays("before_source", "before_target", "target_before")
    after = record.view_arrays("after_source", "after_target", "target_after")
    if sampled is None or before is None or after is None:
        return Missing("This run kept no features of both models (views.npz).")
    sampled_source, sampled_target, source_labels = sampled
    rows_s, rows_t = spread(len(sampled_source)), spread(len(sampled_target))
    if min(len(rows_s), len(rows_t)) < FEWEST:
        return Missing("There are too few images for a plot of the features.")
    labels = source_labels[sampled_source[rows_s]]
    refused = " (not used)" if record.used_source else ""
    views = [("Before, source-only", before), (f"After, epoch {record.shown_epoch}{refused}", after)]
    if not record.adapted:
        views = views[:1]  # both would be the same model
    features = [np.concatenate([arrays[0][rows_s], arrays[1][rows_t]]) for _, arrays in views]
    coordinates = on_planes(np.stack(features), device_for(record))
    planes = []
    for (name, arrays), plane in zip(views, coordinates, strict=True):
        points = mirrored_like(plane, coordinates[0])
        predicted = arrays[2][sampled_target[rows_t]]
        points_drawn = marks(points, np.concatenate([labels, predicted]))
        planes.append(Plane(name, points_drawn[: len(rows_s)], points_drawn[len(rows_s) :]))
    return Embedding(tuple(planes), len(rows_s), len(rows_t))


def spread(count: int) -> np.ndarray:
    """At most SAMPLE rows of `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(int))


def mirrored_like(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The axes of t-SNE have no sign, so the second plot is mirrored to match the first."""
    return points * np.where((points * others).sum(axis=0) < 0, -1, 1)


def marks(points: np.ndarray, classes: np.ndarray) -> tuple[Mark, ...]:
    """[N, 2] coordinates and [N] classes, as marks that fill a square of SIDE; both axes have the same scale."""
    low, high = points.min(axis=0), points.max(axis=0)
    scale = (SIDE - 2 * MARGIN) / max(float((high - low).max()), 1e-12)
    placed = (points - (low + high) / 2) * scale * (1, -1) + SIDE / 2  # in SVG, y grows downwards
    return tuple(
        Mark(f"{x:.1f}", f"{y:.1f}", k % COLOURS) for (x, y), k in zip(placed.tolist(), classes.tolist(), strict=True)
    )


def on_planes(features: np.ndarray, device: torch.device) -> np.ndarray:
    """[V, N, D] -> [V, N, 2]. By cosine, like the search for pairs."""
    x = torch.nan_to_num(torch.from_numpy(features.astype(np.float32)))
    x = torch.nn.functional.normalize(x, dim=2).to(device)
    points: np.ndarray = tsne(x, min(PERPLEXITY, (x.shape[1] - 1) / 3)).cpu().numpy()
    return points
