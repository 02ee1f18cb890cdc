"""`cdtrans check`: two folders in, findings out. What it decodes goes into the cache that `adapt` uses."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdtrans.config import Config
from cdtrans.data.domains import LabelledDomain, UnlabelledDomain, warnings_for
from cdtrans.data.images import Header, UnreadableImage, read_header
from cdtrans.errors import CdtransError
from cdtrans.inputs import DomainPixels, make_images, pictures, readable, scan_domains
from cdtrans.model.branches import CDTrans
from cdtrans.model.card import Card, build_model, make_card
from cdtrans.model.encoding import Encoder
from cdtrans.pipeline import initial_model, layered_config, resolve
from cdtrans.screen import Screen
from cdtrans.trust import preflight
from cdtrans.trust.findings import Finding, State, gravest
from cdtrans.trust.preflight import Labels
from cdtrans.trust.probes import Seen, enough, probe

PROBED = 4000  # images of a domain that the backbone looks at: a minute of a CPU with DeiT-tiny, and shares to 1 %
HEADERS_AT_ONCE = 8  # files opened in parallel, for disks that answer late


@dataclass(frozen=True)
class Check:
    """What was found, and with whose eyes."""

    findings: tuple[Finding, ...]
    backbone: str | None  # whose features were looked at
    skipped: str  # why none were

    @property
    def state(self) -> State:
        return gravest(self.findings)

    def summary(self) -> dict[str, Any]:
        """The promised keys of `check --json`."""
        return {
            "state": self.state,
            "findings": [f.summary() for f in self.findings],
            "backbone": self.backbone,
            "skipped": self.skipped,
        }


def check(
    *,
    source: str | Path | None = None,
    target: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    model: bool = True,
    screen: Screen,
    **settings: Any,
) -> Check:
    """Look at the images as `adapt` would with the same settings; without `model`, with no backbone."""
    layered, _ = layered_config(source, target, preset, config, settings)
    found_source, found_target = scan_domains(layered, screen)
    resolved = resolve(layered)
    labelled, source_pixels, source_bad = readable(found_source, resolved, screen, "source")
    unlabelled, target_pixels, target_bad = readable(found_target, resolved, screen, "target")
    findings = [
        preflight.layout(warnings_for(found_source)),
        preflight.unreadable("source", source_bad, len(found_source), resolved.max_bad),
        preflight.unreadable("target", target_bad, len(found_target), resolved.max_bad),
    ]
    if len(labelled) and len(unlabelled):
        findings += without_model(labelled, source_pixels, unlabelled, target_pixels, resolved, screen)
    if gravest(findings) == "stop":
        return Check(tuple(findings), None, "there is a reason to stop without it")
    if not model:
        return Check(tuple(findings), None, "--no-model was given")
    if not enough(np.array(labelled.labels), len(unlabelled)):
        return Check(tuple(findings), None, "there are too few images for it")
    card = make_card(resolved, labelled.classes, stage="source", epoch=0)
    backbone = pretrained_model(resolved, card)
    if isinstance(backbone, str):
        return Check(tuple(findings), None, backbone)
    findings += with_model(backbone, card, labelled, source_pixels, unlabelled, target_pixels, resolved, screen)
    return Check(tuple(findings), resolved.backbone, "")


def without_model(
    source: LabelledDomain,
    source_pixels: DomainPixels,
    target: UnlabelledDomain,
    target_pixels: DomainPixels,
    config: Config,
    screen: Screen,
) -> list[Finding]:
    """What `adapt` looks at too, and what the headers of the files say, which would cost it time."""
    assert isinstance(config.crop, int), "the configuration has been resolved"
    source_headers = read_headers(source.files(), screen, "source")
    target_headers = read_headers(target.files(), screen, "target")
    return [
        *preflight.examine(
            pictures(source, source_pixels, stream=True),
            Labels(np.array(source.labels), source.classes),
            pictures(target, target_pixels, stream=True),
        ),
        preflight.image_sizes("source", source.paths, source_headers, config.crop),
        preflight.image_sizes("target", target.paths, target_headers, config.crop),
        preflight.transparency(source_headers, target_headers),
    ]


def read_headers(files: Sequence[Path], screen: Screen, name: str) -> list[Header]:
    headers = []
    with screen.track(f"headers of {name}", len(files)) as task, ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        try:
            for header in pool.map(read_header, files):
                headers.append(header)
                task.advance(1)
        except UnreadableImage as error:
            raise CdtransError(
                f"A {name} file could be read before and now cannot: {error}; run the check again."
            ) from error
    return headers


def pretrained_model(config: Config, card: Card) -> CDTrans | str:
    """The model, or why there is none that has learnt anything. A file that was asked for must be there and fit."""
    if not config.weights and not config.pretrained:
        return "a backbone without pretrained weights sees nothing"
    if config.weights:
        return initial_model(config, card)
    build_model(card)  # so that a wrong name is an error, and only missing weights a reason to skip
    try:
        return initial_model(config, card)
    except CdtransError as error:
        return str(error).removesuffix(".")


def with_model(
    model: CDTrans,
    card: Card,
    source: LabelledDomain,
    source_pixels: DomainPixels,
    target: UnlabelledDomain,
    target_pixels: DomainPixels,
    config: Config,
    screen: Screen,
) -> list[Finding]:
    """Through the eyes of the backbone, as its weights are before any training."""
    device = torch.device(config.device)
    model.to(device)
    seen, samples = [], []
    for name, domain, pixels in (("source", source, source_pixels), ("target", target, target_pixels)):
        sample = draw_sample(len(domain), config.seed)
        if len(sample) < len(domain):
            screen.say(f"The backbone looks at {len(sample)} of the {len(domain)} {name} images, drawn at random.")
        encoded = Encoder(model, config, screen)(make_images(pixels.keep(sample), card, device), name)
        seen.append(Seen(encoded.features.cpu().numpy(), [domain.paths[n] for n in sample]))
        samples.append(sample)
    labels = np.array(source.labels)[samples[0]]
    return probe(seen[0], labels, source.classes, seen[1], config.seed)


def draw_sample(count: int, seed: int) -> list[int]:
    if count <= PROBED:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, PROBED, replace=False).tolist())
