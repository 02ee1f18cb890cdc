"""Find the images that a labels file refers to: by path, or else by pixels, so that moved files are found."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cdtrans.errors import CdtransError, counted, named, nearest
from cdtrans.inputs.images import UnreadableImage, decode, pixel_digest, resized
from cdtrans.measure.labels import (
    NO_CLASS,
    UNSURE,
    Answer,
    Answers,
    Part,
    Row,
    read_rows,
    require_clear,
    settled_part,
)
from cdtrans.runtime.screen import Screen


@dataclass(frozen=True)
class TargetImages:
    """The images of a run's target, in the run's order."""

    root: Path  # that the paths are relative to
    paths: tuple[str, ...]
    digests: tuple[str, ...]  # of the pixels, at `resize`
    resize: int
    classes: tuple[str, ...]
    trained: dict[str, str]  # path -> label and digest -> label of images that the run was trained with; not in paths

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def _by_path(self) -> dict[str, int]:
        return {path: index for index, path in enumerate(self.paths)}

    @cached_property
    def _by_digest(self) -> dict[str, int]:
        return {digest: index for index, digest in reversed(list(enumerate(self.digests)))}

    def find(self, path: str, digest: str = "") -> int | None:
        """The index of an image, by its path relative to the target or else by its pixels."""
        return self._by_path.get(path, self._by_digest.get(digest))

    def trained_label(self, path: str, digest: str = "") -> str | None:
        """The label of an image that the run was trained with."""
        return self.trained.get(path, self.trained.get(digest))


def filled_rows(file: Path, classes: tuple[str, ...]) -> tuple[list[Row], int]:
    """The rows of a file that have a label, all of known classes, and how many rows there are."""
    rows = read_rows(file)
    filled = [row for row in rows if row.label]
    if not filled:
        raise CdtransError(f"'{file}' holds {counted(len(rows), 'row')} and no label yet: fill in the column 'label'.")
    known = [*classes, UNSURE, NO_CLASS]
    unknown = [row for row in filled if row.label not in known]
    if unknown:
        row, more = unknown[0], f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise CdtransError(
            f"The class {row.label!r} in {row.place} of '{file}'{more} is unknown: {nearest(row.label, known)}"
        )
    require_clear({row.label for row in filled} & set(classes))
    return filled, len(rows)


def match(file: Path, target: TargetImages, parts: dict[int, Part], screen: Screen) -> Answers:
    """The labels of a file as answers for images of the target; `parts` are those of images that were asked for."""
    filled, rows = filled_rows(file, target.classes)
    if len(filled) < rows:
        have = "has" if len(filled) == 1 else "have"
        screen.say(f"{len(filled)} of {rows} rows {have} a label; the others are left for later.")
    found: dict[int, list[Row]] = {}
    strange, trained = [], 0
    for row in filled:
        index, trained_as = find(row, file, target)
        if index is not None:
            found.setdefault(index, []).append(row)
        elif trained_as is not None:
            trained += 1
        else:
            strange.append(row.path)
    if trained:
        they = counted(
            trained,
            "label is of an image that the model was trained with; it is",
            "labels are of images that the model was trained with; they are",
        )
        screen.say(f"{they} not used to measure it.")
    if strange:
        problem = f"{len(strange)} of {len(filled)} labelled images of '{file}' are not in the target: {named(strange)}"
        if not found and not trained:
            raise CdtransError(f"{problem}; give paths relative to '{target.root}'.")
        screen.warn(f"{problem}; they are skipped.")
    return settle(found, parts, target, screen)


def find(row: Row, file: Path, target: TargetImages) -> tuple[int | None, str | None]:
    """The index of a row's image, or else the label that it was trained with. It is found by its path relative to the
    target, or else by its pixels, so that moved and renamed files are found."""
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


def settle(found: dict[int, list[Row]], parts: dict[int, Part], target: TargetImages, screen: Screen) -> Answers:
    """One answer per image; contradicting rows are left out with a warning."""
    answers: Answers = {}
    contradicting = []
    for index, rows in found.items():
        labels = sorted({row.label for row in rows})
        if len(labels) > 1:
            contradicting.append(f"{target.paths[index]}: {' or '.join(labels)}")
        else:
            answers[index] = Answer(labels[0], settled_part(parts.get(index, ""), *(row.part for row in rows)))
    if contradicting:
        have = counted(len(contradicting), "image has", "images have")
        advice = f"{'it is' if len(contradicting) == 1 else 'they are'} left out; keep one label of each"
        screen.warn(f"{have} contradicting labels ({named(contradicting)}): {advice}.")
    elsewhere = sum(answers[i].part == "random" != parts.get(i) for i in answers)
    if parts and elsewhere:
        are = counted(elsewhere, "label is", "labels are")
        screen.say(f"{are} of a random part that was drawn for another run, and used to measure this one too.")
    repeated = sum(len(rows) - 1 for rows in found.values()) - sum(len(found[i]) - 1 for i in found if i not in answers)
    if repeated:
        screen.say(f"{counted(repeated, 'repeated label was', 'repeated labels were')} not counted again.")
    return answers
