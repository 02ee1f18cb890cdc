"""The target labels of an ablation: read from a file, matched to a run's images, compared with its pairs, or
used to make them."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np

from cdtrans.config import Config, Force, Resolved, SettingsFile, compose_run
from cdtrans.errors import DataError, MethodError
from cdtrans.inputs.decode import decode_files
from cdtrans.inputs.scan import UnlabelledDomain, scan_labelled, scan_unlabelled
from cdtrans.measure.matching import match_classes, scan_labels
from cdtrans.record.record import RunRecord
from cdtrans.run.pipeline import Result, run_pipeline
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help

UNKNOWN = -1  # class of a target image without a label


@dataclass(frozen=True)
class TargetClasses:
    """Target labels. An image is recognised by its pixels, wherever its file is; nothing is decoded before that."""

    files: list[Path]
    labels: list[int]  # indices into the model's classes
    target: UnlabelledDomain  # its store usually has the labelled images already
    config: Resolved
    screen: Screen

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """One for each file; '' for one that cannot be read, which `eval` reports."""
        files = UnlabelledDomain(self.target.root, tuple(str(file.absolute()) for file in self.files))
        return decode_files(files, self.config, self.screen, "labelled")[0].digests

    def in_order(self, record: RunRecord) -> np.ndarray:
        """[Nt] the true class of each target image of a run."""
        by_digest = dict(zip(self.digests, self.labels, strict=True))
        digests = record.images.digests["target"]
        return np.array([by_digest.get(digest, UNKNOWN) for digest in digests], dtype=np.int64)


def read_target_classes(config: Config, labels: Path, screen: Screen) -> TargetClasses:
    """Labels for the target of a configuration; their classes must be among the source's."""
    from cdtrans.run.pipeline import resolve

    root = Path(config.root) if config.root else None
    source, target = scan_labelled(Path(config.source), root), scan_unlabelled(Path(config.target), root)
    labelled = scan_labels(labels, root)
    classes = match_classes(labelled, source.classes, labels)
    resolved = resolve(replace(config, method="cdtrans", method_args={}))  # only sizes matter, which no method changes
    return TargetClasses(labelled.files(), classes.tolist(), target, resolved, screen)


def require_target_images(classes: TargetClasses, labels: Path) -> None:
    """Refuse labels of other images than the target's: a table would show scores on them as scores on the target.
    Nothing is decoded if the labelled images are the target itself, as usual."""
    if os.path.realpath(labels) == os.path.realpath(classes.config.target):
        return
    decoded, _ = decode_files(classes.target, classes.config, classes.screen, "target")
    known = {*decoded.digests, ""}
    others = [str(file) for file, digest in zip(classes.files, classes.digests, strict=True) if digest not in known]
    if others:
        raise DataError(
            "labels-not-of-target",
            f"{len(others)} of the {len(classes.files)} labelled images of '{labels}' are not in the target (the "
            f"first: {others[0]!r}); give TARGET itself with its labels, or a part of it.",
        )


@dataclass(frozen=True)
class PairQuality:
    """The pairs that one search left to train on, by target labels: Rec_s, Rec_t and Prec of the paper's Table 5."""

    round: int
    pairs: int
    recall_source: float  # share of the source images that are in some pair
    recall_target: float  # share of the target images
    precision: float | None  # share of the pairs whose images are of one class; None without a labelled pair

    @property
    def shares(self) -> tuple[float, float, float | None]:
        return self.recall_source, self.recall_target, self.precision


def pair_quality(record: RunRecord, true: np.ndarray) -> tuple[PairQuality, ...]:
    """The quality of every round's pairs; `true` holds the target's true classes, [Nt]."""
    sources, rounds = len(record.images.paths["source"]), []
    for number, pairs in record.rounds.items():
        source, target, labels = (array[pairs.kept] for array in (pairs.source, pairs.target, pairs.source_labels))
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
    return tuple(rounds)


def adapt_with_labels(
    *,
    labels: Annotated[str | Path, Help("Target labels, for pairs: TARGET with its labels.", "LABELLED")],
    config: SettingsFile,
    out: Annotated[str | Path, Help("The run folder.")],
    screen: Screen,
    source_model: Annotated[str | None, Help("A run to take stage 1 from.")] = None,
    force: Force = False,
) -> Result:
    """`adapt` on pairs made with the target labels in `labels`. Everything else, the guard and the choice of the epoch
    too, does without them."""
    import torch

    from cdtrans.paper.known_pairs import known_pairs_class

    chosen, _ = compose_run(None, None, config, {} if source_model is None else {"source_model": source_model})
    kind = known_pairs_class(chosen.method)
    if kind is None:
        raise MethodError(
            "needs-no-labels", f"The method '{chosen.method}' needs no target labels; use 'cdtrans adapt'."
        )
    out = Path(out)
    classes = read_target_classes(chosen, Path(labels), screen)
    method = kind.with_labels(lambda: torch.from_numpy(classes.in_order(RunRecord(out))))
    return run_pipeline(chosen, out, screen, force=force, method=method)
