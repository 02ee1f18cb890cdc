"""The sections of the page that show images: pairs with heat maps, and images to check."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from cdtrans.errors import counted
from cdtrans.record.layout import PairsRecord
from cdtrans.record.record import RunRecord
from cdtrans.reporting.images import DomainImages
from cdtrans.reporting.sections import Missing, pairs_meaning
from cdtrans.runtime.screen import Screen

SHOWN_ROUNDS = 4  # rounds with pairs on the page: the first, the last, and some in between
SHOWN_PAIRS = 72  # pairs in all: about 1.5 MB of page
LOOKS = 24  # images in each section of images worth a look: full rows on a desktop and on a phone
SEED = 0  # seed for the choice of pairs and of groups, so that equal runs have equal pages
HIGHEST = 0.1  # part of the target whose images are grouped if nobody has said where those of no class begin
MOST_GROUPS = 8
DISTINCT = 0.1  # least silhouette of several groups; features without any have about 0
SHOWN_ABSENT, NEAREST = 24, 6  # absent classes on the page, and images of each


class Pair(NamedTuple):
    round: int
    kept: bool
    source_class: str
    target_class: str  # the pseudo-label
    source_path: str
    target_path: str
    source: str | None  # data URLs; None for a missing file
    target: str | None
    heat: str | None


class Gallery(NamedTuple):
    pairs: tuple[Pair, ...]
    of: int  # proposed pairs of all rounds; `pairs` is a sample of them
    model: str  # the model of the heat maps, "adapted" or "source"
    why: str  # why there are no heat maps, or empty
    class_names: list[str]


class Look(NamedTuple):
    """An image to check, with a headline and a detail."""

    image: str | None  # a data URL; None for a missing file
    path: str
    headline: str
    detail: str


class Group(NamedTuple):
    """Similar images that may belong to no class."""

    look: Look  # the one in the middle
    paths: list[str]  # all of its images


class Strangers(NamedTuple):
    """Images that look like no class."""

    highest: "ImagesToCheck"
    groups: tuple[Group, ...]
    of: str  # the images that the groups were made of


class AbsentClass(NamedTuple):
    name: str
    looks: tuple[Look, ...]  # the target images nearest to it


class ImagesToCheck(NamedTuple):
    images: tuple[Look, ...]
    of: int  # images in all; these stand out most


def gallery(record: RunRecord, source: DomainImages, target: DomainImages, screen: Screen) -> Gallery | Missing:
    """A sample of pairs with the attention of the source image over the target image, in the adapted model. A run that
    was stopped before adaptation has the source-only model's."""
    from cdtrans.reporting.attention import heat_maps

    if not pairs_meaning(record):
        return Missing("The two images of a pair need not belong together with this method.")
    if not record.rounds:
        return Missing("The run folder has no pairs.")
    shown = [(number, record.rounds[number], i) for number, i in sample_pairs(record.rounds)]
    places = [(int(r.source[i]), int(r.target[i])) for _, r, i in shown]
    sides = [(images, [place[n] for place in places]) for n, images in enumerate((source, target))]
    thumbnails = [images.thumbnails(indices) for images, indices in sides]
    model = "adapted" if record.outcome.adapted_epoch else "source"
    with screen.track("report", len(places)) as task:
        pixels = zip(*(images.fetch(indices) for images, indices in sides), strict=True)
        heat, why = heat_maps(record, model, list(pixels), task)
    pairs, classes = [], record.classes
    for (number, r, i), (s, t), *images in zip(shown, places, *thumbnails, heat, strict=True):
        names = classes[r.source_labels[i]], classes[r.target_labels[i]]
        pairs.append(Pair(number, bool(r.kept[i]), *names, source.paths[s], target.paths[t], *images))
    class_names = sorted({name for pair in pairs for name in (pair.source_class, pair.target_class)})
    return Gallery(tuple(pairs), sum(len(r.kept) for r in record.rounds.values()), model, why, class_names)


def sample_pairs(rounds: dict[int, PairsRecord]) -> list[tuple[int, int]]:
    """Pairs of a few rounds, kept and rejected ones in equal numbers as far as possible, the classes in turn: the
    number of the round, and the place in it. Sorted by round, the last first, then by class."""
    numbers, rng = sorted(rounds), np.random.default_rng(SEED)
    cells = []
    for n in dict.fromkeys(np.linspace(0, len(numbers) - 1, SHOWN_ROUNDS).round().astype(int).tolist()):
        r = rounds[numbers[n]]
        _, once = np.unique(np.stack([r.source, r.target]), axis=1, return_index=True)  # a mutual pair is there twice
        for state in (True, False):
            cell = rng.permutation(once[r.kept[once] == state])
            labels = r.source_labels[cell]
            by_class = [cell[labels == k].tolist() for k in dict.fromkeys(labels.tolist())]
            cells.append([(numbers[n], i) for i in in_turn(by_class)[:SHOWN_PAIRS]])
    mixed = in_turn(cells)[:SHOWN_PAIRS]
    return sorted(mixed, key=lambda p: (-p[0], rounds[p[0]].source_labels[p[1]], not rounds[p[0]].kept[p[1]]))


def in_turn(groups: list[list[Any]]) -> list[Any]:
    """The first of every group, then the second of each, and so on."""
    return [member for members in zip_longest(*groups) for member in members if member is not None]


def changed(record: RunRecord, target: DomainImages) -> ImagesToCheck | Missing:
    """The target images whose predicted distribution moved furthest."""
    if not record.outcome.adapted_epoch:
        return Missing("There is no adapted model, so no prediction changed.")
    views, classes = record.views, record.classes
    before, after = views.target_before, views.target_after
    order = np.argsort(-views.changed, kind="stable")
    order = order[before[order] != after[order]]
    if not len(order):
        return Missing("The adapted model predicts the same class as the source-only model for every target image.")

    def caption(i: int) -> tuple[str, str]:
        sure = f"{views.confidence_before[i]:.0%} → {views.confidence_after[i]:.0%} sure"
        return f"{classes[before[i]]} → {classes[after[i]]}", sure

    return to_check(order, target, caption)


def uncertain(record: RunRecord, target: DomainImages) -> ImagesToCheck | Missing:
    """The target images that the selected model is least sure of."""
    views, classes = record.views, record.classes
    predicted, sure = views.target_after, views.confidence_after
    if record.outcome.choice.model == "source":
        predicted, sure = views.target_before, views.confidence_before
    order = np.argsort(sure, kind="stable")
    return to_check(order, target, lambda i: (classes[predicted[i]], f"{sure[i]:.0%} sure"))


def strangers(record: RunRecord, target: DomainImages) -> Strangers | None:
    """The target images that look least like any class, and groups of similar ones among them; None if the user has
    said that there are none."""
    views, known = record.views, record.outcome.class_set
    if known.others is False:
        return None
    score = views.no_class.astype(float)
    cut = known.curve.cut if known.curve else float(np.quantile(score, 1 - HIGHEST))
    sampled = np.flatnonzero(score[views.sampled_target] >= cut)
    rows, x = views.sampled_target[sampled], views.before_target[sampled].astype(float)
    nearest = [record.classes[k] for k in views.target_before]
    highest = to_check(np.argsort(-score, kind="stable"), target, lambda i: ("nearest class:", nearest[i]))
    groups = []
    for members, middle in similar(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)):
        most = max(names := [nearest[i] for i in rows[members]], key=names.count)
        image = target.thumbnails([rows[middle]])[0]
        look = Look(image, target.paths[rows[middle]], counted(len(members), "image"), f"nearest class: {most}")
        groups.append(Group(look, [target.paths[i] for i in rows[members]]))
    part = "above the cut that your answers set" if known.curve else f"in the highest {HIGHEST:.0%}"
    drawn = f" of a sample of {len(views.sampled_target):,}" if len(views.sampled_target) < len(score) else ""
    return Strangers(highest, tuple(groups), f"{counted(len(rows), 'image')}{drawn} {part}")


def similar(x: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Groups of the unit rows by k-means, and the row in the middle of each; the largest group first."""
    import torch

    from cdtrans.trust.scores import cluster

    if not len(x):
        return []
    best, labels = DISTINCT, np.zeros(len(x), int)
    for k in range(2, min(MOST_GROUPS, len(x) - 1) + 1):
        found = np.asarray(cluster(torch.from_numpy(x).float(), k))
        if len(np.unique(found)) > 1 and (score := silhouette(x, found)) > best:
            best, labels = score, found
    groups = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    middles = [int(g[np.linalg.norm(x[g] - x[g].mean(axis=0), axis=1).argmin()]) for g in groups]
    return sorted(zip(groups, middles, strict=True), key=lambda group: -len(group[0]))


def silhouette(x: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette (Rousseeuw 1987) of unit rows: 1 if groups are apart, 0 if they touch. scikit-learn has it too,
    but takes two seconds to import."""
    distance = np.sqrt(np.maximum(2 - 2 * x @ x.T, 0))
    member = labels[:, None] == np.unique(labels)  # [N, groups]
    size = member.sum(axis=0)
    own = (distance @ member)[member] / np.maximum(size[member.argmax(axis=1)] - 1, 1)
    other = np.where(member, np.inf, distance @ member / size).min(axis=1)
    alone = size[member.argmax(axis=1)] == 1
    return float(np.where(alone, 0, (other - own) / np.maximum(np.maximum(own, other), 1e-12)).mean())


def absent(record: RunRecord, target: DomainImages) -> tuple[AbsentClass, ...]:
    """Every class that the run takes for absent, the likeliest mistake first, with the target images nearest to it."""
    views, classes = record.views, record.classes
    numbers = sorted(map(classes.index, record.outcome.class_set.absent), key=lambda k: views.doubt[k])
    shown = []
    for k in numbers[:SHOWN_ABSENT]:
        images = views.candidates[k][:NEAREST].tolist()
        taken = [f"taken for {classes[views.target_after[i]]}" for i in images]
        looks = zip(target.thumbnails(images), [target.paths[i] for i in images], taken, strict=True)
        shown.append(AbsentClass(classes[k], tuple(Look(image, path, what, "") for image, path, what in looks)))
    return tuple(shown)


def doubtful_labels(record: RunRecord, source: DomainImages) -> ImagesToCheck | Missing:
    """The source images whose label the source-only model contradicts most, although it was trained on it."""
    views, classes = record.views, record.classes
    labels, predicted, sure = views.source_labels, views.source_predicted, views.source_confidence
    if not len(labels):
        return Missing("This run had no source images.")
    order = np.argsort(views.source_own - sure, kind="stable")
    order = order[predicted[order] != labels[order]]
    if not len(order):
        return Missing("The source-only model agrees with every label of the source.")

    def caption(i: int) -> tuple[str, str]:
        return f"labelled {classes[labels[i]]}", f"looks like {classes[predicted[i]]}, {sure[i]:.0%} sure"

    return to_check(order, source, caption)


def to_check(order: np.ndarray, domain: DomainImages, caption: Callable[[int], tuple[str, str]]) -> ImagesToCheck:
    shown = order[:LOOKS].tolist()
    images = zip(shown, domain.thumbnails(shown), strict=True)
    return ImagesToCheck(tuple(Look(image, domain.paths[i], *caption(i)) for i, image in images), len(order))
