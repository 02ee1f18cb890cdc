"""Where the source-only network comes from: trained in this run, found in its folder, another run's (`--source-model
RUN`), or, where there are no source images, any timm classifier's (`--source-model FILE`).

Another run's network is copied into this run's `source/`; from then on nothing reads that run again. Both runs must
have been trained on the same source images: otherwise "source-only" would mean another source, and images that this run
holds out may have been trained on. That one rule covers --holdout and --seed too, which decide the split. A run without
source images has the classes and the backbone of the model that it adapts. Needs no torch until a network is made, so
that mistakes are reported at once."""

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from cdtrans.config import Config, Resolved, make_config, require_weights
from cdtrans.errors import CdtransError, RunError, first_of
from cdtrans.record.files import intact
from cdtrans.record.layout import SourceData
from cdtrans.record.model import Card, read_card, save_model
from cdtrans.record.record import RunRecord

if TYPE_CHECKING:
    from torch import Tensor

    from cdtrans.inputs.batches import Images
    from cdtrans.network.encoding import Encoder
    from cdtrans.network.network import Network
    from cdtrans.record.run import Run
    from cdtrans.runtime.screen import Screen

SOURCE = "source"  # the folder of the source-only model in a run's; it is there once stage 1 is finished
# What decides how the network is built and what it sees. The precision may differ: stage 1 from a GPU can be adapted on
# a CPU.
BUILT = ("backbone", "backbone_args", "neck", "taps", "resize", "crop")
SAME = (*BUILT, "mean", "std")
OR_TRAIN = "or leave --source-model out to train stage 1 here"


@dataclass(frozen=True)
class Stage1:
    """Stage 1 of the run in `out`."""

    out: Path
    config: Config

    @property
    def done(self) -> bool:
        """Whether this run has its source-only model."""
        return (self.out / SOURCE).exists()

    @property
    def origin(self) -> Path | None:
        """The run that has the source-only model: this one, or the one named; None if it must still be trained."""
        if self.done:
            return self.out
        return Path(self.config.source_model) if self.config.source_model else None

    @property
    def trains(self) -> bool:
        """Whether this run has to train the network on the source."""
        return self.origin is None and self.config.source_fit == "train"

    def require(self) -> None:
        """Refuse a run without stage 1, or weights that do not exist."""
        if self.origin is not None and self.origin.is_file():
            if self.config.source:
                raise CdtransError(
                    f"'{self.origin}' is a weights file, which works only without source images; leave SOURCE out, "
                    f"give a run instead, {OR_TRAIN}."
                )
        elif self.origin is not None and not self.config.source and not self.origin.exists():
            raise CdtransError(f"There is no run and no weights file '{self.origin}'; check --source-model.")
        elif self.origin is not None:
            require_stage_1(self.origin)
        else:
            require_weights(self.config.weights)

    def without_source(self) -> tuple[Config, tuple[str, ...]]:
        """For a run without source images: settings that describe its model, and the model's classes; neither if there
        is no model."""
        config, origin = self.config, self.origin
        if origin is None:
            return config, ()
        self.require()
        if origin.is_file():
            return make_config(config.to_dict() | {"neck": "none", "taps": 1}), read_classes(config)
        card = read_card(origin / SOURCE)
        return make_config(config.to_dict() | {name: getattr(card, name) for name in BUILT}), card.classes

    def require_same_images(self, source: SourceData) -> None:
        """`source` describes the images that this run trains on."""
        if self.config.source_model and self.config.source and not self.done:
            _check_same_images(Path(self.config.source_model), self.config, source)

    def network(self, config: Resolved, classes: tuple[str, ...]) -> "tuple[Network, Card]":
        """The network before stage 1, or after it if it is done, and its card."""
        from cdtrans.network.weights import make_card

        trained = config.source_fit == "train"
        card = make_card(config, classes, stage="source", epoch=config.source_epochs if trained else 0)
        if self.origin and self.origin.is_file():
            return _from_file(self.origin, card, self.config.drop_path)
        if self.config.source_model and self.origin:
            return _taken(self.origin, card, self.config.drop_path)
        return initial_network(self.config, card, with_weights=not self.done), card

    def carry_out(
        self, run: "Run", encode: "Encoder", images: "Images", labels: "Tensor", card: "Card", screen: "Screen"
    ) -> None:
        """Fit the encoder's network, or load it if that has been done. Afterwards this run has its source-only
        model."""
        network = encode.model
        from cdtrans.network.weights import load_model
        from cdtrans.training.source import fit_source, probe_source

        folder = run.folder / SOURCE
        if self.done:
            with intact(folder, "start again in another --out"):
                network.load_state_dict(load_model(folder)[0].state_dict())
            return
        if self.config.source_model:
            trained = f" ({card.epoch} epochs from {card.weights})" if card.epoch else ""
            screen.say(f"stage 1 is taken from '{self.config.source_model}'{trained}")
            run.log("source_model", run=self.config.source_model, epochs=card.epoch, weights=card.weights)
        elif self.config.source_fit == "probe":
            probe_source(run, network, images, labels, encode=encode, classes=len(card.classes))
        else:
            fit_source(run, network, images, labels, self.config, screen)
        if run.writes:
            save_model(folder, network, card)


def require_stage_1(run: Path) -> None:
    if not (run / SOURCE).is_dir():
        raise CdtransError(f"'{run}' has no finished stage 1 (the model '{SOURCE}'); wait for it, {OR_TRAIN}.")


def initial_network(config: Config, card: "Card", *, with_weights: bool = True) -> "Network":
    """The order of initialisation: seed, backbone, head, then the backbone's weights over it."""
    import torch

    from cdtrans.network.weights import build_model, load_pretrained, load_weights
    from cdtrans.training.state import step_seed

    torch.manual_seed(step_seed(config.seed, "init", 0, 0))
    network = build_model(card, drop_path=config.drop_path)
    if with_weights and config.weights:
        load_weights(network.backbone, Path(config.weights))
    elif with_weights and config.pretrained:
        load_pretrained(network.backbone, config.backbone)
    return network


def _taken(run: Path, card: "Card", drop_path: float) -> "tuple[Network, Card]":
    """A run's source-only network and its card, which equals `card` except for how it was trained."""
    from cdtrans.network.weights import build_model, load_model

    require_stage_1(run)
    taken, theirs = load_model(run / SOURCE)
    _check_classes(run, theirs.classes, card.classes)
    differ = [name for name in SAME if getattr(theirs, name) != getattr(card, name)]
    if differ:
        what = first_of([f"{name}: {getattr(theirs, name)} there, {getattr(card, name)} here" for name in differ])
        raise CdtransError(f"Stage 1 of '{run}' is another kind of model ({what}); give the same settings, {OR_TRAIN}.")
    network = build_model(card, drop_path=drop_path)
    network.load_state_dict(taken.state_dict())
    return network, replace(card, weights=theirs.weights, epoch=theirs.epoch)


def _from_file(file: Path, card: "Card", drop_path: float) -> "tuple[Network, Card]":
    """A timm classifier as the source-only network, and its card."""
    from cdtrans.network.weights import build_model, load_classifier

    network = build_model(card, drop_path=drop_path)
    load_classifier(network, file)
    return network, replace(card, weights=str(file), epoch=0)


def read_classes(config: Config) -> tuple[str, ...]:
    """The class names in --source-classes."""
    if not config.source_classes:
        raise CdtransError(
            f"'{config.source_model}' does not say what its classes are; give --source-classes FILE with a name in "
            "each line, in the order of its outputs."
        )
    try:
        lines = Path(config.source_classes).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CdtransError(f"The class names in '{config.source_classes}' cannot be read: {cause}.") from error
    classes = tuple(line.strip() for line in lines if line.strip())
    if twice := [name for name in classes if classes.count(name) > 1]:
        raise CdtransError(
            f"'{config.source_classes}' names the class '{twice[0]}' twice; each line must be a different class."
        )
    if len(classes) < 2:
        raise CdtransError(f"'{config.source_classes}' names {len(classes)} classes, but a classifier has two or more.")
    return classes


def _check_classes(run: Path, theirs: tuple[str, ...], ours: tuple[str, ...]) -> None:
    if theirs != ours:
        first = next((a, b) for a, b in zip_longest(theirs, ours) if a != b)
        named = " and ".join(
            f"{place} {'nothing' if name is None else repr(name)}"
            for place, name in zip(("there", "here"), first, strict=True)
        )
        raise CdtransError(
            f"Stage 1 of '{run}' has other classes than the source ({len(theirs)} there, {len(ours)} here; the first "
            f"difference is {named}); give a run of the same classes in the same order, {OR_TRAIN}."
        )


def _check_same_images(run: Path, config: Config, source: SourceData) -> None:
    theirs = RunRecord(run).data.source
    if (theirs.fingerprint, theirs.pixels) != (source.fingerprint, source.pixels):
        raise RunError(
            "other-source",
            f"Stage 1 of '{run}' was trained on other source images ({theirs.images}, and {theirs.held_out} held out, "
            f"there; {source.images}, and {source.held_out} held out with --holdout {config.holdout} --seed "
            f"{config.seed}, here); give the same source, --holdout and --seed, {OR_TRAIN}.",
        )
