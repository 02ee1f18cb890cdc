"""Target labels that the user gives to train with (--target-labels). They enter a run here and nowhere else. `ask`
draws a random part to measure with: it is left out, so that `answer` can measure the new model with it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cdtrans.config import Config, Resolved
from cdtrans.errors import CdtransError, DataError, counted
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.labels import NO_CLASS, UNSURE
from cdtrans.measure.matching import TargetImages, filled_rows, match
from cdtrans.record.files import csv_lines
from cdtrans.record.layout import TARGET_LABELS
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen

if TYPE_CHECKING:
    import torch

    from cdtrans.pairing.pairs import TargetLabels
    from cdtrans.record.run import RunWriter


@dataclass(frozen=True)
class Given:
    """The labels to train with; none without --target-labels."""

    labels: dict[int, int] = field(default_factory=dict)  # index in the target -> index of the class, in order
    measuring: int = 0  # labels of the random part, which are left to measure with

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
        """The labels of the target's images in the file that --target-labels names."""
        if not config.target_labels:
            return cls()
        domain = target.domain
        images = TargetImages(domain.root, domain.paths, target.digests, config.resize, classes, {})
        given = cls._matched(config.target_labels, images, screen)
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
