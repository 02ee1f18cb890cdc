"""How good the pairs of a finished run were, by an answer key: Rec_s, Rec_t and Prec of the paper's Table 5."""

import json
from collections.abc import Sequence
from csv import DictReader
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cdtrans.config import Config
from cdtrans.data.domains import scan_labelled
from cdtrans.data.images import pixel_digest
from cdtrans.data.stream import decode_in_order
from cdtrans.evaluation.evaluate import match_classes
from cdtrans.files import atomic
from cdtrans.pipeline import resolve

QUALITY = "pair-quality.json"  # in a run folder
UNKNOWN = -1  # of a target picture that the key does not name


@dataclass(frozen=True)
class Answers:
    """An answer key. A picture is known by its pixels, wherever its file is."""

    files: Sequence[Path]
    labels: Sequence[int]  # indices into the model's classes
    resize: int  # the size at which a run's images were decoded

    @cached_property
    def by_digest(self) -> dict[str, int]:
        """A file that cannot be read answers nothing; `eval` is where it is told of."""
        decoded = zip(decode_in_order(self.files, self.resize), self.labels, strict=True)
        return {pixel_digest(pixels): label for (_, pixels), label in decoded if isinstance(pixels, np.ndarray)}

    def of_target(self, run: Path) -> np.ndarray:
        """[Nt] the true class of each of the run's target images, in its own order."""
        return np.array([self.by_digest.get(digest, UNKNOWN) for digest in digests(run, "target")], dtype=np.int64)


def read_answers(config: Config, key: Path) -> Answers:
    """The key of a run with this configuration; its classes must be among the source's. Nothing is decoded yet."""
    root = Path(config.root) if config.root else None
    source = scan_labelled(Path(config.source), root)
    labelled = scan_labelled(key, root, allow_one_class=True)
    labels = match_classes(labelled, source.classes, key)
    resize = resolve(config).resize
    assert isinstance(resize, int), "'auto' is resolved"
    return Answers(labelled.files(), labels.tolist(), resize)


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
    with open(run / "images.csv", encoding="utf-8", errors="surrogateescape", newline="") as lines:
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
