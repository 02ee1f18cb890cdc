"""The user's word about the target: --target-classes, --other-classes, and a file of answers (--answers): which classes
occur, which images belong to none, and labels to train with. Target labels enter a run here and nowhere else. `ask`
draws a random part to measure with: it is left out, so that `answer` can measure the new model with it."""

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from cdtrans.config import Config, Resolved
from cdtrans.errors import CdtransError, DataError, counted, named, nearest
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.labels import (
    BELONGS,
    CLASS_ABSENT,
    CLASS_OCCURS,
    GROUP,
    ONE_CLASS,
    UNSURE,
    contradiction,
    read_answers,
    require_agreement,
)
from cdtrans.measure.matching import TargetImages, match
from cdtrans.record.files import csv_lines
from cdtrans.record.layout import GIVEN
from cdtrans.record.outcome import NO_CLASS, NoClassCurve
from cdtrans.record.probabilities import fit_curve
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen

if TYPE_CHECKING:
    import torch

    from cdtrans.methods.base import Method
    from cdtrans.pairing.pairs import TargetLabels
    from cdtrans.record.run import RunWriter

EVERY_CLASS = "all"
ENOUGH_ANSWERS = 12  # images of page 2: if all of so many show a class, the others are taken to


def told_classes(config: Config, classes: tuple[str, ...]) -> list[str] | None:
    """The source's classes that occur in the target by --target-classes, in the source's order; None if not said."""
    told = config.target_classes
    if told is None:
        return None
    if isinstance(told, str):
        if told == EVERY_CLASS and EVERY_CLASS not in classes:
            return list(classes)
        is_file = os.path.isfile(told)  # False for a list that is too long to be a path
        told = Path(told).read_text("utf-8-sig", "surrogateescape").splitlines() if is_file else told.split(",")
    names = {name.strip() for name in told} - {""}
    if unknown := sorted(names - set(classes)):
        raise DataError(
            "class-unknown",
            f"--target-classes names '{unknown[0]}', no class of the source; {nearest(unknown[0], list(classes))}",
        )
    if len(names) < 2:
        raise DataError(
            "too-few-classes",
            f"--target-classes names {counted(len(names), 'class', 'classes')}; a classifier needs at least two.",
        )
    return [name for name in classes if name in names]


@dataclass(frozen=True)
class Given:
    """The user's word about the target; nothing by default."""

    labels: dict[int, int] = field(default_factory=dict)  # index in the target -> index of the class, in order
    measuring: int = 0  # labels of the random part, which are left to measure with
    occurs: dict[str, bool] = field(default_factory=dict)  # classes that somebody was asked about
    none: dict[int, bool] = field(default_factory=dict)  # index in the target -> whether it belongs to no class
    occurring: tuple[str, ...] | None = None  # the classes that occur in the target; None if nobody has said
    class_source: Literal["asked", "told"] | None = None  # where that is known from
    others: bool | None = None  # whether the target shows images of no class

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def require(config: Config, classes: tuple[str, ...]) -> None:
        """Refuse answers that cannot be read, name an unknown class or contradict each other or the settings, before
        anything is decoded."""
        if not config.answers:
            return
        answers, told = read_answers(Path(config.answers), classes), config.target_classes
        labels = {row.label for row in answers.images if row.part != GROUP}
        where = f"'{config.answers}' and --target-classes"
        if told is not None:
            require_agreement({name: name in told for name in classes}, labels, classes, where)
            if wrong := [name for name, there in answers.occurs.items() if there != (name in told)]:
                raise contradiction(where, f"the class '{wrong[0]}' occurs, and it does not")
        if config.other_classes is False and NO_CLASS in labels:
            raise contradiction(f"'{config.answers}' and --other-classes", "there are images of no class, and none")

    @classmethod
    def read(
        cls,
        config: Resolved,
        classes: tuple[str, ...],
        target: Decoded[UnlabelledDomain],
        method: "type[Method]",
        screen: Screen,
    ) -> "Given":
        """The answers about the target in the file that --answers names, and what other settings say of its classes."""
        told = config.target_classes if isinstance(config.target_classes, list) else None
        given = cls()
        if config.answers:
            domain = target.domain
            images = TargetImages(domain.root, domain.paths, target.digests, config.resize, classes, {})
            given = cls._matched(config.answers, images, method, screen)
            given.announce(config.answers, len(target), screen)
        asked = [name for name in classes if given.occurs.get(name, True)] if given.occurs else None
        source: Literal["asked", "told"] | None = "told" if told else "asked" if asked else None
        others, none = config.other_classes, given.none.values()
        if others is None and (any(none) or len(none) >= min(ENOUGH_ANSWERS, len(target))):
            others = any(none)
        occurring = tuple(told or asked or ()) or None
        return replace(given, occurring=occurring, class_source=source, others=others)

    @classmethod
    def _matched(cls, file: str, images: TargetImages, method: "type[Method]", screen: Screen) -> "Given":
        """All but the random part, and without labels that the method cannot use."""
        answers = match(Path(file), images, screen)
        kept = sorted((i, entry.label) for i, entry in answers.labels.items() if entry.part != "random")
        labels = {i: images.classes.index(name) for i, name in kept if name not in (UNSURE, NO_CLASS)}
        if labels and not method.takes_target_labels:
            screen.warn(f"This method cannot train with labels: those of '{file}' are not used, its other answers are.")
            labels = {}
        none = {i: entry.label == NO_CLASS for i, entry in sorted(answers.belongs.items()) if entry.label != UNSURE}
        return cls(labels, len(answers.labels) - len(kept), answers.occurs, none)

    def announce(self, file: str, images: int, screen: Screen) -> None:
        """Say what is used of the file; an error if nothing is."""
        if self.measuring:
            kept = counted(self.measuring, "label of the random part is", "labels of the random part are")
            screen.say(f"{kept} kept for measuring ('cdtrans answer'); remove the column 'part' to train with all.")
        if not (self.labels or self.occurs or self.none):
            raise DataError(
                "no-label-to-train-with",
                f"No label in '{file}' can be used for training: they belong to the random part, or are '{UNSURE}' or "
                f"'{NO_CLASS}', or the method takes none; label more images, or remove the column 'part' to train with "
                "the random part too.",
            )
        if self.occurs:
            absent = [name for name, there in self.occurs.items() if not there]
            do = counted(len(absent), "class does", "classes do")
            screen.say(f"By the answers {do} not occur{': ' if absent else ''}{named(absent)}.")
        if self.none:
            none = f"{sum(self.none.values())} of {counted(len(self.none), 'image')}"
            screen.say(f"By the answers {none} belong to none of the classes.")
        if self.labels:
            screen.say(f"The run trains with the labels of {len(self)} of {images} target images.")
        if len(self) == images:
            screen.warn("Every target image has a label, so none is left to measure the accuracy with.")

    @classmethod
    def warn_of_changes(
        cls, run: RunRecord, config: Resolved, method: "type[Method]", target: UnlabelledDomain, screen: Screen
    ) -> None:
        """A finished run is not trained again: warn if the file now has other answers."""
        if not config.answers:
            return
        paths, digests = run.images.paths["target"], run.images.digests["target"]
        images = TargetImages(target.root, paths, digests, config.resize, run.classes, {})
        try:
            now = cls._matched(config.answers, images, method, Screen(quiet=True))
        except CdtransError:  # none of them is about the target
            now = cls()
        if now.digest() != run.data.answers:
            screen.warn(
                f"The answers in '{config.answers}' have changed since this run was made with them; give another --out "
                "to use them as they are now."
            )

    def digest(self) -> str | None:
        """Their entry in data.json: a resumed run must find the same answers."""
        used = [[*answers.items()] for answers in (self.labels, self.occurs, self.none)]
        return hashlib.sha256(repr(used).encode()).hexdigest() if any(used) else None

    def write(self, run: "RunWriter", classes: tuple[str, ...], target: Decoded[UnlabelledDomain]) -> None:
        """Record them, as a file of answers. Later verbs must not use images with a label to measure the model."""
        paths, digests = target.domain.paths, target.digests
        rows = [("", name, CLASS_OCCURS if there else CLASS_ABSENT, "") for name, there in self.occurs.items()]
        rows += [(paths[i], NO_CLASS if none else ONE_CLASS, BELONGS, digests[i]) for i, none in self.none.items()]
        rows += [(paths[i], classes[label], "", digests[i]) for i, label in self.labels.items()]
        if rows:
            run.write(GIVEN, csv_lines([("path", "label", "part", "digest"), *rows]))

    def curve(self, scores: np.ndarray) -> NoClassCurve | None:
        """Through the answers about images, by the scores of the whole target, [Nt]."""
        return fit_curve(scores, scores[list(self.none)], np.array([*self.none.values()], dtype=bool))

    def tensors(self, device: "torch.device") -> "TargetLabels | None":
        import torch

        from cdtrans.pairing.pairs import TargetLabels

        if not self.labels:
            return None
        images, labels = zip(*self.labels.items(), strict=True)
        return TargetLabels(torch.tensor(images, device=device), torch.tensor(labels, device=device))
