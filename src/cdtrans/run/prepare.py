"""The images of a run: found, decoded and checked before anything is trained."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from cdtrans.config import Config
from cdtrans.errors import CdtransError, DiskFull, counted
from cdtrans.inputs.domains import LabelledDomain, UnlabelledDomain, check_distinct, scan_labelled, scan_unlabelled
from cdtrans.inputs.images import judge_unreadable
from cdtrans.inputs.pixels import default_cache, open_pixels
from cdtrans.inputs.stream import StreamedPixels
from cdtrans.runtime.screen import Screen
from cdtrans.trust.findings import Finding, refuse
from cdtrans.trust.preflight import Labels, Pictures, examine, examine_target, ignored

Domain = TypeVar("Domain", LabelledDomain, UnlabelledDomain)
Skipped = dict[str, str]  # path -> why it could not be read


class DomainPixels(NamedTuple):
    """The pixels of a domain, in its order."""

    pixels: np.ndarray | StreamedPixels  # where they are
    rows: np.ndarray  # [N] the row of each there
    digests: list[str]  # [N]
    thumbnails: np.ndarray  # uint8 [rows, SIDE, SIDE, 3], in the order of the pixels

    def keep(self, positions: list[int]) -> "DomainPixels":
        return self._replace(rows=self.rows[positions], digests=[self.digests[i] for i in positions])


def scan_domains(
    config: Config, screen: Screen, classes: tuple[str, ...] = ()
) -> tuple[LabelledDomain, UnlabelledDomain]:
    """Find the images; the target comes back in the type that cannot hold labels. A run may have no source images: then
    `classes` are those of the model that it adapts, and the source is empty."""
    for name in ("source", "target"):
        if not getattr(config, name) and not (name == "source" and classes):
            alone = " (a model alone: --target TARGET --source-model RUN --method shot)" if name == "source" else ""
            raise CdtransError(f"No {name} was given; give both, as in 'cdtrans adapt SOURCE TARGET --out RUN'{alone}.")
    if classes:
        target = scan_unlabelled(Path(config.target), Path(config.root) if config.root else None)
        screen.say(f"source: no images, a model of {len(classes)} classes; target: {counted(len(target), 'image')}")
        return LabelledDomain(target.root, (), (), classes), target
    check_distinct(Path(config.source), Path(config.target))
    root = Path(config.root) if config.root else None
    source = scan_labelled(Path(config.source), root)
    target = scan_unlabelled(Path(config.target), root)
    images = counted(len(source), "image"), counted(len(target), "image")
    screen.say(f"source: {images[0]} of {len(source.classes)} classes; target: {images[1]}")
    return source, target


def decode_domain(domain: Domain, config: Config, screen: Screen, name: str) -> tuple[Domain, DomainPixels, Skipped]:
    """Decode every image of a domain once; unreadable ones are left out, if there are few."""
    kept, pixels, skipped = readable(domain, config, screen, name)
    if skipped:
        first, cause = next(iter(skipped.items()))
        screen.warn(judge_unreadable(f"{name} ", len(skipped), len(domain), first, cause, config.max_bad))
    if not len(kept):
        raise CdtransError(f"No readable image is left of the {name}; repair or replace its files.")
    return kept, pixels, skipped


def readable(domain: Domain, config: Config, screen: Screen, name: str) -> tuple[Domain, DomainPixels, Skipped]:
    """The images that can be decoded, however few. The target is sorted by the digests of its pixels, so that file
    names and class folders have no influence."""
    pixels, bad = find_pixels(domain.files(), domain.root, config, screen, name)
    skipped = {domain.paths[i]: cause for i, cause in sorted(bad.items())}
    good = [i for i in range(len(domain)) if i not in bad]
    if isinstance(domain, UnlabelledDomain):
        good.sort(key=lambda i: pixels.digests[i])
    return domain.keep(good), pixels.keep(good), skipped


def no_pixels(size: int) -> DomainPixels:
    """The pixels of a domain without images."""
    return DomainPixels(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, int), [], np.zeros((0, 1, 1, 3), np.uint8))


def find_pixels(
    files: list[Path], root: Path, config: Config, screen: Screen, name: str
) -> tuple[DomainPixels, dict[int, str]]:
    """Pixels from the store of `root`, or a stream that decodes them every time if they cannot be stored; and the
    unreadable files."""
    assert isinstance(config.resize, int), "the configuration has been resolved"
    if config.pixels != "stream":
        cache = Path(config.cache) if config.cache else default_cache()
        try:
            stored = open_pixels(files, root=root, size=config.resize, cache=cache, screen=screen, name=name)
            return DomainPixels(stored.array, stored.rows, stored.digests, stored.thumbnails), stored.bad
        except DiskFull:
            if config.pixels == "store":
                raise
            screen.say(f"The disk has no room for the decoded {name} images, so they are decoded every time (slower).")
    streamed = StreamedPixels(files, config.resize)
    digests, thumbnails, bad = streamed.look(screen, name)
    return DomainPixels(streamed, np.arange(len(files)), digests, thumbnails), bad


def check_classes_left(source: LabelledDomain) -> None:
    """Refuse a class without a readable image: the classifier could never learn it."""
    empty = [name for name, count in zip(source.classes, source.counts(), strict=True) if count == 0]
    if empty:
        raise CdtransError(f"No readable image is left of the source class {empty[0]!r}; repair or remove the class.")


def check_data(
    source: LabelledDomain,
    source_pixels: DomainPixels,
    target: UnlabelledDomain,
    target_pixels: DomainPixels,
    *,
    force: bool,
    screen: Screen,
) -> list[Finding]:
    """The part of `cdtrans check` that needs no model and does not read the files again. Refuses what makes a run
    pointless, unless forced; other findings become warnings."""
    labels = Labels(np.array(source.labels), source.classes)
    seen = pictures(target, target_pixels)
    found = examine(pictures(source, source_pixels), labels, seen) if len(source) else examine_target(labels, seen)
    every = [ignored("source", source.ignored), ignored("target", target.ignored), *found]
    findings = [f for f in every if f.state != "ok"]
    if not force:
        refuse(findings)
    for finding in findings:
        screen.warn(f"{finding.statement}. {finding.advice}")
    return findings


def pictures(domain: LabelledDomain | UnlabelledDomain, pixels: DomainPixels) -> Pictures:
    """The input of the checks."""
    return Pictures(domain.paths, pixels.digests, pixels.thumbnails[pixels.rows])
