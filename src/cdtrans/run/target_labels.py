"""Target labels that the user gives to train with (--target-labels). They enter a run here and nowhere else. `ask`
draws a random part to measure with: it is left out, so that `answer` can measure the new model with it."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cdtrans.config import Config, Resolved
from cdtrans.errors import CdtransError, DataError, SettingsError, counted, nearest
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.labels import UNSURE
from cdtrans.measure.matching import TargetImages, filled_rows, match
from cdtrans.record.files import csv_lines
from cdtrans.record.layout import TARGET_LABELS
from cdtrans.record.outcome import NO_CLASS
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen

if TYPE_CHECKING:
    import torch

    from cdtrans.pairing.pairs import TargetLabels
    from cdtrans.record.run import RunWriter


EVERY_CLASS = "all"


def told_classes(config: Config, classes: tuple[str, ...]) -> list[str] | None:
    """The source's classes that occur in the target by --target-classes, in the source's order; None if not said."""
    told = config.target_classes
    if told is None:
        return None
    if isinstance(told, str):
        if told == EVERY_CLASS and EVERY_CLASS not in classes:
            return list(classes)
        is_file = Path(told).is_file()
        told = Path(told).read_text(encoding="utf-8-sig").splitlines() if is_file else told.split(",")
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
    """The labels to train with; none without --target-labels."""

    labels: dict[int, int] = field(default_factory=dict)  # index in the target -> index of the class, in order
    measuring: int = 0  # labels of the random part, which are left to measure with
    occurring: tuple[str, ...] | None = None  # the classes that occur in the target; None if nobody has said
    class_source: Literal["asked", "told"] | None = None  # where that is known from
    others: bool | None = None  # whether the target shows images of no class

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def require(config: Config, classes: tuple[str, ...]) -> None:
        """Refuse a file that cannot be read, or names an unknown class, before anything is decoded."""
        if config.target_labels:
            filled_rows(Path(config.target_labels), classes)

    @classmethod
    def read(
        cls, config: Resolved, classes: tuple[str, ...], target: Decoded[UnlabelledDomain], screen: Screen
    ) -> "Given":
        """The labels of the target's images in the file that --target-labels names, and the classes that occur."""
        told = cls(
            occurring=tuple(config.target_classes) if isinstance(config.target_classes, list) else None,
            class_source="told" if config.target_classes else None,
            others=config.other_classes,
        )
        if not config.target_labels:
            return told
        domain = target.domain
        images = TargetImages(domain.root, domain.paths, target.digests, config.resize, classes, {})
        matched = cls._matched(config.target_labels, images, screen)
        given = replace(told, labels=matched.labels, measuring=matched.measuring)
        if given.measuring:
            kept = counted(given.measuring, "label of the random part is", "labels of the random part are")
            screen.say(f"{kept} kept for measuring ('cdtrans answer'); remove the column 'part' to train with all.")
        if not given:
            raise DataError(
                "no-label-to-train-with",
                f"No label in '{config.target_labels}' can be used for training: they belong to the random part, or "
                f"are '{UNSURE}' or '{NO_CLASS}'; label more images, or remove the column 'part' to train with the "
                "random part too.",
            )
        screen.say(f"The run trains with the labels of {len(given)} of {len(target)} target images.")
        if len(given) == len(target):
            screen.warn("Every target image has a label, so none is left to measure the accuracy with.")
        return given

    @classmethod
    def _matched(cls, file: str, images: TargetImages, screen: Screen) -> "Given":
        """All but the random part."""
        matched = match(Path(file), images, screen)
        kept = sorted((i, entry.label) for i, entry in matched.items() if entry.part != "random")
        labels = {i: images.classes.index(name) for i, name in kept if name not in (UNSURE, NO_CLASS)}
        return cls(labels, len(matched) - len(kept))

    @classmethod
    def warn_of_changes(cls, run: RunRecord, config: Resolved, target: UnlabelledDomain, screen: Screen) -> None:
        """A finished run is not trained again: warn if the file now has other labels to train with."""
        if not config.target_labels:
            return
        paths, digests = run.images.paths["target"], run.images.digests["target"]
        images = TargetImages(target.root, paths, digests, config.resize, run.classes, {})
        try:
            now = cls._matched(config.target_labels, images, Screen(quiet=True))
        except CdtransError:  # none of them is in the target
            now = cls()
        if now.digest() != run.data.target_labels:
            screen.warn(
                f"The labels in '{config.target_labels}' have changed since this run was trained with them; give "
                "another --out to train with them as they are now."
            )

    def digest(self) -> str | None:
        """Their entry in data.json: a resumed run must find the same labels."""
        return hashlib.sha256(repr(list(self.labels.items())).encode()).hexdigest() if self.labels else None

    def write(self, run: "RunWriter", classes: tuple[str, ...], target: Decoded[UnlabelledDomain]) -> None:
        """Record the images that later verbs must not use to measure the model."""
        if self.labels:
            paths = target.domain.paths
            rows = [(paths[i], classes[label], target.digests[i]) for i, label in self.labels.items()]
            run.write(TARGET_LABELS, csv_lines([("path", "label", "digest"), *rows]))

    def tensors(self, device: "torch.device") -> "TargetLabels | None":
        import torch

        from cdtrans.pairing.pairs import TargetLabels

        if not self.labels:
            return None
        images, labels = zip(*self.labels.items(), strict=True)
        return TargetLabels(torch.tensor(images, device=device), torch.tensor(labels, device=device))
