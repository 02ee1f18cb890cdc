"""`cdtrans check`: two folders in, findings out. What it decodes goes into the cache that `adapt` uses."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typing_extensions import Unpack

from cdtrans.config import (
    Resolved,
    Settings,
    SettingsFile,
    SourceArgument,
    TargetArgument,
    compose_run,
    require_weights,
)
from cdtrans.errors import DataError, WeightsUnavailable
from cdtrans.inputs.decode import Decoded, decode_domain
from cdtrans.inputs.images import Header, UnreadableImage, read_header
from cdtrans.inputs.scan import LabelledDomain, UnlabelledDomain, warnings_for
from cdtrans.run.inputs import scan_domains
from cdtrans.runtime.screen import Screen, html_table
from cdtrans.runtime.signals import importing
from cdtrans.schema import Help, checked
from cdtrans.trust import preflight
from cdtrans.trust.preflight import Finding, Severity, gravest

PROBED = 4000  # images per domain that the backbone encodes: a minute on a CPU with DeiT-tiny, and shares to 1 %
HEADERS_AT_ONCE = 8  # files opened in parallel, for slow disks
STATE_SENTENCES: dict[Severity, str] = {
    "ok": "No problem was found; you can start a run. Nobody has looked whether the target shows just these classes.",
    "warning": "You can start a run; read the warnings first.",
    "stop": "Do not start a run; 'cdtrans adapt' would refuse it.",
}


@dataclass(frozen=True)
class Check:
    """The findings, and the backbone that they were made with."""

    findings: tuple[Finding, ...]
    backbone: str | None  # its features were checked
    skipped: str  # the reason if no backbone was used

    @property
    def state(self) -> Severity:
        return gravest(self.findings)

    @property
    def verdict(self) -> str:
        """The state as a sentence."""
        return STATE_SENTENCES[self.state]

    def summary(self) -> dict[str, Any]:
        """The promised keys of `check --json`."""
        return {
            "state": self.state,
            "findings": [f.summary() for f in self.findings],
            "backbone": self.backbone,
            "skipped": self.skipped,
        }

    def _repr_html_(self) -> str:
        rows = [(f.state, f.subject, f"{f.statement}. {f.advice}") for f in self.findings]
        skipped = f"Not checked with a backbone: {self.skipped}." if self.skipped else ""
        return html_table(self.verdict, ("", "subject", "found"), rows, skipped)


@checked()
def check(
    source: SourceArgument,
    target: TargetArgument,
    *,
    model: Annotated[bool, Help("Also check with the backbone, if its weights are available.")] = True,
    config: SettingsFile = None,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Unpack[Settings],
) -> Check:
    """Check the images before a run, as `adapt` would read them with the same settings. `model=False` leaves out the
    checks that need a backbone. `settings` and `config` are as for `adapt`."""
    screen = screen or Screen(quiet=quiet)
    layered, _ = compose_run(source, target, config, dict(settings))
    scanned_source, scanned_target = scan_domains(layered, screen)
    if model:
        require_weights(layered.weights)

    with importing():
        from cdtrans.run.pipeline import resolve

    resolved = resolve(layered)
    source_images = decode_domain(scanned_source, resolved, screen, "source")
    target_images = decode_domain(scanned_target, resolved, screen, "target")
    findings = [
        preflight.layout(warnings_for(scanned_source)),
        preflight.unreadable("source", source_images.skipped, len(scanned_source), resolved.max_bad),
        preflight.unreadable("target", target_images.skipped, len(scanned_target), resolved.max_bad),
        preflight.ignored("source", scanned_source.ignored),
        preflight.ignored("target", scanned_target.ignored),
    ]
    if len(source_images) and len(target_images):
        labelled, paths = source_images.domain, target_images.domain.paths
        source_headers = _read_headers(labelled.files(), screen, "source")
        target_headers = _read_headers(target_images.domain.files(), screen, "target")
        findings += [
            *preflight.examine(source_images.traces(), labelled.labels, labelled.counts(), target_images.traces()),
            preflight.image_sizes("source", labelled.paths, source_headers, resolved.crop),
            preflight.image_sizes("target", paths, target_headers, resolved.crop),
            preflight.transparency(source_headers, target_headers),
        ]
    if gravest(findings) == "stop":
        return Check(tuple(findings), None, "there is a reason to stop without it")
    if not model:
        return Check(tuple(findings), None, "--no-model was given")
    probed, skipped = _with_model(source_images, target_images, resolved, screen)
    return Check((*findings, *probed), None if skipped else resolved.backbone, skipped)


def _read_headers(files: Sequence[Path], screen: Screen, name: str) -> list[Header]:
    """The file headers, which `adapt` does not read: that would take too long."""
    headers = []
    with screen.track(f"headers of {name}", len(files)) as task, ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        try:
            for header in pool.map(read_header, files):
                headers.append(header)
                task.advance(1)
        except UnreadableImage as error:
            raise DataError(
                "image-lost", f"A {name} file could be read before and now cannot: {error}; run the check again."
            ) from error
    return headers


def _with_model(
    source: Decoded[LabelledDomain], target: Decoded[UnlabelledDomain], config: Resolved, screen: Screen
) -> tuple[list[Finding], str]:
    """Findings with the weights as they are before any training; or the reason why there are none."""
    import torch

    from cdtrans.network.encoding import Encoder
    from cdtrans.network.weights import make_card
    from cdtrans.run.stage1 import initial_network
    from cdtrans.trust.probes import Sample, enough, probe

    if not config.weights and not config.pretrained:
        return [], "that needs pretrained weights"
    card = make_card(config, source.domain.classes, stage="source", epoch=0)
    try:
        network = initial_network(config, card)
    except WeightsUnavailable as error:
        advice = "Connect to the network, or give --weights FILE or --no-pretrained: a run needs one of these."
        return [Finding("warning", "weights", error.cause, advice)], "there are no weights"
    if not enough(np.array(source.domain.labels), len(target)):
        return [], "there are too few images for it"
    device = torch.device(config.device)
    encode = Encoder(network.to(device), config, screen)

    def sample(decoded: Decoded, name: str) -> tuple[Sample, list[int]]:
        drawn = draw_sample(len(decoded), config.seed)
        if len(drawn) < len(decoded):
            screen.say(f"The backbone checks {len(drawn)} of the {len(decoded)} {name} images, chosen at random.")
        part = decoded.keep(drawn)
        return Sample(encode(part.images(card, device), name).features.cpu().numpy(), part.domain.paths), drawn

    source_sample, drawn = sample(source, "source")
    labels = np.array(source.domain.labels)[drawn]
    target_sample, _ = sample(target, "target")
    return probe(source_sample, labels, source.domain.classes, target_sample, config.seed, network.leading), ""


def draw_sample(count: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).choice(count, min(count, PROBED), replace=False).tolist())
