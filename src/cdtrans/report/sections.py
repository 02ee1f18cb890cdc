"""The sections of the page that are numbers. Each is made from a record of the run, or says in one line why it is not
there."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from cdtrans.report.record import Record, Round

SHOWN_CLASSES = 40  # a longer list of classes is not read; those that stand out are shown

# What the scores of log.jsonl are called on the page, and what each asks for, in the order of the page.
SCORES = {
    "consensus": ("Consensus", "the geometric mean of four scores; by default it picks the epoch"),
    "information": ("Information", "each prediction certain, all of them varied"),
    "nuclear_norm": ("Nuclear norm", "certain and varied predictions, in another measure"),
    "clusters": ("Clusters", "the features fall into the predicted groups by themselves"),
    "centers": ("Centres", "each image lies nearest to the centre of its own predicted class"),
    "confidence": ("Confidence", "each prediction certain; collapse into one class is rewarded too"),
    "diversity": ("Diversity", "all classes predicted equally often"),
    "density": ("Neighbourhood density", "images agree with their neighbours; collapse is rewarded too"),
    "holdout": ("Held-out source", "accuracy on source images that were kept out of training"),
}
LOSSES = {
    "loss_source": ("Loss, source branch", "cross-entropy on the source's labels"),
    "loss_target": ("Loss, target branch", "cross-entropy on the target's pseudo labels"),
    "loss_distillation": ("Loss, distillation", "the target branch learns from the source-target branch"),
    "loss_divergence": ("Loss, model regularisation", "what MRKLD+LRENT takes for being sure"),
    "loss_source_target": ("Loss, source-target branch", "cross-entropy on the source's labels"),
}


@dataclass(frozen=True)
class Missing:
    """A section that has nothing to show, and why."""

    why: str


@dataclass(frozen=True)
class Measure:
    """Something that the guard looked at, and the limit to its healthy side."""

    what: str
    found: float
    limit: float
    healthy: str  # above or below
    harm: bool


@dataclass(frozen=True)
class Verdict:
    tone: str  # good, warned, bad or unknown
    badge: str  # the tone in a few words
    sentence: str
    opening: str
    findings: tuple[str, ...]
    advice: str
    measures: tuple[Measure, ...]  # none in an older run


@dataclass(frozen=True)
class Estimate:
    low: float
    high: float
    sentence: str
    harm: bool


@dataclass(frozen=True)
class Score:
    """One label-free score before and after adaptation, if there was any."""

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
        """Where the chosen epoch is, and its value."""
        if self.chosen not in self.epochs:
            return None
        value = self.values[self.epochs.index(self.chosen)]
        return self.x(self.chosen), self.y(value), value


@dataclass(frozen=True)
class ClassShare:
    """How often a class is, as shares of the images: labelled in the source, predicted in the target. Without an
    adapted model, after is before."""

    name: str
    source: float
    before: float
    after: float


@dataclass(frozen=True)
class Histogram:
    rows: tuple[ClassShare, ...]
    classes: int  # of which the rows are those that differ most

    @property
    def largest(self) -> float:
        return max(max(r.source, r.before, r.after) for r in self.rows)


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
    classes: int  # of which by_class are those that lose most
    complete: bool  # whether rejected pairs were recorded

    @property
    def largest(self) -> int:
        return max((k + r for row in self.by_class for k, r in zip(row.kept, row.rejected, strict=True)), default=1)


def verdict(record: Record) -> Verdict:
    """One sentence to remember, and what it rests on. It never says that adaptation helped: nobody knows without
    labels."""
    guard, chosen = record.result.get("guard") or {}, record.result["chosen_epoch"]
    model = f"the adapted model of epoch {chosen}"
    judged = guard.get("verdict")
    if record.trained_with_key:
        tone, badge = "warned", "trained with the answer key"
        sentence = "This run was trained on pairs made with the answer key: it measures something and adapts nothing."
    elif record.used_source and not record.adapted:
        tone, badge = "bad", "stopped"
        sentence = "There is no adapted model: the run was stopped, and hands over the source-only model."
    elif record.used_source:
        tone, badge = "bad", "harm found"
        sentence = "Adaptation was judged to do harm, so this run hands over the source-only model."
    elif judged == "kept" and guard.get("warning"):
        tone, badge = "warned", "later epochs went wrong"
        sentence = f"Training went wrong later on, so this run hands over {model}, an earlier one."
    elif judged == "kept":
        tone, badge = "good", "no sign of harm"
        sentence = f"No sign of harm was found, so this run hands over {model}."
    elif judged == "off":
        tone, badge = "bad", "harm found"
        sentence = f"This run hands over {model} against the evidence, because the guard was off."
    else:
        tone, badge = "unknown", "not checked"
        sentence = f"This run hands over {model}, and did not check whether adaptation did harm."
    findings = tuple(f"{finding['name']}: {finding['sentence']}" for finding in guard.get("findings", ()))
    opening = guard.get("opening", guard.get("paragraph", ""))  # runs of the first version have one text
    measures = tuple(
        Measure(m["what"], float(m["found"]), float(m["limit"]), m["healthy"], m["harm"])
        for m in guard.get("measures", ())
    )
    return Verdict(tone, badge, sentence, str(opening), findings, str(guard.get("advice", "")), measures)


def estimate(record: Record) -> Estimate | Missing:
    found = record.result.get("estimate")
    if not found:
        return Missing("This run made no estimate of its accuracy.")
    return Estimate(float(found["low"]), float(found["high"]), str(found["sentence"]), bool(found.get("harm")))


def scores(record: Record) -> tuple[Score, ...] | Missing:
    by_epoch = {int(line["epoch"]): line for line in record.events("scores")}
    before, after = by_epoch.get(0), by_epoch.get(record.shown_epoch)
    if before is None or after is None:
        return Missing("This run scored no model without labels.")
    shared = [name for name in _score_names(by_epoch) if name in before and name in after]
    return tuple(
        Score(*_words(name), float(before[name]), float(after[name]) if record.adapted else None) for name in shared
    )


def score_curves(record: Record) -> tuple[Curve, ...] | Missing:
    lines = {int(line["epoch"]): line for line in record.events("scores")}
    if not lines:
        return Missing("This run scored no epoch without labels.")
    if not record.adapted:
        return Missing("The run ended before the first epoch of adaptation, so there is nothing to draw over epochs.")
    curves = _drawn(curve(lines, name, _words(name), record) for name in _score_names(lines))
    return curves or Missing("Only one epoch has scores, which makes no curve; they are in log.jsonl.")


def loss_curves(record: Record) -> tuple[Curve, ...] | Missing:
    lines = {int(line["epoch"]): line for line in record.events("epoch") if line.get("stage") == "adaptation"}
    names = [name for name in LOSSES if any(name in line for line in lines.values())]
    if not names:
        return Missing("The log holds no epoch of adaptation.")
    curves = _drawn(curve(lines, name, LOSSES[name], record) for name in names)
    return curves or Missing("Only one epoch has losses, which makes no curve; they are in log.jsonl.")


def _drawn(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Those that are more than a dot."""
    return tuple(c for c in curves if len(c.epochs) > 1)


def curve(lines: dict[int, dict[str, Any]], name: str, words: tuple[str, str], record: Record) -> Curve:
    """A number of the log over the epochs that have it."""
    values = {epoch: float(lines[epoch][name]) for epoch in sorted(lines) if name in lines[epoch]}
    found = {epoch: value for epoch, value in values.items() if isfinite(value)}  # a diverged run has others
    chosen = 0 if record.used_source else int(record.result["chosen_epoch"])
    return Curve(*words, tuple(found), tuple(found.values()), chosen)


def _score_names(lines: dict[int, dict[str, Any]]) -> list[str]:
    """The known scores in the order of the page, then any that a later version has added."""
    found = {name for line in lines.values() for name, value in line.items() if isinstance(value, int | float)}
    return [n for n in SCORES if n in found] + sorted(found - SCORES.keys() - {"epoch"})


def _words(name: str) -> tuple[str, str]:
    return SCORES.get(name, (name.replace("_", " ").capitalize(), ""))


def histogram(record: Record) -> Histogram | Missing:
    before, after = record.predicted(0), record.predicted(record.shown_epoch)
    counts = ((record.data or {}).get("source") or {}).get("classes")
    if before is None or after is None or counts is None or not record.classes:
        return Missing("The run folder lacks the predictions or the counts of the classes.")
    total = max(sum(counts.values()), 1)
    source = np.array([counts.get(name, 0) / total for name in record.classes])
    shares = [np.bincount(p, minlength=len(source)) / max(len(p), 1) for p in (before, after)]
    distance = np.abs(shares[1] - source)
    shown = _most(distance, SHOWN_CLASSES)
    rows = tuple(ClassShare(record.classes[k], *(float(s[k]) for s in (source, *shares))) for k in shown)
    return Histogram(rows, len(source))


def _most(values: np.ndarray, limit: int) -> list[int]:
    """The positions of the largest values, in their own order."""
    return sorted(np.argsort(-values, kind="stable")[:limit].tolist())


def pair_counts(record: Record) -> PairCounts | Missing:
    rounds = record.rounds
    if not rounds or not record.classes:
        return Missing("The run folder holds no pairs, or no model that names their classes.")
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
