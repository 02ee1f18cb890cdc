"""Labels of the target from features alone: a linear probe and neighbour graphs correct each other.

    probe    ridge regression of one-hot labels on features that each domain standardises by its own mean and deviation
    graphs   P <- a W P + (1 - a) Q, thirty times: the probe's probabilities Q are spread over the nearest neighbours,
             on the target's own graph (a = 0.8) and on that of both domains, where the source's labels are given (0.9)
    shares   the class shares of P are pulled towards equal ones, the less, the fewer labels differ from the source's
             opinion: across a wide gap a probe prefers a few classes, and without a gap its shares are right
    rounds   the most certain part of each class teaches the next round's probe, half of it first and all of it last

Labels that a person gave for target images are fixed in the graphs, as the source's are, and teach every probe but
the first.

Two views of the features are averaged: the last blocks as they are, and all tapped ones whitened per domain. Every
constant was chosen on Office-31 and PACS with DeiT-tiny (docs/results/recipe.md). Nothing here is random, and nothing
has the size of images times images: neighbours are searched tile by tile."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.pairing.neighbours import unit_rows
from cdtrans.pairing.pairs import Domains, TargetLabels
from cdtrans.runtime.ranks import gather, share

GRAPH_NEIGHBOURS = 7
HEAT = 10.0  # weight of a neighbour: exp(HEAT * cosine)
STEPS = 30
OWN, JOINT = 0.8, 0.9  # a of the target's graph and of the joint one
ROUNDS = 5
FIRST_PORTION = 0.5  # part of each class that teaches in the first round
LOOSE, CLOSE = 0.03, 0.003  # the probe's decay on the source alone, and in the last round
WHITENING = 0.3  # shrinkage of the covariance to its mean variance
PULL = 0.5  # largest pull on the shares: 0 keeps the predicted ones, 1 makes them equal
ENOUGH = 8  # target images per class from which on the shares are pulled in full
SMOOTHING = 0.1  # label smoothing in the fit of the scale
TILE = 1 << 12  # queries in a tile of similarities, with 4 times as many keys: 256 MiB
SCALE_ROWS, SCALE_SCORES = 20_000, 7_000_000  # most rows, and scores in them, used to fit the scale of the scores
CACHED_CLASSES = 64  # columns of a matrix of probabilities that are spread together on a CPU
PRIOR = 8  # weight, in images, of the source's statistics in those of the target


class Statistics(NamedTuple):
    """Mean and variance of a domain's features."""

    mean: Tensor  # [D]
    variance: Tensor  # [D]

    @classmethod
    def of(cls, x: Tensor, prior: "Statistics | None" = None) -> "Statistics":
        """Those of x [N, D]. A `prior` counts as a few images, for targets of a handful."""
        mean, variance = x.mean(dim=0), x.var(dim=0, correction=0)
        if prior is None:
            return cls(mean, variance)
        weight = PRIOR / (PRIOR + len(x))
        return cls(mean.lerp(prior.mean, weight), variance.lerp(prior.variance, weight))

    def standardised(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.variance + 1e-5).sqrt()


class Probe(NamedTuple):
    """A linear classifier."""

    weight: Tensor  # [D, K]
    bias: Tensor  # [K]

    def probabilities(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.bias).softmax(dim=1)


class GraphLabels(NamedTuple):
    """The labels of every target image."""

    probabilities: Tensor  # [Nt, K] by the graphs
    first: Tensor  # [Nt] the class by a probe on the source, before any graph
    steady: Tensor  # [] share of target neighbours with the same class by the graphs


class View:
    """One set of features of both domains, standardised, and the graphs of their neighbours."""

    def __init__(self, source: Tensor, target: Tensor, given: TargetLabels | None, *, whitened: bool = False) -> None:
        self.source, self.target, self.given = source, target, given
        if whitened:
            source, target = source @ whitener(source), target @ whitener(target)
        source, target = unit_rows(source), unit_rows(target)
        self.own = Graph.search(target, target, itself=0)
        self.joint = Graph.search(target, torch.cat([source, target]), itself=len(source))

    def spread(self, q: Tensor, known: Tensor) -> Tensor:
        """The target's probabilities [Nt, K] over both graphs; `known` are the source's labels, [Ns, K]."""
        own, joint = self.spread_each(q, known)
        return (own + joint) / 2

    def spread_each(self, q: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """The same over the graph of the target, and over the joint one."""
        return self.own.spread(q, OWN, self.given), self.joint.spread(q, JOINT, self.given, known)

    def fit(self, known: Tensor, labels: Tensor, chosen: Tensor, decay: float) -> Tensor:
        """A probe on the source and the chosen target images with these labels [Nt] -> its probabilities for the
        target, [Nt, K]."""
        x = torch.cat([self.source, self.target[chosen]])
        y = torch.cat([known, F.one_hot(labels[chosen], known.shape[1]).to(known)])
        return fixed(fit_probe(x, y, decay).probabilities(self.target), self.given)


class Graph(NamedTuple):
    """The nearest neighbours of every target image."""

    neighbours: Tensor  # [Nt, k] indices
    weight: Tensor  # [Nt, k], each row sums to 1

    @classmethod
    def search(cls, queries: Tensor, keys: Tensor, itself: int) -> "Graph":
        """Nearest neighbours by cosine. The i-th query is key number `itself` + i, which is not its own neighbour.
        Several ranks share the queries."""
        k = min(GRAPH_NEIGHBOURS, len(keys) - 1)
        mine = share(len(queries))
        tiles = [
            nearest_keys(queries[start : min(start + TILE, mine.stop)], keys, start + itself, k)
            for start in range(mine.start, mine.stop, TILE)
        ]
        similarity, index = (gather(torch.cat(parts)) for parts in zip(*tiles, strict=True))
        return cls(index, (HEAT * similarity).softmax(dim=1))

    def steady(self, labels: Tensor) -> Tensor:
        """[] the share of neighbours with the same label [Nt], on a graph of the target alone."""
        if not self.neighbours.shape[1]:
            return torch.ones(())
        return (labels[self.neighbours] == labels[:, None]).double().mean().cpu()

    def spread(self, q: Tensor, a: float, given: TargetLabels | None, known: Tensor | None = None) -> Tensor:
        """P after all steps, [Nt, K], from the probe's Q. Classes do not depend on each other: a CPU takes as many at
        once as its cache holds."""
        settled = None if given is None else F.one_hot(given.labels, q.shape[1]).to(q)
        parts = []
        for columns in torch.arange(q.shape[1]).split(CACHED_CLASSES if q.device.type == "cpu" else q.shape[1]):
            few = slice(int(columns[0]), int(columns[-1]) + 1)
            p = start = q[:, few].contiguous()
            of_source = None if known is None else known[:, few]
            for _ in range(STEPS if self.neighbours.shape[1] else 0):
                base = p if of_source is None else torch.cat([of_source, p])
                p = (1 - a) * start
                for index, weight in zip(self.neighbours.T, self.weight.T, strict=True):
                    p = p + a * weight[:, None] * base[index]
                if given is not None and settled is not None:
                    p = p.index_copy(0, given.images, settled[:, few])
            parts.append(p)
        return torch.cat(parts, dim=1)


def fixed(p: Tensor, given: TargetLabels | None) -> Tensor:
    """The target's probabilities [Nt, K], with those of labelled images replaced by their labels."""
    return p if given is None else p.index_copy(0, given.images, F.one_hot(given.labels, p.shape[1]).to(p))


def nearest_keys(queries: Tensor, keys: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    """Similarity and index of each query's k nearest keys, [Q, k] each; query i is not paired with key `first` + i."""
    best = queries.new_full((len(queries), k), -torch.inf)
    index = torch.zeros((len(queries), k), dtype=torch.long, device=queries.device)
    rows = torch.arange(len(queries), device=queries.device)
    for start in range(0, len(keys), 4 * TILE):
        similarity = queries @ keys[start : start + 4 * TILE].T
        here = (rows + first >= start) & (rows + first < start + similarity.shape[1])
        similarity[rows[here], rows[here] + first - start] = -torch.inf
        value, place = similarity.topk(min(k, similarity.shape[1]), dim=1)
        best, order = torch.cat([best, value], dim=1).topk(k, dim=1)
        index = torch.cat([index, place + start], dim=1).gather(1, order)
    return best, index


def whitener(x: Tensor) -> Tensor:
    """[D, D] map that makes the covariance of standardised features round."""
    covariance = gram(x) / len(x)
    size = covariance.diagonal().mean()
    covariance = (1 - WHITENING) * covariance + WHITENING * size * torch.eye(len(covariance)).to(covariance)
    values, vectors = torch.linalg.eigh(covariance)
    whitening: Tensor = vectors * values.clamp_min(1e-8).rsqrt() @ vectors.T
    return whitening.to(x)


def fit_probe(x: Tensor, y: Tensor, decay: float) -> Probe:
    """Ridge regression on rows x [N, D] and labels y [N, K]. Its scores are scaled so that the cross-entropy on the
    rows, with smoothed labels, is the least."""
    n, d = x.shape
    x = torch.cat([x, x.new_ones(n, 1)], dim=1)  # [N, D + 1]
    left = gram(x) / n + decay * d**0.5 * torch.eye(d + 1).to(x.device, torch.float64)
    solution = torch.linalg.solve(left, gram(x, y) / n).to(x)  # [D + 1, K]
    rows = min(n, SCALE_ROWS, max(1, SCALE_SCORES // y.shape[1]))
    some = torch.linspace(0, n - 1, rows, device=x.device).round().long()
    scores, smooth = x[some] @ solution, y[some] * (1 - SMOOTHING) + SMOOTHING / y.shape[1]
    scales = torch.logspace(0, 2.5, 26).tolist()
    losses = torch.stack([F.cross_entropy(scale * scores, smooth) for scale in scales])
    solution = scales[int(losses.argmin())] * solution
    return Probe(solution[:-1], solution[-1])


def gram(x: Tensor, y: Tensor | None = None) -> Tensor:
    """x^T y in float64, [D, K]; y is x unless given."""
    parts = zip(x.split(1 << 16), (x if y is None else y).split(1 << 16), strict=True)
    return torch.stack([(a.T @ b).double() for a, b in parts]).sum(dim=0)


@dataclass(frozen=True)
class Start:
    """Both views, and what a probe on the source says in each of them, before any graph."""

    views: list[View]
    known: Tensor  # [Ns, K] the source's labels; a row of zeros for an image of a class that does not occur
    q: list[Tensor]  # [Nt, K] probabilities of the target, one for each view

    @classmethod
    def of(cls, domains: Domains, *, classes: int, leading: int) -> "Start":
        """From both domains' features, whose first `leading` numbers are the first view."""
        views = make_views(domains, leading)
        known = known_labels(domains, classes).to(views[0].source)
        none = torch.zeros(0, dtype=torch.long, device=known.device)
        labels = none.new_zeros(len(domains.target.features))  # no image teaches yet
        return cls(views, known, [view.fit(known, labels, none, LOOSE) for view in views])

    @property
    def probe(self) -> Tensor:
        """[Nt, K] the mean of both views' probabilities."""
        return torch.stack(self.q).mean(dim=0)

    @cached_property
    def graphs(self) -> tuple[list[Tensor], list[Tensor]]:
        """[Nt, K] each: the probabilities after every view's graph of the target, and after its joint one."""
        both = [view.spread_each(p, self.known) for view, p in zip(self.views, self.q, strict=True)]
        return [own for own, _ in both], [joint for _, joint in both]

    @property
    def graph(self) -> Tensor:
        """[Nt, K] after all first graphs."""
        return torch.stack([(own + joint) / 2 for own, joint in zip(*self.graphs, strict=True)]).mean(dim=0)

    def spread(self, q: list[Tensor]) -> Tensor:
        """[Nt, K] these probabilities after the graphs of their views."""
        return torch.stack([view.spread(p, self.known) for view, p in zip(self.views, q, strict=True)]).mean(dim=0)

    def only(self, occurs: Tensor) -> "Start":
        """The same for the classes that occur, [K] bool."""
        q = [p[:, occurs].clamp_min(1e-8) for p in self.q]
        return Start(self.views, self.known[:, occurs], [p / p.sum(dim=1, keepdim=True) for p in q])


def label_target(domains: Domains, *, classes: int, leading: int) -> GraphLabels:
    """Labels from both domains' features, whose first `leading` numbers are the first view."""
    return label_from(Start.of(domains, classes=classes, leading=leading), domains.given)


def label_from(start: Start, given: TargetLabels | None) -> GraphLabels:
    """All rounds."""
    first, q = start.probe.argmax(dim=1), start.q
    for round in range(ROUNDS):
        p = fixed(balanced(start.spread(q) if round else start.graph, first), given)
        if round + 1 < ROUNDS:  # the last round's probes would teach nobody
            decay = LOOSE * (CLOSE / LOOSE) ** ((round + 1) / ROUNDS)
            chosen = most_certain(p, FIRST_PORTION + (1 - FIRST_PORTION) * round / (ROUNDS - 1))
            q = [view.fit(start.known, p.argmax(dim=1), chosen, decay) for view in start.views]
    return GraphLabels(p, first, start.views[0].own.steady(p.argmax(dim=1)))


def relabel_target(domains: Domains, first: Tensor, *, leading: int) -> Tensor:
    """Labels [Nt, K] from the features and predictions of a network that is being trained. The graphs spread them
    twice: the second time, a probe that has learnt the first labels counts for one half."""
    views, given = make_views(domains, leading), domains.given
    q = fixed(domains.target.logits.softmax(dim=1), given)
    known = known_labels(domains, q.shape[1]).to(q)
    everything = torch.arange(len(q), device=q.device)
    p = fixed(balanced(torch.stack([view.spread(q, known) for view in views]).mean(dim=0), first), given)
    q = (q + views[0].fit(known, p.argmax(dim=1), everything, CLOSE)) / 2
    return fixed(balanced(torch.stack([view.spread(q, known) for view in views]).mean(dim=0), first), given)


def known_labels(domains: Domains, classes: int) -> Tensor:
    """[Ns + Na, K] the source's labels, and rows of zeros for its images of classes that do not occur."""
    known = F.one_hot(domains.source_labels, classes)
    return known if domains.beside is None else torch.cat([known, known.new_zeros(len(domains.beside), classes)])


def make_views(domains: Domains, leading: int) -> list[View]:
    source, target = domains.source.features, domains.target.features
    if domains.beside is not None:
        source = torch.cat([source, domains.beside])
    of_source = Statistics.of(source)
    of_target = Statistics.of(target, prior=of_source)
    source, target = of_source.standardised(source), of_target.standardised(target)
    given = domains.given
    return [View(source[:, :leading], target[:, :leading], given), View(source, target, given, whitened=True)]


def balanced(p: Tensor, first: Tensor) -> Tensor:
    """Rows and columns scaled in turn (Sinkhorn) until the class shares are the pulled ones, [Nt, K] -> [Nt, K]."""
    images, classes = p.shape
    changed = float((p.argmax(dim=1) != first).double().mean())
    pull = min(PULL, 2 * changed) * min(1.0, images / (ENOUGH * classes))
    shares = p.mean(dim=0).clamp_min(1e-6) ** (1 - pull)
    shares, p = shares / shares.sum(), p.clamp_min(1e-8)
    for _ in range(20):
        p = p * (shares / p.mean(dim=0))
        p = p / p.sum(dim=1, keepdim=True)
    return p


def most_certain(p: Tensor, portion: float) -> Tensor:
    """Indices of the images with the highest probabilities: this portion of each predicted class, and at least one."""
    confidence, label = p.max(dim=1)
    chosen = []
    for k in label.unique():
        members = (label == k).nonzero().squeeze(1)
        best = confidence[members].argsort(descending=True, stable=True)[: max(1, round(portion * len(members)))]
        chosen.append(members[best])
    return torch.cat(chosen).sort().values
