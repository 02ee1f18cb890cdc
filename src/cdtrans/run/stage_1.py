"""Stage 1 from another run (`--source-model RUN`): its source-only model, if this run would have trained one like it.

The model is copied into the run's own `source/`, and from then on nothing reads RUN again. The two runs must have been
trained on the same source images: otherwise "source-only" would mean another source, and images that this run holds out
may be known to the model. That one rule covers --holdout and --seed too, which decide the split."""

import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdtrans.config import Config
from cdtrans.errors import CdtransError

if TYPE_CHECKING:
    from cdtrans.model.card import Card
    from cdtrans.model.network import Network

SOURCE = "source"  # the folder of the source-only model in a run's; it is there once stage 1 is finished
# What decides how the model is built and what it sees. The first block's residual is stage 2's alone, and the precision
# may differ: stage 1 from a GPU can be adapted on a CPU.
SAME = ("backbone", "backbone_args", "neck", "resize", "crop", "mean", "std")
OR_TRAIN = "or leave --source-model out to train stage 1 here"


def stage_1_for(out: Path, source_model: str | None) -> Path | None:
    """The run that has stage 1: this one once it is finished or copied here, or the one named; None if it must still be
    trained."""
    if (out / SOURCE).exists():
        return out
    return Path(source_model) if source_model else None


def take_source(run: Path, card: "Card", drop_path: float) -> "tuple[Network, Card]":
    """A run's source-only model and its card, which is this run's `card` but for how it was trained."""
    from cdtrans.model.card import build_model, load_model

    require_stage_1(run)
    taken, theirs = load_model(run / SOURCE)
    _check_classes(run, theirs.classes, card.classes)
    differ = [name for name in SAME if getattr(theirs, name) != getattr(card, name)]
    if differ:
        what = ", ".join(f"{name}: {getattr(theirs, name)} there, {getattr(card, name)} here" for name in differ)
        raise CdtransError(f"Stage 1 of '{run}' is another kind of model ({what}); give the same settings, {OR_TRAIN}.")
    model = build_model(card, drop_path=drop_path)
    model.load_state_dict(taken.state_dict())
    return model, replace(card, weights=theirs.weights, epoch=theirs.epoch)


def require_stage_1(run: Path) -> None:
    if not (run / SOURCE).is_dir():
        raise CdtransError(
            f"'{run}' has no finished stage 1, which is a '{SOURCE}' model in it; wait for it, {OR_TRAIN}."
        )


def _check_classes(run: Path, there: tuple[str, ...], here: tuple[str, ...]) -> None:
    if there != here:
        first = next((a, b) for a, b in zip_longest(there, here) if a != b)
        named = " and ".join(
            f"{place} {'nothing' if name is None else repr(name)}"
            for place, name in zip(("there", "here"), first, strict=True)
        )
        raise CdtransError(
            f"Stage 1 of '{run}' has other classes than the source ({len(there)} there, {len(here)} here; where they "
            f"first differ stands {named}); give a run of the same classes in the same order, {OR_TRAIN}."
        )


def check_same_images(run: Path, config: Config, source: dict[str, Any]) -> None:
    """`source` is what this run's data.json will say of the images that it trains on."""
    file = run / "data.json"
    try:
        there = json.loads(file.read_text(encoding="utf-8"))["source"]
        images, held, known = there["images"], there["held_out"], there["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CdtransError(
            f"'{file}' does not tell which images its stage 1 was trained on; take another run."
        ) from error
    if known != source["fingerprint"]:
        raise CdtransError(
            f"Stage 1 of '{run}' was trained on other source images ({images}, and {held} held out, there; "
            f"{source['images']}, and {source['held_out']} held out with --holdout {config.holdout} --seed "
            f"{config.seed}, here); give the same source, --holdout and --seed, {OR_TRAIN}."
        )
