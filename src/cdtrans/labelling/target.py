"""What a finished run knows of its target without labels: the images, the two models' predictions, the features."""

import csv
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cdtrans.errors import CdtransError
from cdtrans.report.record import read_record

NEEDED = ("target_before", "target_after", "confidence_before", "confidence_after", "sampled_target")


@dataclass(frozen=True)
class FinishedTarget:
    """The target of a finished run, in the run's order."""

    run: Path
    root: Path  # that the paths are relative to
    paths: tuple[str, ...]
    digests: tuple[str, ...]  # of the pixels, at `resize`
    resize: int
    classes: tuple[str, ...]
    chosen: str  # 'adapted' or 'source'
    adapted: bool  # whether there is an adapted model; it need not be the chosen one
    source_predicted: np.ndarray  # [N] classes, by the source-only model
    adapted_predicted: np.ndarray  # [N]
    confidence: np.ndarray  # [N] of the chosen model
    sampled: np.ndarray  # [S] the images whose features are known
    features: np.ndarray  # [S, D] of the chosen model
    fingerprint: str  # of the images and both models' predictions

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def predicted(self) -> np.ndarray:
        """[N] by the chosen model."""
        return self.adapted_predicted if self.chosen == "adapted" else self.source_predicted

    @cached_property
    def _by_path(self) -> dict[str, int]:
        return {path: index for index, path in enumerate(self.paths)}

    @cached_property
    def _by_digest(self) -> dict[str, int]:
        return {digest: index for index, digest in reversed(list(enumerate(self.digests)))}

    def find(self, path: str, digest: str = "") -> int | None:
        """The index of an image, by its path relative to the target or else by its pixels."""
        return self._by_path.get(path, self._by_digest.get(digest))


def read_target(run: Path) -> FinishedTarget:
    record = read_record(run)
    digests = _digests(run / "images.csv")
    views = record.views or {}
    side = "before" if record.used_source else "after"
    complete = {*NEEDED, f"{side}_target"} <= views.keys() and len(digests) == len(views["target_after"]) > 0
    if not complete or not record.classes:
        raise CdtransError(
            f"The run folder '{run}' lacks the images or predictions of its target (images.csv, views.npz); run its"
            " 'cdtrans adapt' command again with another --out."
        )
    before, after = (views[f"target_{name}"].astype(np.int64) for name in ("before", "after"))
    fingerprint = hashlib.sha256("".join(digests).encode() + before.tobytes() + after.tobytes()).hexdigest()
    return FinishedTarget(
        run=run,
        root=record.root("target"),
        paths=record.target,
        digests=digests,
        resize=int(record.config.get("resize", 256)),
        classes=record.classes,
        chosen="source" if record.used_source else "adapted",
        adapted=record.adapted,
        source_predicted=before,
        adapted_predicted=after,
        confidence=views[f"confidence_{side}"].astype(np.float64),
        sampled=views["sampled_target"].astype(np.int64),
        features=views[f"{side}_target"].astype(np.float32),
        fingerprint=fingerprint,
    )


def _digests(file: Path) -> tuple[str, ...]:
    """Of the target images in images.csv, in the run's order."""
    try:
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
            return tuple(row["digest"] for row in csv.DictReader(lines) if row["domain"] == "target")
    except (OSError, KeyError):
        return ()
