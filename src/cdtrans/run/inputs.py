"""Everything that goes into a run, decoded and checked before anything is trained."""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdtrans.config import Config, Resolved, is_method_file
from cdtrans.errors import DataError, SettingsError, counted
from cdtrans.inputs.decode import Decoded, decode_domain
from cdtrans.inputs.scan import LabelledDomain, UnlabelledDomain, check_distinct, scan_labelled, scan_unlabelled
from cdtrans.record.files import csv_lines
from cdtrans.record.layout import IMAGES, DataRecord, DomainRecord
from cdtrans.record.run import RunWriter
from cdtrans.run.answers import Given
from cdtrans.runtime.ranks import world
from cdtrans.runtime.screen import Screen
from cdtrans.trust.preflight import Finding, examine, examine_target, ignored, refuse

if TYPE_CHECKING:
    import torch

    from cdtrans.methods.base import Method
    from cdtrans.record.model import Card
    from cdtrans.training.adaptation import TrainingData

AUTO_HOLDOUT = 0.1  # share of the source
AUTO_HOLDOUT_FROM = 50  # images per class on average; a smaller source needs all, and a tenth of it would say little


@dataclass(frozen=True)
class RunPlan:
    """The settings and the scanned images of a run that is about to begin."""

    config: Config
    source: LabelledDomain
    target: UnlabelledDomain
    out: Path
    screen: Screen
    force: bool
    method: "type[Method] | None"  # replaces the class that the settings name
    started: float  # time of the monotonic clock

    @property
    def scanned(self) -> dict[str, str]:
        """Digests of the images on disk, by domain, so that they can be compared at any time."""
        return {"source": self.source.fingerprint(), "target": self.target.fingerprint()}


@dataclass(frozen=True)
class Inputs:
    """The images of a run, what the user has said of the target, and the problems of both."""

    source: Decoded[LabelledDomain]  # the images to train on; none if a model alone is adapted
    held_out: Decoded[LabelledDomain]
    target: Decoded[UnlabelledDomain]
    given: Given
    findings: tuple[Finding, ...]
    scanned: dict[str, str]  # see RunPlan
    check_seconds: float

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.domain.classes

    def describe(self, config: Config) -> DataRecord:
        """The run's record of its data; a resumed run must find the same."""
        code = None
        if is_method_file(config.method):
            code = hashlib.sha256(Path(config.method.rpartition(":")[0]).read_bytes()).hexdigest()
        source, target = (
            DomainRecord(len(part), self.scanned[name], part.domain.fingerprint(), part.pixel_digest())
            for name, part in (("source", self.source), ("target", self.target))
        )
        source = replace(source, held_out=len(self.held_out), classes=self.source.domain.counts())
        return DataRecord(source, target, self.given.digest(), code)

    def record(self, run: "RunWriter", *, fresh: bool) -> None:
        """Record the images behind all indices and the user's answers. A `fresh` run first logs the problems of
        its data; a resumed one has them in its log already."""
        source, held_out, target = self.source, self.held_out, self.target
        rows: list[tuple[object, ...]] = [("domain", "index", "path", "digest")]
        for name, part in (("source", source), ("holdout", held_out), ("target", target)):
            rows += [(name, i, *image) for i, image in enumerate(zip(part.domain.paths, part.digests, strict=True))]
        run.write(IMAGES, csv_lines(rows))
        self.given.write(run, self.classes, self.target)
        if fresh:
            run.cut_log(0)
            for domain, decoded in (("source", source), ("target", target)):
                for path, cause in decoded.skipped.items():
                    run.log("skipped", domain=domain, path=path, cause=cause)
            for finding in self.findings:
                run.log("check", state=finding.state, subject=finding.subject, found=finding.statement)
        run.log_timing(stage="check", seconds=self.check_seconds)

    def on_device(self, card: "Card", device: "torch.device") -> "TrainingData":
        """The images as input of a model."""
        import torch

        from cdtrans.inputs.batches import LabelledImages
        from cdtrans.runtime.device import between_passes
        from cdtrans.training.adaptation import TrainingData

        beside = between_passes(device)
        source = self.source.images(card, device)
        labels = torch.tensor(self.source.domain.labels, dtype=torch.long, device=beside)
        held_out = None
        if len(self.held_out):
            held_labels = torch.tensor(self.held_out.domain.labels, device=beside)
            held_out = LabelledImages(source.select(self.held_out.rows), held_labels)
        occurs = None
        if self.given.occurring is not None:
            occurs = torch.tensor([name in self.given.occurring for name in self.classes])
        target, given = self.target.images(card, device), self.given.tensors(beside)
        return TrainingData(source, labels, target, held_out, given, occurs)


def scan_domains(
    config: Config, screen: Screen, classes: tuple[str, ...] = ()
) -> tuple[LabelledDomain, UnlabelledDomain]:
    """Find the images; the target comes back in the type that cannot hold labels. A run may have no source images: then
    `classes` are those of the model that it adapts, and the source is empty."""
    for name in ("source", "target"):
        if not getattr(config, name) and not (name == "source" and classes):
            alone = " (a model alone: --target TARGET --source-model RUN --method shot)" if name == "source" else ""
            raise SettingsError(
                f"no-{name}", f"No {name} was given; give both, as in 'cdtrans adapt SOURCE TARGET --out RUN'{alone}."
            )
    root = Path(config.root) if config.root else None
    if classes:
        source = LabelledDomain(Path(config.target), (), (), classes)
    else:
        check_distinct(Path(config.source), Path(config.target))
        source = scan_labelled(Path(config.source), root)
    target = scan_unlabelled(Path(config.target), root)
    images = counted(len(source), "image") if len(source) else "no images, a model"
    screen.say(f"source: {images} of {len(source.classes)} classes; target: {counted(len(target), 'image')}")
    return source, target


def decode_inputs(plan: RunPlan, config: Resolved, method: "type[Method]") -> Inputs:
    """Decode, check and split what was scanned, or refuse it."""
    screen, scanned = plan.screen, plan.scanned
    source = decode_source(plan.source, config, screen)
    target = decode_domain(plan.target, config, screen, "target")
    target.require_readable("target", config.max_bad, screen)
    started = time.monotonic()
    findings = check_data(source, target, force=plan.force, screen=screen)
    seconds = round(time.monotonic() - started, 3)
    given = Given.read(config, source.domain.classes, target, method, screen)
    train, held_out = hold_out(source, config, screen)
    if max(len(train), len(target)) < method.least_batch:
        raise DataError(
            "too-few-images",
            f"The method '{config.method}' needs a batch of {method.least_batch} images, but source and target both "
            "have fewer; add images, or choose another --method.",
        )
    if min(len(train) or len(target), len(target), config.batch_size) < world():
        raise SettingsError(
            "too-many-ranks", f"There are more processes ({world()}) than images or than --batch-size; start fewer."
        )
    return Inputs(train, held_out, target, given, findings, scanned, seconds)


def decode_source(source: LabelledDomain, config: Resolved, screen: Screen) -> Decoded[LabelledDomain]:
    """The readable images of the source. A class without one is refused: the classifier could never learn it."""
    if not len(source):
        return Decoded(source, np.zeros((0, config.resize, config.resize, 3), np.uint8), np.zeros(0, np.int64), ())
    decoded = decode_domain(source, config, screen, "source")
    decoded.require_readable("source", config.max_bad, screen)
    if empty := [name for name, count in decoded.domain.counts().items() if count == 0]:
        raise DataError(
            "class-unreadable",
            f"No readable image is left of the source class {empty[0]!r}; repair or remove the class.",
        )
    return decoded


def hold_out(
    source: Decoded[LabelledDomain], config: Config, screen: Screen
) -> tuple[Decoded[LabelledDomain], Decoded[LabelledDomain]]:
    """The source to train on, and the part to score the model on labels that it was not trained on."""
    images, classes = len(source), len(source.domain.classes)
    enough = images >= AUTO_HOLDOUT_FROM * classes
    share = (AUTO_HOLDOUT if enough else 0.0) if config.holdout == "auto" else float(config.holdout)
    train, held_out = stratified_split(source.domain.labels, share, config.seed)
    if config.select == "holdout" and not held_out:
        raise SettingsError(
            "no-holdout", "'--select holdout' needs held-out source images; give --holdout 0.1 or another --select."
        )
    if config.holdout == "auto" and not held_out and images:
        screen.say(
            f"No source image is held out: there are fewer than {AUTO_HOLDOUT_FROM} per class on average "
            f"(use --holdout {AUTO_HOLDOUT:g} to hold some out anyway)."
        )
    elif config.holdout and not held_out and images:
        screen.warn(
            f"No source image is held out: --holdout {share:g} is less than one image of the largest class, which has "
            f"{max(source.domain.counts().values())}; give a larger share, or 0."
        )
    return source.keep(train), source.keep(held_out)


def stratified_split(labels: tuple[int, ...], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Positions to train on and to hold out: the share of each class, rounded down, so that no class is left empty."""
    generator = np.random.default_rng([seed, len(labels)])
    array, held_out = np.asarray(labels), np.zeros(len(labels), dtype=bool)
    for label in np.unique(array):
        members = generator.permutation(np.flatnonzero(array == label))
        held_out[members[: int(share * len(members))]] = True
    return np.flatnonzero(~held_out).tolist(), np.flatnonzero(held_out).tolist()


def check_data(
    source: Decoded[LabelledDomain], target: Decoded[UnlabelledDomain], *, force: bool, screen: Screen
) -> tuple[Finding, ...]:
    """The part of `cdtrans check` that needs no model and does not read the files again. Refuses what makes a run
    pointless, unless forced; other findings become warnings."""
    labels, counts, images = source.domain.labels, source.domain.counts(), target.traces()
    examined = examine(source.traces(), labels, counts, images) if len(source) else examine_target(len(counts), images)
    every = (ignored("source", source.domain.ignored), ignored("target", target.domain.ignored), *examined)
    findings = tuple(f for f in every if f.state != "ok")
    if not force:
        refuse(findings)
    for finding in findings:
        screen.warn(f"{finding.statement}. {finding.advice}")
    return findings
