"""Target labels that the user gives to train with (--target-labels). They enter a run here and nowhere
else. `ask` draws a random part to measure with: it is left out, so that `answer` can measure the new model with it."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdtrans.config import Config
from cdtrans.errors import CdtransError, counted
from cdtrans.inputs.domains import UnlabelledDomain
from cdtrans.measure.labels import NO_CLASS, UNSURE, Answers
from cdtrans.measure.matching import TargetImages, filled_rows, match
from cdtrans.record.files import csv_line
from cdtrans.record.run_folder import TARGET_LABELS, trained_labels
from cdtrans.run.prepare import DomainPixels
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import target_digests, target_paths

if TYPE_CHECKING:
    import torch

    from cdtrans.pairing.pairs import TargetLabels
    from cdtrans.record.run import Run

Given = dict[int, int]  # index in the target -> index of the class


def require_target_labels(config: Config, classes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be read, or names an unknown class, before anything is decoded."""
    if config.target_labels:
        filled_rows(Path(config.target_labels), classes)


def require_use(method: Any, config: Config) -> None:
    """Refuse a method that would ignore the labels."""
    if config.target_labels and not method.takes_target_labels:
        raise CdtransError(
            f"The method '{config.method}' cannot train with --target-labels; leave --method out, or add the labelled "
            "images to the source's class folders."
        )


def read_target_labels(
    config: Config, classes: tuple[str, ...], target: UnlabelledDomain, pixels: DomainPixels, screen: Screen
) -> Given:
    """The labels to train with; none without --target-labels."""
    if not config.target_labels:
        return {}
    assert isinstance(config.resize, int), "the configuration has been resolved"
    file = Path(config.target_labels)
    images = TargetImages(target.root, target.paths, tuple(pixels.digests), config.resize, classes, {})
    answers = match(file, images, {}, screen)
    given = to_train_with(answers, classes)
    if measures := sum(answer.part == "random" for answer in answers.values()):
        kept = counted(measures, "label of the random part is", "labels of the random part are")
        screen.say(f"{kept} kept for measuring ('cdtrans answer'); remove the column 'part' to train with all.")
    if not given:
        raise CdtransError(
            f"No label in '{file}' can be used for training: they belong to the random part, or are '{UNSURE}' or "
            f"'{NO_CLASS}'; label more images, or remove the column 'part' to train with the random part too."
        )
    screen.say(f"The run trains with the labels of {len(given)} of {len(target)} target images.")
    if len(set(given.values())) == 1 and len(given) > 1:
        only = classes[next(iter(given.values()))]
        screen.warn(f"All labels of '{file}' are {only!r}; if the target has other classes too, label some of them.")
    if len(given) == len(target):
        screen.warn("Every target image has a label, so none is left to measure the accuracy with.")
    return given


def to_train_with(answers: Answers, classes: tuple[str, ...]) -> Given:
    """All but the random part."""
    kept = {i: answer.label for i, answer in answers.items() if answer.part != "random"}
    return {i: classes.index(label) for i, label in kept.items() if label not in (UNSURE, NO_CLASS)}


def warn_of_changed_labels(
    run: Path, config: Config, classes: tuple[str, ...], target: UnlabelledDomain, screen: Screen
) -> None:
    """A finished run is not trained again: warn if the file now has other labels to train with."""
    if not config.target_labels:
        return
    assert isinstance(config.resize, int), "the configuration has been resolved"
    file, digests = Path(config.target_labels), target_digests(run)
    images = TargetImages(target.root, tuple(target_paths(run)), digests, config.resize, classes, {})
    try:
        now = to_train_with(match(file, images, {}, Screen(quiet=True)), classes)
    except CdtransError:  # none of them is in the target
        now = {}
    if {digests[i]: classes[label] for i, label in sorted(now.items())} != trained_labels(run):
        screen.warn(
            f"The labels in '{file}' have changed since this run was trained with them; give another --out to train "
            "with them as they are now."
        )


def describe_labels(given: Given) -> dict[str, Any]:
    """For data.json: a resumed run must find the same labels."""
    if not given:
        return {}
    digest = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()
    return {"target_labels": {"images": len(given), "fingerprint": digest}}


def write_target_labels(
    run: "Run", given: Given, classes: tuple[str, ...], target: UnlabelledDomain, pixels: DomainPixels
) -> None:
    """target_labels.csv: the images that later verbs must not use to measure the model."""
    if given:
        rows = [(target.paths[i], classes[label], pixels.digests[i]) for i, label in sorted(given.items())]
        run.write(TARGET_LABELS, b"".join(map(csv_line, [("path", "label", "digest"), *rows])))


def as_tensors(given: Given, device: "torch.device") -> "TargetLabels | None":
    import torch

    from cdtrans.pairing.pairs import TargetLabels

    if not given:
        return None
    images, labels = zip(*sorted(given.items()), strict=True)
    return TargetLabels(torch.tensor(images, device=device), torch.tensor(labels, device=device))
