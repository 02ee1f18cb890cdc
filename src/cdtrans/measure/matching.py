"""The target images that labels are about, by path or else by pixels, so that files may move."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cdtrans.errors import CdtransError, DataError, RunError, counted, named, nearest
from cdtrans.inputs.images import UnreadableImage, decode, pixel_digest, resized
from cdtrans.inputs.scan import LabelledDomain, scan_labelled
from cdtrans.measure.labels import BELONGS, GROUP, UNSURE, LabelRow, LabelsByImage, read_answers, settled_part
from cdtrans.record.outcome import ModelName, StoredLabel
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen


@dataclass(frozen=True)
class TargetImages:
    """The images of a run's target, in the run's order."""

    root: Path  # start of the paths
    paths: tuple[str, ...]
    digests: tuple[str, ...]  # digests of the pixels, at `resize`
    resize: int
    classes: tuple[str, ...]
    trained: dict[str, str]  # label by path and by digest of images that the run was trained with; not in paths

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def _indices(self) -> dict[str, int]:
        """By path and by digest, the first of equal images."""
        by_digest = {digest: index for index, digest in reversed(list(enumerate(self.digests)))}
        return by_digest | {path: index for index, path in enumerate(self.paths)}

    def find(self, path: str, digest: str = "") -> int | None:
        """The index of an image, by its path relative to the target or else by its pixels."""
        return self._indices.get(path, self._indices.get(digest))

    def trained_label(self, path: str, digest: str = "") -> str | None:
        """The label of an image that the run was trained with."""
        return self.trained.get(path, self.trained.get(digest))


@dataclass(frozen=True)
class RunTarget(TargetImages):
    """The target of a finished run, without the images whose labels it was trained with (--answers)."""

    record: RunRecord
    rows: np.ndarray  # [N] the images' indices in the run's whole target
    predicted: dict[ModelName, np.ndarray]  # [N] classes by the source-only model, and by the adapted one; -1: rejected
    rejected: np.ndarray  # [N] bool, images that the run's answers have taken for ones of no class
    confidence: np.ndarray  # [N] of the chosen model
    no_class: np.ndarray  # [N] the higher, the less an image is like any class


def read_target(record: RunRecord) -> RunTarget:
    outcome, views = record.outcome, record.views
    paths, digests = record.images.paths["target"], record.images.digests["target"]
    trained = {entry.digest: entry.label for entry in record.trained_labels}
    rows = np.array([i for i, digest in enumerate(digests) if digest not in trained], dtype=np.int64)
    curve, no_class = outcome.class_set.curve, views.no_class[rows]
    rejected = np.zeros(len(rows), dtype=bool) if curve is None else no_class > curve.cut
    predicted: dict[ModelName, np.ndarray] = {"source": np.where(rejected, -1, views.target_before[rows])}
    if outcome.adapted_epoch:
        predicted["adapted"] = np.where(rejected, -1, views.target_after[rows])
    confidence = views.confidence_before if outcome.choice.model == "source" else views.confidence_after
    return RunTarget(
        root=record.root("target"),
        paths=tuple(paths[i] for i in rows),
        digests=tuple(digests[i] for i in rows),
        resize=record.config.resize,
        classes=record.classes,
        trained=trained | {path: trained[d] for path, d in zip(paths, digests, strict=True) if d in trained},
        record=record,
        rows=rows,
        predicted=predicted,
        rejected=rejected,
        confidence=confidence[rows].astype(np.float64),
        no_class=no_class,
    )


def require_untrained(target: RunTarget) -> None:
    """Refuse a run that was trained with the labels of its whole target."""
    if not len(target):
        raise RunError(
            "nothing-to-measure",
            f"'{target.record.folder}' was trained with the labels of all target images, so none is left to measure "
            "with.",
        )


def scan_labels(where: Path, root: Path | None) -> LabelledDomain:
    """Labelled target images. Errors say so, because the source is labelled too."""
    try:
        return scan_labelled(where, root, allow_one_class=True)
    except CdtransError as error:
        raise DataError(error.code, f"The labelled images cannot be used: {error}") from error


def match_classes(labelled: LabelledDomain, classes: tuple[str, ...], where: Path) -> np.ndarray:
    """The labels of a domain as indices into the model's classes, matched by name: [n]."""
    if unknown := [name for name in labelled.classes if name not in classes]:
        raise DataError(
            "class-unknown",
            f"The class {unknown[0]!r} of '{where}' is unknown to the model: {nearest(unknown[0], list(classes))}",
        )
    order = np.array([classes.index(name) for name in labelled.classes], dtype=np.int64)
    return order[np.array(labelled.labels, dtype=np.int64)]


class FileAnswers(NamedTuple):
    """The answers in a file, by kind; those about images by the image's index in the target."""

    occurs: dict[str, bool]  # page 1
    belongs: LabelsByImage  # page 2
    labels: LabelsByImage  # page 3
    groups: LabelsByImage  # names of groups of images of no class


def match(file: Path, target: TargetImages, screen: Screen) -> FileAnswers:
    """The answers in a file about the target, one of each kind per image; contradicting rows are left out with a
    warning."""
    occurs, filled, left = read_answers(file, target.classes)
    if left:
        screen.say(f"{counted(left, 'row has', 'rows have')} no answer yet, and are left for later.")
    of_kind: dict[str, dict[int, list[LabelRow]]] = {BELONGS: {}, "": {}, GROUP: {}}
    strange, trained = [], 0
    for row in filled:
        index, trained_as = find(row, file, target)
        if index is not None:
            of_kind[row.part if row.part in of_kind else ""].setdefault(index, []).append(row)
        elif trained_as is not None:
            trained += 1
        else:
            strange.append(row.path)
    if trained:
        are = counted(trained, "label is of an image", "labels are of images")
        screen.say(f"{are} that the model was trained with, and not used to measure it.")
    if strange:
        problem = f"{len(strange)} of {len(filled)} labelled images of '{file}' are not in the target: {named(strange)}"
        if len(strange) == len(filled):
            raise DataError("images-not-in-target", f"{problem}; give paths relative to '{target.root}'.")
        screen.warn(f"{problem}; they are skipped.")
    belongs, labels, groups = (one_each(by_image, target, screen) for by_image in of_kind.values())
    different = {entry.label for entry in labels.values() if entry.label != UNSURE}
    if len(different) == 1 and len(labels) > 1:
        screen.warn(f"All labels of '{file}' are {different.pop()!r}; if the target has other classes too, label some.")
    return FileAnswers(occurs, belongs, labels, groups)


def one_each(by_image: dict[int, list[LabelRow]], target: TargetImages, screen: Screen) -> LabelsByImage:
    """The label of every image, without images whose rows contradict each other."""
    labels: LabelsByImage = {}
    contradicting = []
    for index, same in by_image.items():
        names = sorted({row.label for row in same})
        if len(names) > 1:
            contradicting.append(f"{target.paths[index]}: {' or '.join(names)}")
        else:
            part = settled_part(*(row.part for row in same))
            labels[index] = StoredLabel(target.paths[index], target.digests[index], names[0], part)
    if contradicting:
        have = counted(len(contradicting), "image has", "images have")
        screen.warn(f"{have} contradicting labels, which are left out ({named(contradicting)}): keep one of each.")
    return labels


def find(row: LabelRow, file: Path, target: TargetImages) -> tuple[int | None, str | None]:
    """The index of a row's image, or else the label that it was trained with. The image is found by its path relative
    to the target, or else by its pixels."""
    path = os.path.normpath(row.path)
    known = target.find(path, row.digest), target.trained_label(path, row.digest)
    if known != (None, None):
        return known
    for folder in (Path(), file.parent, target.root):  # an absolute path stays itself
        if (folder / row.path).is_file():
            try:
                digest = pixel_digest(resized(decode(folder / row.path), target.resize))
            except UnreadableImage:
                break
            return target.find("", digest), target.trained_label("", digest)
    return None, None
