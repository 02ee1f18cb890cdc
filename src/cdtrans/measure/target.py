"""What a finished run knows about its target without labels: the images, the two models' predictions, the features."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cdtrans.errors import CdtransError
from cdtrans.measure.matching import TargetImages
from cdtrans.record.files import intact
from cdtrans.record.layout import RESTORE
from cdtrans.record.run_folder import trained_labels
from cdtrans.record.shapes import Misfit
from cdtrans.reporting.record import Record, read_record
from cdtrans.serving.recorded import target_digests

NEEDED = ("target_before", "target_after", "confidence_before", "confidence_after", "sampled_target")


@dataclass(frozen=True)
class FinishedTarget(TargetImages):
    """The target of a finished run, without the images whose labels it was trained with (--target-labels)."""

    run: Path
    rows: np.ndarray  # [N] the images' places in what the run has recorded of its whole target
    chosen: str  # 'adapted' or 'source'
    verdict: str  # of the guard; empty in runs of the first version
    adapted: bool  # whether there is an adapted model; it need not be the chosen one
    source_predicted: np.ndarray  # [N] classes, by the source-only model
    adapted_predicted: np.ndarray  # [N]
    confidence: np.ndarray  # [N] of the chosen model
    sampled: np.ndarray  # [S] the images whose features are known
    features: np.ndarray  # [S, D] of the chosen model
    fingerprint: str  # of the images and both models' predictions

    @property
    def predicted(self) -> np.ndarray:
        """[N] by the chosen model."""
        return self.adapted_predicted if self.chosen == "adapted" else self.source_predicted


def read_target(run: Path) -> FinishedTarget:
    record = read_record(run)
    with intact(run, RESTORE):
        return _target(run, record)


def _target(run: Path, record: Record) -> FinishedTarget:
    digests = target_digests(run)
    views = record.views or {}
    side = "before" if record.used_source else "after"
    complete = {*NEEDED, f"{side}_target"} <= views.keys() and len(digests) == len(views["target_after"]) > 0
    if not complete or not record.classes:
        raise CdtransError(
            f"The run folder '{run}' lacks the images or predictions of its target (images.csv, views.npz); run its"
            " 'cdtrans adapt' command again with another --out."
        )
    before, after = (views[f"target_{name}"].astype(np.int64) for name in ("before", "after"))
    names = ("target_before", f"confidence_{side}", "sampled_target", f"{side}_target")
    sizes = [len(record.target), *(len(views[name]) for name in names)]
    if len(set(sizes[:3])) > 1 or sizes[3] != sizes[4] or not len(digests) == len(after) == sizes[0]:
        raise Misfit("images.csv and views.npz are not about the same images")
    if not all(x.min() >= 0 and x.max() < len(record.classes) for x in (before, after)):
        raise Misfit("views.npz has other classes")
    fingerprint = hashlib.sha256("".join(digests).encode() + before.tobytes() + after.tobytes()).hexdigest()
    trained = trained_labels(run)
    rows = np.array([i for i, digest in enumerate(digests) if digest not in trained], dtype=np.int64)
    if not len(rows):
        raise CdtransError(
            f"'{run}' was trained with the labels of all target images, so none is left to measure with."
        )
    sampled = views["sampled_target"].astype(np.int64)
    usable = np.isin(sampled, rows)
    return FinishedTarget(
        run=run,
        root=record.root("target"),
        paths=tuple(record.target[i] for i in rows),
        digests=tuple(digests[i] for i in rows),
        resize=int(record.config.get("resize", 256)),
        classes=record.classes,
        chosen="source" if record.used_source else "adapted",
        verdict=str(record.result.get("guard", {}).get("verdict", "")),
        adapted=record.adapted,
        trained=trained | {path: trained[d] for path, d in zip(record.target, digests, strict=True) if d in trained},
        rows=rows,
        source_predicted=before[rows],
        adapted_predicted=after[rows],
        confidence=views[f"confidence_{side}"].astype(np.float64)[rows],
        sampled=np.searchsorted(rows, sampled[usable]),
        features=views[f"{side}_target"].astype(np.float32)[usable],
        fingerprint=fingerprint,
    )
