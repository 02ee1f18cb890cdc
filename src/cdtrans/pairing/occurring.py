"""The classes of the source that occur in the target, and the target images of no class, from features alone.

    steadiness   share of the neighbours of a class's images, on the target's own graphs, that have the class too,
                 beyond chance. Images that were given a class because theirs is missing are scattered.
    path         classes are taken out one by one, the least steady first, and their images given to the next best,
                 until all that are left are steady
    evenness     exp(entropy) of the class shares by the first graph, relative to equal shares
    absent       the path's classes, if most classes go that way for both the probe's and the graph's labels and there
                 are images enough to tell; where the shares are very uneven, also the classes that EM finds rare
    no class     how little an image is like any class: the source probe's doubt, the distance to the nearest class
                 mean, and being nearer to the target's images than to the source's; smoothed over the target's graphs

docs/results/classsets.md has the data that the constants were chosen on, and what was tried in vain. A class that is
rare, or lies across a wide gap, looks like one that is absent; a person tells them apart at a glance (`cdtrans ask`).
"""

import math

import torch
from torch import Tensor

from cdtrans.pairing.graphs import GRAPH_NEIGHBOURS, HEAT, TILE, Start, Statistics, nearest_keys
from cdtrans.pairing.neighbours import unit_rows

STEADY = 0.2  # least steadiness of a class that occurs
MOST = 0.4  # part of the classes that must go before any is taken for absent ...
ENOUGH_IMAGES = 20  # ... with so many target images per class
UNEVEN = 0.65  # evenness below which most classes must be absent
RARE, EM_STEPS = 0.1, 7  # share relative to the mean of the classes that are left, after so many steps of EM
LEAST_CLASSES = 2
CLOSE_BY = 5  # images of each domain that an image's distances are measured to; best images of a class
SHOWN = 9  # images of a class that a person is shown
LEAST_FITTING = 0.25  # part of the target that is compared with the source's images
KEPT, SMOOTHING_STEPS = 0.8, 30  # part of a score that comes from the neighbours, in each step


def absent_classes(start: Start) -> Tensor | None:
    """[K] bool; None if too little speaks against any class."""
    images, classes = start.graph.shape
    gone = unsteady(start, start.probe)
    if evenness(start.graph.argmax(dim=1), classes) < UNEVEN:
        gone = gone | rare(start.graph, start.known.mean(dim=0), gone)
    else:
        _, joint = start.graphs
        least = min(int(gone.sum()), int(unsteady(start, torch.stack(joint).mean(dim=0)).sum()))
        if least < MOST * classes or images < ENOUGH_IMAGES * classes:
            return None
    return gone if gone.any() and classes - int(gone.sum()) >= LEAST_CLASSES else None


def unsteady(start: Start, p: Tensor) -> Tensor:
    """[K] bool: the classes on the path, by the probabilities [Nt, K]."""
    classes = p.shape[1]
    gone = torch.zeros(classes, dtype=torch.bool, device=p.device)
    labels = p.argmax(dim=1)
    for _ in range(classes - LEAST_CLASSES):
        steadiness = class_steadiness(start, labels, classes).masked_fill(gone, torch.inf)
        k = int(steadiness.argmin())
        if steadiness[k] >= STEADY:
            break
        gone[k] = True
        members = labels == k
        labels = labels.masked_scatter(members, p[members].masked_fill(gone, -torch.inf).argmax(dim=1))
    return gone


def class_steadiness(start: Start, labels: Tensor, classes: int) -> Tensor:
    """[K], from chance (0) to the most that a class of this size can have (1)."""
    size = torch.bincount(labels, minlength=classes).double()
    share = size / len(labels)
    values = []
    for view in start.views:
        neighbours = view.own.neighbours
        same = (labels[neighbours] == labels[:, None]).double().mean(dim=1)
        of_class = torch.zeros_like(size).index_add_(0, labels, same) / size.clamp_min(1)
        most = ((size - 1) / neighbours.shape[1]).clamp(1e-6, 1)
        values.append((of_class / most - share) / (1 - share + 1e-6))
    return torch.stack(values).mean(dim=0).masked_fill(size <= 1, 0.0)


def evenness(labels: Tensor, classes: int) -> float:
    """1 if all classes have equal shares, 1 / K if there is only one."""
    share = torch.bincount(labels, minlength=classes).double() / len(labels)
    return math.exp(float(-torch.xlogy(share, share).sum())) / classes


def rare(p: Tensor, prior: Tensor, gone: Tensor) -> Tensor:
    """[K] bool: rare classes among those that are not gone, by EM on the probabilities [Nt, K] with the source's shares
    as its start (Saerens et al. 2002)."""
    left = (~gone).nonzero().squeeze(1)
    p, prior = p[:, left].clamp_min(1e-8).double(), prior[left].clamp_min(1e-8).double()
    p, prior = p / p.sum(dim=1, keepdim=True), prior / prior.sum()
    share = prior
    for _ in range(EM_STEPS):
        q = p * (share / prior)
        share = (q / q.sum(dim=1, keepdim=True)).mean(dim=0)
    found = torch.zeros_like(gone)
    found[left] = share < RARE / len(left)
    return found


def candidates(start: Start) -> tuple[Tensor, Tensor]:
    """For every class, the target images that are most likely of it, by the graphs and by the probe in turn, [K, c];
    and how little the best few look like it, [K]: the doubt whether it occurs."""
    graph, probe = start.graph, start.probe
    images = len(graph)
    by_graph, by_probe = (p.topk(min(SHOWN, images), dim=0) for p in (graph, probe))
    both = torch.stack([by_graph.indices, by_probe.indices], dim=1).flatten(0, 1)  # [2c, K], best first
    order = (~first_of_each(both)).to(torch.uint8).argsort(dim=0, stable=True)[: min(SHOWN, images)]
    return both.gather(0, order).T.contiguous(), 1 - by_graph.values[:CLOSE_BY].mean(dim=0)


def first_of_each(rows: Tensor) -> Tensor:
    """[R, K] bool: no earlier row of the column has the same value."""
    same = rows[:, None] == rows[None]  # [R, R, K]
    earlier = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device).tril(-1)
    return ~(same & earlier[..., None]).any(dim=1)


def no_class_score(start: Start) -> Tensor:
    """[Nt] the higher, the less an image is like any class; with mean 0 and variance 1."""
    view = start.views[0]
    source, target = unit_rows(view.source), unit_rows(view.target)
    to_mean = -nearest_mean(start, target)
    gap = nearness(target, target, itself=True) - nearness(target, source[start.known.any(dim=1)], itself=False)
    terms = (1 - start.probe.amax(dim=1), to_mean, gap)
    total = torch.stack([standard(smoothed(start, term)) for term in terms]).sum(dim=0)
    return standard(total)


def nearest_mean(start: Start, x: Tensor) -> Tensor:
    """[N] cosine of each row of x, [N, D] of length 1, and the nearest mean of a class."""
    means = start.known.T @ unit_rows(start.views[0].source)
    return (x @ unit_rows(means).T).amax(dim=1)


def strangeness(start: Start) -> Tensor:
    """[] how much less like any class the least fitting quarter of the target is than the source's images are."""
    view, kept = start.views[0], start.known.any(dim=1)
    own = nearest_mean(start, unit_rows(view.source)[kept]).mean()
    return own - smoothed(start, nearest_mean(start, unit_rows(view.target))).quantile(LEAST_FITTING)


def nearness(queries: Tensor, keys: Tensor, *, itself: bool) -> Tensor:
    """[Q] mean cosine of each query and the keys nearest to it; with `itself`, the queries are the keys."""
    k = min(CLOSE_BY, len(keys) - itself)
    tiles = zip(range(0, len(queries), TILE), queries.split(TILE), strict=True)
    found = [nearest_keys(part, keys, first if itself else -len(part), k)[0].mean(dim=1) for first, part in tiles]
    return torch.cat(found) if k else queries.new_zeros(len(queries))


def smoothed(start: Start, score: Tensor) -> Tensor:
    """The mean over both views' graphs of the target."""
    both = []
    for view in start.views:
        s = score
        for _ in range(SMOOTHING_STEPS if view.own.neighbours.shape[1] else 0):
            s = (1 - KEPT) * score + KEPT * (view.own.weight * s[view.own.neighbours]).sum(dim=1)
        both.append(s)
    return torch.stack(both).mean(dim=0)


def standard(score: Tensor) -> Tensor:
    return (score - score.mean()) / (score.std(correction=0) + 1e-9)


def score_of_nearest(queries: Tensor, scored: Tensor, scores: Tensor) -> Tensor:
    """[Q] scores of other target images than those that were scored, from the features of both and [S] scores: the
    weighted mean over the nearest ones."""
    of_scored = Statistics.of(scored)
    queries, keys = (unit_rows(of_scored.standardised(x)) for x in (queries, scored))
    k = min(GRAPH_NEIGHBOURS, len(keys))
    found = [nearest_keys(part, keys, -len(part), k) for part in queries.split(TILE)]  # no key is the query itself
    return torch.cat([((HEAT * near).softmax(dim=1) * scores[index]).sum(dim=1) for near, index in found])
