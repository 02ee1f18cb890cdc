"""Both domains on a plane, before and after adaptation."""

from dataclasses import dataclass

import numpy as np
import torch

from cdtrans.report.gallery import device_for
from cdtrans.report.pictures import scatter
from cdtrans.report.record import Record
from cdtrans.report.sections import Missing
from cdtrans.report.tsne import tsne

SAMPLE = 500  # images of each domain: t-SNE then takes seconds at most, and more dots would hide each other
PERPLEXITY = 30.0  # the usual one; fewer images need a smaller
FEWEST = 5  # images of a domain below which there is nothing to see


@dataclass(frozen=True)
class Plane:
    """One model's view of both domains, as two pictures of the same points."""

    name: str
    by_domain: str
    by_class: str


@dataclass(frozen=True)
class Embedding:
    planes: tuple[Plane, ...]
    sources: int
    targets: int


def embedding(record: Record) -> Embedding | Missing:
    sampled = record.seen("sampled_source", "sampled_target", "source_labels")
    before = record.seen("before_source", "before_target", "target_before")
    after = record.seen("after_source", "after_target", "target_after")
    if sampled is None or before is None or after is None:
        return Missing("This run kept no features of both models (views.npz).")
    sampled_source, sampled_target, source_labels = sampled
    rows_s, rows_t = spread(len(sampled_source)), spread(len(sampled_target))
    if min(len(rows_s), len(rows_t)) < FEWEST:
        return Missing("There are too few images for a picture of the features.")
    labels = source_labels[sampled_source[rows_s]]
    views = [("Before, source-only", before), (f"After, epoch {record.shown_epoch}", after)]
    if record.used_source:
        views = views[:1]  # both would be the same model
    features = [np.concatenate([seen[0][rows_s], seen[1][rows_t]]) for _, seen in views]
    laid_out = on_planes(np.stack(features), device_for(record))
    planes = []
    for (name, seen), plane in zip(views, laid_out, strict=True):
        points = turned_like(plane, laid_out[0])
        predicted = seen[2][sampled_target[rows_t]]
        source, target = points[: len(rows_s)], points[len(rows_s) :]
        planes.append(Plane(name, scatter(source, target, None), scatter(source, target, (labels, predicted))))
    return Embedding(tuple(planes), len(rows_s), len(rows_t))


def spread(count: int) -> np.ndarray:
    """At most SAMPLE rows of `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(int))


def turned_like(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A plane of t-SNE has no left or right, so the second one is mirrored to have its points where the first has."""
    return points * np.where((points * others).sum(axis=0) < 0, -1, 1)


def on_planes(features: np.ndarray, device: torch.device) -> np.ndarray:
    """[V, N, D] -> [V, N, 2]. By cosine, as the pairs are searched."""
    x = torch.nan_to_num(torch.from_numpy(features.astype(np.float32)))
    x = torch.nn.functional.normalize(x, dim=2).to(device)
    points: np.ndarray = tsne(x, min(PERPLEXITY, (x.shape[1] - 1) / 3)).cpu().numpy()
    return points
