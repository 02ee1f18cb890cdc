"""How good the pairs of a finished run were, by target labels: Rec_s, Rec_t and Prec of the paper's Table 5."""

import json
import os
from csv import DictReader
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cdtrans.config import Config, Resolved
from cdtrans.errors import CdtransError
from cdtrans.inputs.decode import decode_files
from cdtrans.inputs.scan import UnlabelledDomain, scan_labelled, scan_unlabelled
from cdtrans.measure.evaluate import match_classes, scan_key
from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import RESTORE
from cdtrans.run.resolve import resolve
from cdtrans.runtime.screen import Screen

QUALITY = "pair-quality.json"  # in a run folder
UNKNOWN = -1  # of a target picture that the key does not name


@dataclass(frozen=True)
class Answers:
    """Target labels. An image is recognised by its pixels, wherever its file is."""

    files: list[Path]
    labels: list[int]  # indices into the model's classes
    target: UnlabelledDomain  # whose store has the key's pictures already, unless the key has copies of them
    config: Resolved
    screen: Screen

    @cached_property
    def digests(self) -> list[str]:
        """One for each file; '' for one that cannot be read, which answers nothing: `eval` is where it is told of."""
        files = UnlabelledDomain(self.target.root, tuple(str(file.absolute()) for file in self.files))
        return list(decode_files(files, self.config, self.screen, "labelled")[0].digests)

    @cached_property
    def by_digest(self) -> dict[str, int]:
        return {digest: label for digest, label in zip(self.digests, self.labels, strict=True) if digest}

    def of_target(self, run: Path) -> np.ndarray:
        """[Nt] the true class of each of the run's target images, in its own order."""
        return np.array([self.by_digest.get(digest, UNKNOWN) for digest in digests(run, "target")], dtype=np.int64)


def read_answers(config: Config, key: Path, screen: Screen) -> Answers:
    """The key of a run with this configuration; its classes must be among the source's. Nothing is decoded yet."""
    root = Path(config.root) if config.root else None
    source, target = scan_labelled(Path(config.source), root), scan_unlabelled(Path(config.target), root)
    labelled = scan_key(key, root)
    labels = match_classes(labelled, source.classes, key)
    resolved = resolve(replace(config, method="cdtrans", method_args={}))  # only sizes matter, which no method changes
    return Answers(labelled.files(), labels.tolist(), target, resolved, screen)


def check_of_target(answers: Answers, key: Path) -> None:
    """Refuse a key that has other pictures than the target's: a table would hold scores of these as the target's.
    Nothing is decoded for a key that is the target itself, as it usually is."""
    if os.path.realpath(key) == os.path.realpath(answers.config.target):
        return
    target = answers.target
    decoded, _ = decode_files(target, answers.config, answers.screen, "target")
    of_target = set(decoded.digests) - {""}
    if of_target.isdisjoint(answers.digests):
        raise CdtransError(
            f"None of the labelled images in '{key}' is in the target; give TARGET itself with its labels."
        )
    pictures = zip(answers.files, answers.digests, strict=True)
    others = [str(file) for file, digest in pictures if digest and digest not in of_target]
    if others:
        raise CdtransError(
            f"{len(others)} of the {len(answers.files)} labelled images of '{key}' are not in the target (the "
            f"first: {others[0]!r}); give TARGET itself with its labels, or a part of it."
        )


@dataclass(frozen=True)
class PairQuality:
    """Of the pairs that one search left to train on."""

    round: int
    pairs: int
    recall_source: float  # the share of the source images that are in some pair
    recall_target: float  # of the target images
    precision: float | None  # the share of the pairs whose images are of one class; None without any that is known


def digests(run: Path, domain: str) -> list[str]:
    """Of a domain's pictures, in the order of the indices in pairs/ and predictions/."""
    file = run / "images.csv"
    with intact(file, RESTORE), open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return [row["digest"] for row in DictReader(lines) if row["domain"] == domain]


def pair_quality(run: Path, answers: Answers) -> list[PairQuality]:
    """Every round's. It is kept in the run folder, so that a key is decoded once."""
    file = run / QUALITY
    if not file.exists():
        rounds = measure(run, answers.of_target(run), sources=len(digests(run, "source")))
        with atomic(file) as draft:
            draft.write((json.dumps([asdict(quality) for quality in rounds], indent=1) + "\n").encode())
    return [PairQuality(**values) for values in json.loads(file.read_text(encoding="utf-8"))]


def measure(run: Path, true: np.ndarray, sources: int) -> list[PairQuality]:
    """From pairs/round-NN.npz; `true` holds the target's true classes, [Nt]."""
    rounds = []
    for number, file in enumerate(sorted((run / "pairs").glob("round-*.npz")), start=1):
        with np.load(file) as arrays:
            kept = arrays["kept"]
            source, target, labels = (arrays[name][kept] for name in ("source", "target", "source_labels"))
        known = true[target] != UNKNOWN
        rounds.append(
            PairQuality(
                round=number,
                pairs=len(source),
                recall_source=len(np.unique(source)) / sources,
                recall_target=len(np.unique(target)) / len(true),
                precision=float((labels == true[target])[known].mean()) if known.any() else None,
            )
        )
    return rounds
