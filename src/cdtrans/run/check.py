"""`cdtrans check`: two folders in, findings out. What it decodes goes into the cache that `adapt` uses."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.config import Resolved, compose_run, require_weights
from cdtrans.errors import CdtransError
from cdtrans.inputs.decode import Decoded, decode_domain
from cdtrans.inputs.domains import LabelledDomain, UnlabelledDomain, warnings_for
from cdtrans.inputs.images import Header, UnreadableImage, read_header
from cdtrans.run.inputs import scan_domains
from cdtrans.runtime.imports import importing
from cdtrans.runtime.notebook import html_table
from cdtrans.runtime.screen import Screen
from cdtrans.schema import checked
from cdtrans.trust import preflight
from cdtrans.trust.findings import Finding, State, gravest
from cdtrans.trust.preflight import Labels

HEADERS_AT_ONCE = 8  # files opened in parallel, for slow disks
VERDICTS: dict[State, str] = {
    "ok": "No problem was found; you can start a run.",
    "warning": "You can start a run; read the warnings first.",
    "stop": "Do not start a run; 'cdtrans adapt' would refuse it.",
}


@dataclass(frozen=True)
class Check:
    """The findings, and the backbone that they were made with."""

    findings: tuple[Finding, ...]
    backbone: str | None  # whose features were checked
    skipped: str  # why none were

    @property
    def state(self) -> State:
        return gravest(self.findings)

    @property
    def verdict(self) -> str:
        """The state as a sentence."""
        return VERDICTS[self.state]

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
    source: str | Path,
    target: str | Path,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    model: bool = True,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Any,
) -> Check:
    """Check the images before a run, as `adapt` would read them with the same settings. `model=False` leaves out the
    checks that need a backbone. `settings`, `preset` and `config` are as for `adapt`."""
    screen = screen or Screen(quiet=quiet)
    layered, _ = compose_run(source, target, preset, config, settings)
    found_source, found_target = scan_domains(layered, screen)
    if model:
        require_weights(layered.weights)

    with importing():
        from cdtrans.run.check_model import look
        from cdtrans.run.resolve import resolve

    resolved = resolve(layered)
    labelled = decode_domain(found_source, resolved, screen, "source")
    unlabelled = decode_domain(found_target, resolved, screen, "target")
    findings = [
        preflight.layout(warnings_for(found_source)),
        preflight.unreadable("source", labelled.skipped, len(found_source), resolved.max_bad),
        preflight.unreadable("target", unlabelled.skipped, len(found_target), resolved.max_bad),
        preflight.ignored("source", found_source.ignored),
        preflight.ignored("target", found_target.ignored),
    ]
    if len(labelled) and len(unlabelled):
        findings += without_model(labelled, unlabelled, resolved, screen)
    if gravest(findings) == "stop":
        return Check(tuple(findings), None, "there is a reason to stop without it")
    if not model:
        return Check(tuple(findings), None, "--no-model was given")
    probed, skipped = look(labelled, unlabelled, resolved, screen)
    return Check((*findings, *probed), None if skipped else resolved.backbone, skipped)


def without_model(
    source: Decoded[LabelledDomain], target: Decoded[UnlabelledDomain], config: Resolved, screen: Screen
) -> list[Finding]:
    """The checks that `adapt` makes too, and those of the file headers, which would take it too long."""
    source_headers = read_headers(source.domain.files(), screen, "source")
    target_headers = read_headers(target.domain.files(), screen, "target")
    return [
        *preflight.examine(
            source.traces(),
            Labels(np.array(source.domain.labels), source.domain.classes),
            target.traces(),
        ),
        preflight.image_sizes("source", source.domain.paths, source_headers, config.crop),
        preflight.image_sizes("target", target.domain.paths, target_headers, config.crop),
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
