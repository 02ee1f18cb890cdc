"""The sections of the page that show numbers. Each is made from a record of the run, or is a Missing with the
reason."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from cdtrans.errors import CdtransError
from cdtrans.methods import method_class
from cdtrans.record.probabilities import Kept
from cdtrans.record.probabilities import trade_off as trade_off_of
from cdtrans.record.run_folder import MODEL_NAMES, choose_command, chosen_by_person
from cdtrans.reporting.record import Record, Round
from cdtrans.serving.recorded import calibrated_with, confidences
from cdtrans.trust.support import crowded_class

if TYPE_CHECKING:
    from cdtrans.methods.base import Method

SHOWN_CLASSES = 40  # of more classes, only those that stand out are shown

# The scores of log.jsonl -> name and meaning, in the order of the page.
SCORES = {
    "consensus": ("Consensus", "the geometric mean of four scores; by default it selects the epoch"),
    "information": ("Information", "predictions are certain and varied"),
    "nuclear_norm": ("Nuclear norm", "predictions are certain and varied, measured differently"),
    "clusters": ("Clusters", "clusters of the features match the predicted classes"),
    "centers": ("Centres", "each image lies nearest to the centre of its own predicted class"),
    "confidence": ("Confidence", "predictions are certain; also high after a collapse into one class"),
    "diversity": ("Diversity", "all classes get equal probability on average; predictions may still be of one class"),
    "density": ("Neighbourhood density", "images agree with their neighbours; also high after a collapse"),
    "holdout": ("Held-out source", "accuracy on held-out source images"),
}
LOSSES = {
    "loss_source": ("Loss, source branch", "cross-entropy on the source's labels"),
    "loss_target": ("Loss, target branch", "cross-entropy on the target's pseudo-labels"),
    "loss_distillation": ("Loss, distillation", "the target branch learns from the source-target branch"),
    "loss_divergence": ("Loss, model regularisation", "the penalty of MRKLD+LRENT for certain predictions"),
    "loss_source_target": ("Loss, source-target branch", "cross-entropy on the source's labels"),
}
NOT_LOSSES = ("event", "stage", "epoch", "lr", "pairs")  # in the log's line of an epoch


@dataclass(frozen=True)
class Missing:
    """A section without content, and why."""

    why: str


@dataclass(frozen=True)
class Measure:
    """A value that the guard measured, and its limit."""

    what: str
    value: float
    limit: float
    healthy: str  # the side of the limit: above, and in older runs also below
    harm: bool


@dataclass(frozen=True)
class Verdict:
    tone: str  # good, warned, bad or unknown
    badge: str  # the tone in a few words
    sentence: str
    opening: str
    findings: tuple[str, ...]
    advice: str
    command: str  # that uses the adapted model although the guard refused it, or empty
    measures: tuple[Measure, ...]  # none in an older run
    features: str  # that the evidence was taken from, in a sentence; empty in an older run and without source images


@dataclass(frozen=True)
class Estimate:
    low: float
    high: float
    sentence: str
    known: bool  # whether there is a range


@dataclass(frozen=True)
class Score:
    """One label-free score before and, if there is an adapted model, after adaptation."""

    name: str
    meaning: str
    before: float
    after: float | None


@dataclass(frozen=True)
class Curve:
    """A number over the epochs, drawn in a box of WIDTH by HEIGHT."""

    WIDTH, HEIGHT = 300, 96

    name: str
    meaning: str
    epochs: tuple[int, ...]
    values: tuple[float, ...]
    chosen: int | None  # the epoch to mark

    def x(self, epoch: int) -> float:
        first, last = self.epochs[0], self.epochs[-1]
        return round(self.WIDTH * (epoch - first) / max(last - first, 1), 1)

    def y(self, value: float) -> float:
        low, high = min(self.values), max(self.values)
        return round(self.HEIGHT * (1 - (value - low) / (high - low)) if high > low else self.HEIGHT / 2, 1)

    @property
    def points(self) -> str:
        return " ".join(f"{self.x(e)},{self.y(v)}" for e, v in zip(self.epochs, self.values, strict=True))

    @property
    def mark(self) -> tuple[float, float, float] | None:
        """Position and value of the chosen epoch."""
        if self.chosen not in self.epochs:
            return None
        value = self.values[self.epochs.index(self.chosen)]
        return self.x(self.chosen), self.y(value), value


@dataclass(frozen=True)
class ClassShare:
    """The share of a class among the images: labelled in the source, predicted in the target. Without an adapted model
    `after` equals `before`."""

    name: str
    source: float
    before: float
    after: float


@dataclass(frozen=True)
class Crowd:
    """A model that puts most images into one class."""

    model: str  # source or adapted
    name: str  # of the class
    share: float
    sentence: str


@dataclass(frozen=True)
class Histogram:
    FIRST = 12  # classes that are not folded

    rows: tuple[ClassShare, ...]  # the class that differs most from the source first
    classes: int  # in all
    crowds: tuple[Crowd, ...]

    @property
    def largest(self) -> float:
        return max(max(r.source, r.before, r.after) for r in self.rows)

    def crowded(self, model: str, name: str) -> bool:
        return any((c.model, c.name) == (model, name) for c in self.crowds)


@dataclass(frozen=True)
class RoundCount:
    number: int
    proposed: int
    kept: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class ClassCount:
    """A class's pairs in every round, by the source image's class."""

    name: str
    kept: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class PairCounts:
    rounds: tuple[RoundCount, ...]
    by_class: tuple[ClassCount, ...]
    classes: int  # in all; by_class has those that lose most
    complete: bool  # whether rejected pairs were recorded

    @property
    def largest(self) -> int:
        return max((k + r for row in self.by_class for k, r in zip(row.kept, row.rejected, strict=True)), default=1)


FEATURES = {  # that the guard judged by
    "pretrained": "The evidence comes from features of the pretrained backbone, before the run trained it.",
    "source-only": (
        "The evidence comes from features of the source-only model, because no pretrained weights were available. They "
        "tend to agree with that model's own predictions: trust the evidence less."
    ),
}
VERDICTS = {  # the guard's verdict, that of older runs too -> tone, badge, sentence
    "better": ("good", "better", "This run selected {model}, which the evidence supports."),
    "kept": ("good", "no sign of harm", "No sign of harm was found, so this run selected {model}."),
    "unknown": (
        "warned",
        "cannot tell",
        "This run selected {model}; without labels it could not tell if that is better than the source-only model.",
    ),
    "harm": ("bad", "harm found", "Adaptation was judged to do harm, so this run selected {model}."),
    "off": ("bad", "harm found", "This run selected {model} against the evidence, because the guard was off."),
    "": ("unknown", "not checked", "This run selected {model} and did not check whether adaptation did harm."),
}


def verdict(record: Record) -> Verdict:
    """The verdict in one sentence, and its evidence."""
    guard = record.result.get("guard") or {}  # none in a run of the first version
    outcome = str(guard.get("verdict", ""))
    tone, badge, sentence = VERDICTS.get(outcome, VERDICTS[""])
    if record.trained_with_labels:
        tone, badge = "warned", "trained with target labels"
        sentence = "This run was trained on pairs made with target labels: it is a measurement, not an adaptation."
    elif chosen_by_person(record.result):
        tone, badge = "warned", "chosen by hand"
        sentence = "This run uses {model}, which was chosen by hand ('cdtrans choose') against the run's own choice."
    elif not record.adapted:
        tone, badge = "bad", "stopped"
        sentence = "There is no adapted model: the run was stopped and selected {model}."
    elif outcome in ("better", "kept") and guard.get("warning"):
        tone, badge = "warned", "later epochs went wrong"
        sentence = "Training went wrong later on, so this run selected {model}, an earlier one."
    findings = tuple(f"{finding['name']}: {finding['sentence']}" for finding in guard.get("findings", ()))
    opening = guard.get("opening", guard.get("paragraph", ""))  # runs of the first version have one text
    measures = tuple(
        Measure(m["what"], float(m["found"]), float(m["limit"]), m.get("healthy", "above"), m["harm"])
        for m in guard.get("measures", ())
    )
    refused = record.used_source and record.adapted and not chosen_by_person(record.result)
    return Verdict(
        tone,
        badge,
        sentence.format(model=model_in_words(record)),
        str(opening),
        findings,
        str(guard.get("advice", "")),
        choose_command(record.run, "adapted") if refused else "",
        measures,
        FEATURES.get(record.result.get("evidence_features") or "", ""),
    )


def model_in_words(record: Record) -> str:
    """The chosen model, in words."""
    if record.used_source:
        return "the source-only model"
    return f"the adapted model of epoch {record.result['chosen_epoch']}"


def about_pairs(record: Record) -> str:
    """What a pair of this run is."""
    method, kind = str(record.config.get("method", "cdtrans")), method_of(record)
    if kind is not None and kind.pairs_mean:
        return kind.pairs_mean
    if kind is not None and not kind.needs_source:
        return f"The method '{method}' trains on every target image; no source image takes part."
    return (
        f"The table counts the images of each domain that a round uses. The method '{method}' trains on source and "
        "target images side by side; the two of a pair need not belong together."
    )


def pairs_belong_together(record: Record) -> bool:
    kind = method_of(record)
    return kind is not None and bool(kind.pairs_mean)


def method_of(record: Record) -> "type[Method] | None":
    """The method's class, unless its file is gone or it belongs to an ablation."""
    try:
        return method_class(str(record.config.get("method", "cdtrans")))
    except CdtransError:
        return None


def estimate(record: Record) -> Estimate | Missing:
    value = record.result.get("estimate")
    if not value:
        return Missing("This run made no estimate of its accuracy.")
    known = value["low"] is not None and not value.get("harm")  # the last in older runs
    low, high = (float(value[end]) if known else 0.0 for end in ("low", "high"))
    return Estimate(low, high, str(value["sentence"]), known)


def trade_off(record: Record) -> tuple[Kept, ...] | Missing:
    """The expected accuracy of the most confident part of the labels."""
    found = estimate(record)
    if isinstance(found, Estimate) and not (found.known or calibrated_by_labels(record)):
        return Missing("The accuracy is unknown without labels, and so is what the probabilities mean.")
    try:
        return trade_off_of(confidences(record.run))
    except CdtransError:
        return Missing("This run did not record its logits of the target images (logits.npz).")


def calibrated_by_labels(record: Record) -> bool:
    try:
        return calibrated_with(record.run) == "labels"
    except CdtransError:  # answers.json is damaged
        return False


def scores(record: Record) -> tuple[Score, ...] | Missing:
    by_epoch = {int(line["epoch"]): line for line in record.events("scores")}
    before, after = by_epoch.get(0), by_epoch.get(record.shown_epoch)
    if before is None or after is None:
        return Missing("This run has no label-free scores.")
    shared = [name for name in _score_names(by_epoch) if name in before and name in after]
    return tuple(
        Score(*_heading(name), float(before[name]), float(after[name]) if record.adapted else None) for name in shared
    )


def selection_curve(record: Record) -> Curve | Missing:
    """The score that chose the epoch; the other scores are in log.jsonl."""
    lines = {int(line["epoch"]): line for line in record.events("scores")}
    if not lines:
        return Missing("This run has no label-free scores.")
    if not record.adapted:
        return Missing("The run ended before the first epoch of adaptation, so there are no curves.")
    rule = str(record.result.get("selection", "last"))
    name = rule if rule in SCORES else "consensus"
    drawn = curve(lines, name, _heading(name), record)
    return drawn if len(drawn.epochs) > 1 else Missing("Only one epoch has scores, too few for a curve.")


def loss_curves(record: Record) -> tuple[Curve, ...] | Missing:
    lines = {int(line["epoch"]): line for line in record.events("epoch") if line.get("stage") == "adaptation"}
    if not lines:
        return Missing("The log has no epoch of adaptation.")
    logged = dict.fromkeys(name for line in lines.values() for name in line if name not in NOT_LOSSES)
    names = [name for name in LOSSES if name in logged] + [name for name in logged if name not in LOSSES]
    curves = _drawn(curve(lines, name, LOSSES.get(name, _heading(name)), record) for name in names)
    return curves or Missing("Only one epoch has losses, too few for a curve; they are in log.jsonl.")


def _drawn(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """The curves of more than one epoch."""
    return tuple(c for c in curves if len(c.epochs) > 1)


def curve(lines: dict[int, dict[str, Any]], name: str, heading: tuple[str, str], record: Record) -> Curve:
    """A number of the log over the epochs that have it."""
    values = {epoch: float(lines[epoch][name]) for epoch in sorted(lines) if name in lines[epoch]}
    finite = {epoch: value for epoch, value in values.items() if isfinite(value)}  # not all are in a diverged run
    chosen = 0 if record.used_source else int(record.result["chosen_epoch"])
    return Curve(*heading, tuple(finite), tuple(finite.values()), chosen)


def _score_names(lines: dict[int, dict[str, Any]]) -> list[str]:
    """The scores of SCORES in its order, then those of a later version."""
    names = {name for line in lines.values() for name, value in line.items() if isinstance(value, int | float)}
    return [n for n in SCORES if n in names] + sorted(names - SCORES.keys() - {"epoch"})


def _heading(name: str) -> tuple[str, str]:
    return SCORES.get(name, (name.replace("_", " ").capitalize(), ""))


def histogram(record: Record) -> Histogram | Missing:
    before, after = record.predicted(0), record.predicted(record.shown_epoch)
    counts = ((record.data or {}).get("source") or {}).get("classes")
    if before is None or after is None or counts is None or not record.classes:
        return Missing("The run folder has no predictions or no class counts.")
    source = np.array([counts.get(name, 0) for name in record.classes])
    if not source.any():
        return Missing("There are no source images to compare the predictions' class shares with.")
    predicted = {"source": np.bincount(before, minlength=len(source))}
    if record.adapted:
        predicted["adapted"] = np.bincount(after, minlength=len(source))
    shares = [x / max(x.sum(), 1) for x in (source, predicted["source"], predicted.get("adapted", predicted["source"]))]
    distance = np.abs(shares[1:] - shares[0]).max(axis=0)
    order = np.argsort(-distance, kind="stable")[:SHOWN_CLASSES].tolist()
    rows = tuple(ClassShare(record.classes[k], *(float(s[k]) for s in shares)) for k in order)
    crowds = (crowd(name, counted, source, record.classes) for name, counted in predicted.items())
    return Histogram(rows, len(source), tuple(c for c in crowds if c is not None))


def crowd(model: str, predicted: np.ndarray, source: np.ndarray, classes: tuple[str, ...]) -> Crowd | None:
    found = crowded_class(predicted.tolist(), source.tolist())
    if found is None:
        return None
    name = classes[found.label]
    sentence = (
        f"The {MODEL_NAMES[model]} model puts {found.share:.0%} of the target images into one class, {name} "
        f"({source[found.label] / max(source.sum(), 1):.0%} of the source)"
    )
    if model == "source":
        sentence += (
            ": it hardly recognises the target's classes, so predictions that differ from its own are no sign of harm"
        )
    return Crowd(model, name, found.share, f"{sentence}.")


def _most(values: np.ndarray, limit: int) -> list[int]:
    """The positions of the largest values, in ascending order."""
    return sorted(np.argsort(-values, kind="stable")[:limit].tolist())


def pair_counts(record: Record) -> PairCounts | Missing:
    rounds = record.rounds
    if not rounds or not record.classes:
        return Missing("The run folder has no pairs, or no model with the class names.")
    complete = all(r.complete for r in rounds)
    kept = np.stack([_per_class(r, r.kept, len(record.classes)) for r in rounds], axis=1)  # [K, rounds]
    rejected = np.stack([_per_class(r, ~r.kept, len(record.classes)) for r in rounds], axis=1)
    loss = rejected[:, -1] / np.maximum(kept[:, -1] + rejected[:, -1], 1) if complete else -kept[:, -1]
    by_class = tuple(
        ClassCount(record.classes[k], tuple(kept[k].tolist()), tuple(rejected[k].tolist()))
        for k in _most(loss, SHOWN_CLASSES)
    )
    return PairCounts(tuple(map(_round_count, rounds)), by_class, len(record.classes), complete)


def _per_class(r: Round, which: np.ndarray, classes: int) -> np.ndarray:
    return np.bincount(r.source_labels[which], minlength=classes)[:classes]


def _round_count(r: Round) -> RoundCount:
    kept = int(r.kept.sum())
    return RoundCount(r.number, int(r.facts.get("proposed", len(r.kept))), kept, r.facts)
