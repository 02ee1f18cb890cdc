"""The source-only network: trained in this run, found in its folder, another run's (`--source-model RUN`), or, where
there are no source images, any timm classifier's (`--source-model FILE`). With it comes the guard's evidence: what the
pretrained backbone knows of both domains before stage 1 trains it (trust.support).

Another run's network is copied into this run; from then on nothing reads that run again. Both runs must have been
trained on the same source images: otherwise "source-only" would mean another source, and images that this run holds out
may have been trained on. That one rule covers --holdout and --seed too, which decide the split. A run without source
images has the classes and the backbone of the model that it adapts.

Where stage 1 leaves the backbone as it is, the evidence comes from its features. Where stage 1 is another run's, its
card says which weights that began with; if they are not here, the evidence comes from the source-only model. The
module needs no torch until a network is made, so that mistakes are reported at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cdtrans.config import Config, Resolved, make_config, read_recipe, require_weights
from cdtrans.errors import (
    CdtransError,
    DataError,
    DiskFull,
    MissingFileError,
    RunError,
    SettingsError,
    counted,
    first_of,
)
from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import AGAIN, EVIDENCE, FROZEN_FEATURES, SOURCE, DomainRecord
from cdtrans.record.model import FROM_SCRATCH, Card, save_model
from cdtrans.record.record import RunRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cdtrans.methods.base import Method
    from cdtrans.network.encoding import Encoder
    from cdtrans.network.network import Network
    from cdtrans.record.run import RunWriter
    from cdtrans.runtime.screen import Screen
    from cdtrans.training.adaptation import TrainingData
    from cdtrans.trust.support import Evidence

# What decides how the network is built and what it sees. The precision may differ: stage 1 from a GPU can be adapted on
# a CPU.
BUILT = ("backbone", "backbone_args", "neck", "taps", "resize", "crop")
SAME = (*BUILT, "mean", "std")
OR_TRAIN = "or leave --source-model out to train stage 1 here"


class SourceModel(NamedTuple):
    """The result of stage 1."""

    network: "Network"
    card: Card
    frozen: "dict[str, Tensor] | None"  # features of a backbone that nothing has trained yet
    evidence: "Evidence"  # from pretrained features if they can be had


@dataclass(frozen=True)
class Origin:
    """The place that the source-only model of the run in `out` comes from."""

    out: Path
    config: Config

    @property
    def done(self) -> bool:
        """Whether this run has its source-only model."""
        return RunRecord(self.out).has_model(SOURCE)

    @property
    def place(self) -> Path | None:
        """The run that has the model: this one, or the one named; None if it must still be trained."""
        if self.done:
            return self.out
        return Path(self.config.source_model) if self.config.source_model else None

    def require(self) -> None:
        """Refuse a run without stage 1, or weights that do not exist."""
        place = self.place
        if place is None:
            require_weights(self.config.weights)
        elif place.is_file():
            if self.config.source:
                raise SettingsError(
                    "source-model-is-weights",
                    f"'{place}' is a weights file, which works only without source images; leave SOURCE out, give a "
                    f"run instead, {OR_TRAIN}.",
                )
        elif not self.config.source and not place.exists():
            raise MissingFileError(
                "no-source-model", f"There is no run and no weights file '{place}'; check --source-model."
            )
        else:
            require_stage_1(place)

    def without_source(self) -> tuple[Config, tuple[str, ...]]:
        """For a run without source images: settings that describe its model, and the model's classes; neither if there
        is no model."""
        config, place = self.config, self.place
        if place is None:
            return config, ()
        self.require()
        if place.is_file():
            return make_config(config.to_dict() | {"neck": "none", "taps": 1}), read_classes(config)
        card = RunRecord(place).card(SOURCE)
        return make_config(config.to_dict() | {name: getattr(card, name) for name in BUILT}), card.classes

    def require_same_images(self, source: DomainRecord) -> None:
        """Refuse another run's model of other source images than those that this run trains on."""
        if not self.config.source_model or not self.config.source or self.done:
            return
        theirs = RunRecord(Path(self.config.source_model)).data.source
        if (theirs.fingerprint, theirs.pixels) != (source.fingerprint, source.pixels):
            raise RunError(
                "other-source",
                f"Stage 1 of '{self.config.source_model}' was trained on other source images ({theirs.images}, and "
                f"{theirs.held_out} held out, there; {source.images}, and {source.held_out} held out with --holdout "
                f"{self.config.holdout} --seed {self.config.seed}, here); give the same source, --holdout and --seed, "
                f"{OR_TRAIN}.",
            )

    def network(self, config: Resolved, method: "type[Method]", classes: tuple[str, ...]) -> "tuple[Network, Card]":
        """The network before stage 1, or after it if it is done elsewhere, and its card. A network that the method or
        the number of ranks does not allow is refused."""
        from cdtrans.network.network import require_no_batchnorm_on_ranks
        from cdtrans.network.weights import build_model, load_classifier, make_card

        trained = config.source_fit == "train"
        card = make_card(config, classes, stage="source", epoch=config.source_epochs if trained else 0)
        if self.place and self.place.is_file():  # a classifier of timm's
            card = replace(card, weights=str(self.place), epoch=0)
            network = build_model(card, drop_path=config.drop_path)
            load_classifier(network, self.place)
        elif config.source_model and self.place:
            network, card = _taken(self.place, card, config.drop_path)
        else:
            network = initial_network(config, card, with_weights=not self.done)
        method.check(network, config.backbone)
        require_no_batchnorm_on_ranks(network.backbone, config.backbone)
        return network, card


def source_model(
    run: "RunWriter",
    origin: Origin,
    network: "Network",
    card: Card,
    data: "TrainingData",
    config: Resolved,
    screen: "Screen",
) -> SourceModel:
    """Fit the network, or load it if that has been done. Afterwards this run has its source-only model."""
    from cdtrans.network.encoding import Encoder
    from cdtrans.network.weights import load_model
    from cdtrans.training.source import fit_source, probe_source

    folder = run.record.model_folder(SOURCE)
    trains = config.source_fit == "train" if origin.place is None else card.epoch > 0
    pretrained = card.weights != FROM_SCRATCH
    evidence: Evidence | None = None
    if run.record.evidence is not None:
        evidence = read_evidence(run.record)
    elif trains and pretrained and config.source:
        evidence = pretrained_evidence(run, network if origin.place is None else None, card, data, config, screen)
    with kept_features(run, data.target.device) if config.source_fit == "probe" else nullcontext() as frozen:
        encode = Encoder(network, config, screen, frozen)
        if origin.done:
            with intact(folder, AGAIN):
                network.load_state_dict(load_model(folder)[0].state_dict())
        elif config.source_model:
            weights = f"from {card.weights}" if pretrained else "from scratch"
            trained = f" ({counted(card.epoch, 'epoch')} {weights})" if card.epoch else ""
            screen.say(f"stage 1 is taken from '{config.source_model}'{trained}")
            run.log("source_model", run=config.source_model, epochs=card.epoch, weights=card.weights)
        elif config.source_fit == "probe":
            probe_source(run, network, data.source, data.labels, encode=encode, classes=len(card.classes))
        else:
            fit_source(run, network, data.source, data.labels, config, screen)
        if run.writes and not origin.done:
            save_model(folder, network, card)
        if evidence is None:
            evidence = make_evidence(run, encode, card, data, config, pretrained=pretrained and not trains)
    return SourceModel(network, card, frozen, evidence)


@contextmanager
def kept_features(run: "RunWriter", device: "torch.device") -> "Iterator[dict[str, Tensor]]":
    """Features of a backbone that stage 1 does not train. They stay in the folder of an unfinished run, so that its
    images are encoded once. Several ranks have a share each and keep none."""
    import torch

    from cdtrans.runtime.ranks import world

    file = run.folder / FROZEN_FEATURES.name
    features: dict[str, Tensor] = {}
    if file.exists() and world() == 1:
        with suppress(Exception):  # a damaged file is replaced
            features |= torch.load(file, map_location=device, weights_only=True)
    before = len(features)
    try:
        yield features
    finally:
        if run.writes and world() == 1 and len(features) > before:
            with suppress(DiskFull), atomic(file) as out:
                torch.save(features, out)


def pretrained_evidence(
    run: "RunWriter", network: "Network | None", card: Card, data: "TrainingData", config: Resolved, screen: "Screen"
) -> "Evidence | None":
    """Evidence from the pretrained backbone; None if its weights are missing. `network` is the run's, if nothing has
    trained it yet."""
    from cdtrans.network.encoding import Encoder

    backbone = _pretrained_backbone(network, card, config, data.target.device, screen)
    if backbone is None:
        return None
    return make_evidence(run, Encoder(backbone, config, screen, {}), card, data, config, pretrained=True)


def make_evidence(
    run: "RunWriter", encode: "Encoder", card: Card, data: "TrainingData", config: Resolved, *, pretrained: bool
) -> "Evidence":
    """Both domains as a fixed network sees them. The authors' recipes are left as they are: nothing is noticed."""
    from cdtrans.training.adaptation import encode_domains
    from cdtrans.trust.support import Evidence

    with run.timed("evidence"):
        encode.screen.begin("evidence")
        domains = encode_domains(encode, data, encode(data.target, "target"))
        notice, leading = config.recipe == "best", encode.model.leading
        evidence = Evidence.of(
            domains, len(card.classes), leading, pretrained=pretrained, told=data.occurs, notice=notice
        )
    run.write(EVIDENCE, {name: x.numpy() for name, x in evidence._asdict().items()})
    return evidence


def read_evidence(record: RunRecord) -> "Evidence":
    """The evidence of an earlier session."""
    import torch

    from cdtrans.trust.support import Evidence

    assert record.evidence is not None, "the caller has asked"
    return Evidence(**{name: torch.from_numpy(x) for name, x in vars(record.evidence).items()})


def _pretrained_backbone(
    network: "Network | None", card: Card, config: Resolved, device: "torch.device", screen: "Screen"
) -> "Network | None":
    """The backbone with the weights that its training starts or started from, and the best recipe's taps."""
    import torch

    from cdtrans.network.network import Head, Network, feature_dim
    from cdtrans.runtime.ranks import from_main

    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):  # the run's own random numbers stay as they are
        file = card.weights if Path(card.weights).is_file() else None
        if network is None and (file or card.weights == card.backbone):
            with suppress(CdtransError):  # weights that are here no more
                network = initial_network(replace(config, weights=file, pretrained=file is None), card).to(device)
        if not from_main(network is not None):
            screen.warn(
                f"{card.weights} is missing, so the guard judges by features trained on the source: trust it less."
            )
            return None
        if network is None:
            raise DataError(
                "weights-on-some-machines",
                f"'{card.weights}' must be on every machine or on none; copy it, or remove it.",
            )
        backbone, taps = network.backbone, read_recipe("best")["taps"]
        return Network(backbone, Head(feature_dim(backbone, taps), 1, "none"), taps).to(device)


def require_stage_1(run: Path) -> None:
    if not RunRecord(run).has_model(SOURCE):
        raise RunError(
            "no-stage-1", f"'{run}' has no finished stage 1 (the model '{SOURCE}'); wait for it, {OR_TRAIN}."
        )


def initial_network(config: Config, card: Card, *, with_weights: bool = True) -> "Network":
    """The order of initialisation: seed, backbone, head, then the backbone's weights over it."""
    import torch

    from cdtrans.network.weights import build_model, load_pretrained, load_weights
    from cdtrans.training.loop import step_seed

    torch.manual_seed(step_seed(config.seed, "init", 0, 0))
    network = build_model(card, drop_path=config.drop_path)
    if with_weights and config.weights:
        load_weights(network.backbone, Path(config.weights))
    elif with_weights and config.pretrained:
        load_pretrained(network.backbone, config.backbone)
    return network


def _taken(run: Path, card: Card, drop_path: float) -> "tuple[Network, Card]":
    """A run's source-only network and its card, which equals `card` except for how it was trained."""
    from cdtrans.network.weights import build_model, load_model

    require_stage_1(run)
    taken, theirs = load_model(RunRecord(run).model_folder(SOURCE))
    values = {name: (getattr(theirs, name), getattr(card, name)) for name in SAME}
    differ = [f"{name}: {a} there, {b} here" for name, (a, b) in values.items() if a != b]
    if theirs.classes != card.classes:
        first = next(pair for pair in zip_longest(theirs.classes, card.classes) if pair[0] != pair[1])
        counts = f"{len(theirs.classes)} there, {len(card.classes)} here"
        differ = [f"classes: {counts}; the first difference is {first[0]!r} and {first[1]!r}"]
    if differ:
        raise RunError(
            "other-network",
            f"Stage 1 of '{run}' is another kind of model ({first_of(differ)}); give the same classes and settings, "
            f"{OR_TRAIN}.",
        )
    network = build_model(card, drop_path=drop_path)
    network.load_state_dict(taken.state_dict())
    return network, replace(card, weights=theirs.weights, epoch=theirs.epoch)


def read_classes(config: Config) -> tuple[str, ...]:
    """The class names in --source-classes."""
    if not config.source_classes:
        raise SettingsError(
            "no-source-classes",
            f"'{config.source_model}' does not say what its classes are; give --source-classes FILE with a name in "
            "each line, in the order of its outputs.",
        )
    file = config.source_classes
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError("source-classes", f"The class names in '{file}' cannot be read: {cause}.") from error
    classes = tuple(line.strip() for line in lines if line.strip())
    if twice := [name for name in classes if classes.count(name) > 1]:
        raise DataError(
            "source-classes", f"'{file}' names the class '{twice[0]}' twice; each line must be a different class."
        )
    if len(classes) < 2:
        raise DataError("source-classes", f"'{file}' names {len(classes)} classes, but a classifier has two or more.")
    return classes
