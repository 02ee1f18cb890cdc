"""The sections of the page that show images: pairs with heat maps, and images to check."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cdtrans.errors import CdtransError
from cdtrans.inputs.batches import Images
from cdtrans.network.network import Network
from cdtrans.network.weights import load_model
from cdtrans.record.layout import WEIGHTS
from cdtrans.record.model import Card
from cdtrans.reporting.attention import cross_attention, why_no_heat_maps
from cdtrans.reporting.pictures import Pictures, heated, in_parallel, jpeg
from cdtrans.reporting.record import Record, Round
from cdtrans.reporting.sections import Missing
from cdtrans.runtime.device import pick_device
from cdtrans.runtime.screen import Task

ROUNDS = 4  # of which pairs are shown: the first, the last, and some in between
PAIRS = 72  # shown in all: about 1.5 MB of page
LOOKS = 24  # images in each section of images worth a look: full rows on a desktop and on a phone
BATCH = 16  # pairs in a pass of the model
SEED = 0  # of the choice of pairs, so that equal runs have equal pages


@dataclass(frozen=True)
class Pair:
    round: int
    kept: bool
    source_class: str
    target_class: str  # the pseudo-label
    source_path: str
    target_path: str
    source: str | None  # data URLs; None for a missing file
    target: str | None
    heat: str | None


@dataclass(frozen=True)
class Gallery:
    pairs: tuple[Pair, ...]
    of: int  # proposed pairs of all rounds; `pairs` is a sample of them
    model: str | None  # the model of the heat maps, "adapted" or "source"
    why: str  # why there are no heat maps, or empty

    @property
    def class_names(self) -> set[str]:
        return {name for pair in self.pairs for name in (pair.source_class, pair.target_class)}


@dataclass(frozen=True)
class Look:
    """An image to check, with a headline and a detail."""

    picture: str | None
    path: str
    headline: str
    detail: str


@dataclass(frozen=True)
class Looks:
    images: tuple[Look, ...]
    of: int  # images in all; these stand out most


def gallery(record: Record, source: Pictures, target: Pictures, task: Task) -> Gallery | Missing:
    """A sample of pairs with the attention of the source image over the target image, in the adapted model. A run that
    was stopped before adaptation has the source-only model's."""
    if not record.rounds or not record.classes or not record.target:
        return Missing("The run folder has no pairs, or no images.csv with the images of the pairs.")
    chosen = sample_pairs(record.rounds)
    sources = source.thumbnails(r.source[i] for r, i in chosen)
    targets = target.thumbnails(r.target[i] for r, i in chosen)
    model = heat_map_model(record.run)
    heat, why = heat_maps(record, model, [(source[r.source[i]], target[r.target[i]]) for r, i in chosen], task)
    pairs = tuple(
        Pair(
            round=r.number,
            kept=bool(r.kept[i]),
            source_class=record.classes[r.source_labels[i]],
            target_class=record.classes[r.target_labels[i]],
            source_path=record.source[r.source[i]],
            target_path=record.target[r.target[i]],
            source=source_picture,
            target=target_picture,
            heat=heat_map,
        )
        for (r, i), source_picture, target_picture, heat_map in zip(chosen, sources, targets, heat, strict=True)
    )
    return Gallery(pairs, sum(len(r.kept) for r in record.rounds), model, why)


def sample_pairs(rounds: list[Round]) -> list[tuple[Round, int]]:
    """Pairs of a few rounds, kept and rejected ones in equal numbers as far as possible, the classes in turn. Sorted by
    round, the last first, then by class."""
    some = np.linspace(0, len(rounds) - 1, min(ROUNDS, len(rounds))).round().astype(int)
    shown = [rounds[k] for k in np.unique(some)]
    number = np.concatenate([np.full(len(r.kept), n) for n, r in enumerate(shown)])  # [P]
    place = np.concatenate([np.arange(len(r.kept)) for r in shown])
    kept = np.concatenate([r.kept for r in shown])
    label = np.concatenate([r.source_labels for r in shown]).astype(np.int64)
    state = 2 * number + kept
    order = np.random.default_rng(SEED).permutation(len(number))
    order = order[np.argsort(turn(state[order] * (label.max() + 1) + label[order]), kind="stable")]  # classes in turn
    order = order[np.argsort(turn(state[order]), kind="stable")]  # states and rounds in turn
    distinct: dict[tuple[int, int, int], int] = {}  # a mutual pair is in the list twice
    for i in order.tolist():
        r = shown[number[i]]
        distinct.setdefault((number[i], r.source[place[i]], r.target[place[i]]), i)
        if len(distinct) == PAIRS:
            break
    chosen = np.array(list(distinct.values()))
    chosen = chosen[np.lexsort((~kept[chosen], label[chosen], -number[chosen]))]
    return [(shown[number[i]], int(place[i])) for i in chosen]


def turn(kinds: np.ndarray) -> np.ndarray:
    """[N] -> [N]: how many of the same kind come before each."""
    order = np.argsort(kinds, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(kinds[order]) != 0))
    counted = np.arange(len(kinds)) - np.repeat(starts, np.diff(np.append(starts, len(kinds))))
    turns = np.empty_like(counted)
    turns[order] = counted
    return turns


Pixels = np.ndarray | None


def heat_map_model(run: Path) -> str | None:
    """The folder of the model that the heat maps are made with."""
    return next((name for name in ("adapted", "source") if (run / name / WEIGHTS).exists()), None)


def heat_maps(
    record: Record, name: str | None, pairs: list[tuple[Pixels, Pixels]], task: Task
) -> tuple[list[str | None], str]:
    """A heat map for every pair whose files exist, or why there are none."""
    maps: list[str | None] = [None] * len(pairs)
    if name is None:
        return maps, "There are no heat maps, because the run folder has no model."
    try:
        model, card = load_model(record.run / name)
    except CdtransError as error:
        return maps, f"There are no heat maps: {error}"
    if why := why_no_heat_maps(model):
        return maps, why
    device = device_for(record)
    model.to(device)
    whole = [(n, s, t) for n, (s, t) in enumerate(pairs) if s is not None and t is not None]
    for start in range(0, len(whole), BATCH):
        places, sources, targets = zip(*whole[start : start + BATCH], strict=True)
        weights = look(model, card, np.stack(sources), np.stack(targets), device)
        for n, heat_map in zip(places, in_parallel(heat_map_of, targets, weights), strict=True):
            maps[n] = heat_map
        task.advance(len(places))
    return maps, ""


def heat_map_of(pixels: np.ndarray, weights: np.ndarray) -> str:
    return jpeg(heated(pixels, weights))


def look(model: Network, card: Card, source: np.ndarray, target: np.ndarray, device: torch.device) -> np.ndarray:
    """uint8 [B, crop, crop, 3] twice -> the attention over the target's patches, [B, rows, columns]."""
    inputs = []
    for pixels in (source, target):
        rows = np.arange(len(pixels))
        images = Images(pixels, rows, crop=card.crop, mean=card.mean, std=card.std, device=device)
        inputs.append(images.centred(torch.from_numpy(rows).to(images.home)))
    weights: np.ndarray = cross_attention(model, *inputs).float().cpu().numpy()
    return weights


def device_for(record: Record) -> torch.device:
    """The run's device, or the CPU if this machine does not have it."""
    try:
        return pick_device(str(record.config.get("device", "auto")))
    except CdtransError:
        return torch.device("cpu")


def changed(record: Record, target: Pictures) -> Looks | Missing:
    """The target images whose predicted distribution moved furthest."""
    arrays = record.view_arrays("target_before", "target_after", "confidence_before", "confidence_after", "changed")
    if not record.adapted:
        return Missing("There is no adapted model, so no prediction changed.")
    if arrays is None or not record.target:
        return Missing("This run did not keep how each prediction changed (views.npz).")
    before, after, sure_before, sure_after, distance = arrays
    order = np.argsort(-distance, kind="stable")
    order = order[before[order] != after[order]]
    if not len(order):
        return Missing("The adapted model predicts the same class as the source-only model for every target image.")

    def caption(i: int) -> tuple[str, str]:
        return (
            f"{record.classes[before[i]]} → {record.classes[after[i]]}",
            f"{sure_before[i]:.0%} → {sure_after[i]:.0%} sure",
        )

    return _looks(order, target, caption)


def uncertain(record: Record, target: Pictures) -> Looks | Missing:
    """The target images that the selected model is least sure of."""
    when = "before" if record.used_source else "after"
    arrays = record.view_arrays(f"target_{when}", f"confidence_{when}")
    if arrays is None or not record.target:
        return Missing("This run did not keep the confidence of each prediction (views.npz).")
    predicted, sure = arrays
    return _looks(
        np.argsort(sure, kind="stable"), target, lambda i: (record.classes[predicted[i]], f"{sure[i]:.0%} sure")
    )


def mislabelled(record: Record, source: Pictures) -> Looks | Missing:
    """The source images whose label the source-only model contradicts most, although it was trained on it."""
    arrays = record.view_arrays("source_labels", "source_predicted", "source_confidence", "source_own")
    if arrays is not None and not len(arrays[0]):
        return Missing("This run had no source images.")
    if arrays is None or not record.source:
        return Missing("This run did not keep the source-only model's predictions for the source (views.npz).")
    labels, predicted, sure, own = arrays
    order = np.argsort(own - sure, kind="stable")
    order = order[predicted[order] != labels[order]]
    if not len(order):
        return Missing("The source-only model agrees with every label of the source.")

    def caption(i: int) -> tuple[str, str]:
        return f"labelled {record.classes[labels[i]]}", f"looks like {record.classes[predicted[i]]}, {sure[i]:.0%} sure"

    return _looks(order, source, caption)


def _looks(order: np.ndarray, pictures: Pictures, caption: Callable[[int], tuple[str, str]]) -> Looks:
    shown = order[:LOOKS].tolist()
    thumbnails = pictures.thumbnails(shown)
    images = tuple(Look(picture, pictures.paths[i], *caption(i)) for i, picture in zip(shown, thumbnails, strict=True))
    return Looks(images, len(order))
