"""Decide whether adaptation helped, did harm, or cannot be judged: compare the adapted with the source-only model.

    harm      only on decisive evidence: the source's labels cannot be learnt, the predictions agree with the nearest
              source images no more than by chance or far less than the source-only model's, or training broke off.
              The source-only model is kept.
    better    the source's labels support the adapted model's predictions (trust.support) no less than the source-only
              model's, and it is still accurate on the source
    unknown   otherwise, for instance if the target has other classes or is very different from the source, or if there
              are no source images. The adapted model is kept, with a warning and the number of labels that would
              settle it.

How often each is right, on data that the limits were not set on: docs/results/guard.md.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cdtrans.errors import Hopeless, counted, ended
from cdtrans.trust.support import Evidence, Impression, Support, crowded_class

LEARNT = 0.5  # accuracy on the source-only model's own training images
LEARNABLE = 0.2  # cross-validated accuracy, from chance (0) to always right (1); shuffled labels are at chance
FORGOTTEN = 0.9  # share of the accuracy on the source that is kept
CHANCE = 0.05  # support by the nearest ten images; ruined models are below it
FELL, FELL_FAR = 0.03, 0.25  # loss of support by the nearest ten images through adaptation; the second is harm
TELLING, MANY = 0.7, 100  # accuracy of a probe on the source, and target images, that FELL_FAR needs to be harm
SUPPORTED = 0.3  # support minus SHIFT_COUNTS times the shift of the class shares
SHIFT_COUNTS = 1.5
FELL_LATER = 0.9  # share of the chosen epoch's consensus that all later epochs of a healthy run reach

SETTLING = 20  # images on which two models differ: if 15 of them are right for one, chance is unlikely (4%)


class Measure(NamedTuple):
    """One measure of the guard."""

    name: str  # of the problem that it detects
    what: str  # what is measured
    found: float
    limit: float  # healthy runs are above it
    sentence: str  # the finding if it is below the limit
    decisive: bool = False  # whether it is harm by itself

    @property
    def harm(self) -> bool:
        return self.found < self.limit


def objections(measures: list[Measure]) -> list[Measure]:
    return [measure for measure in measures if measure.harm]


def judge_source(before: Impression, evidence: Evidence) -> list[Measure]:
    """The measures that are known before stage 2 starts: a decisive objection among them ends the run."""
    if not before.has_source:
        return []
    right = before.source_accuracy
    chance = float(torch.bincount(before.source_labels).max()) / len(before.source_labels)
    unseen = float(evidence.learnable)
    learnable = (unseen - chance) / max(1 - chance, 1e-9)
    return [
        Measure(
            "source not learnt",
            "accuracy of the source-only model on its own training images",
            right,
            LEARNT,
            f"the source-only model is right on only {right:.0%} of the images it was trained on (healthy runs: over "
            f"{LEARNT:.0%}): are the source's labels right, and was it trained long enough?",
            decisive=True,
        ),
        Measure(
            "labels not learnable",
            "accuracy of a probe on the source, cross-validated, from chance (0%) to perfect (100%)",
            learnable,
            LEARNABLE,
            f"a probe is right on only {unseen:.0%} of the source images that it has not seen (always "
            f"the largest class: {chance:.0%}): are the source's labels right?",
            decisive=True,
        ),
    ]


def judge_adapted(before: Impression, after: Impression, evidence: Evidence) -> list[Measure]:
    """Compare the adapted model with the source-only one."""
    if not before.has_source:
        return [not_checked()]
    kept = after.source_accuracy / max(before.source_accuracy, 1e-9)
    found, at_start = evidence.support(after.predicted), evidence.support(before.predicted)
    gained = found.mean - at_start.mean
    fell = Measure(
        "support fell",
        "change of the agreement with the nearest source images' labels, from the source-only model to the adapted one",
        gained,
        -FELL,
        f"the labels of the nearest ten source images support {max(0.0, found.mean):.0%} of the predictions, and "
        f"{at_start.mean:.0%} of the source-only model's",
        decisive=gained < -FELL_FAR and telling(after, evidence),
    )
    return [
        *judge_source(before, evidence),
        # Not decisive: methods without a source loss, such as SHOT, can forget the source and gain on the target.
        Measure(
            "source forgotten",
            "share of the accuracy on the source that is kept",
            kept,
            FORGOTTEN,
            f"accuracy on the source fell from {before.source_accuracy:.0%} to {after.source_accuracy:.0%}",
        ),
        Measure(
            "training broken",
            "agreement of the predictions with the nearest source images' labels, from chance (0%) to perfect (100%)",
            found.mean,
            CHANCE,
            "the predictions agree with the labels of the nearest source images no more often than by chance",
            decisive=True,
        ),
        *([fell] if evidence.pretrained else []),  # its own features would favour the source-only model
        Measure(
            "not supported",
            "agreement of the predictions with the nearest source images' labels, beyond chance and relative to what "
            f"the features can know, less {SHIFT_COUNTS} times the shift of the class shares",
            score(found),
            SUPPORTED,
            f"the labels of the nearest source images support {max(0.0, found.first):.0%} of the predictions, and the "
            f"class shares differ from the source's by {found.shift:.0%}, as happens if the target has other or fewer "
            "classes than the source, but also if it is very different from it",
        ),
    ]


def telling(after: Impression, evidence: Evidence) -> bool:
    """Whether a fall of support is decisive: the features separate the source's classes, and there are enough images to
    rule out chance. This held for the runs that the limit comes from."""
    return float(evidence.learnable) >= TELLING and len(after.predicted) >= MANY


def not_checked() -> Measure:
    """The measure of a run without source images: the other measures need them."""
    return Measure(
        "no source images",
        "whether there are source images to check with (100%)",
        0.0,
        1.0,
        "without them it was not checked whether the source's labels can be learnt, whether the adapted model has "
        "forgotten the source, and whether the source's labels support its predictions",
    )


def score(support: Support) -> float:
    return support.first - SHIFT_COUNTS * support.shift


def supported(support: Support) -> bool:
    return score(support) >= SUPPORTED


def gave_up(error: Hopeless) -> Measure:
    """The measure of a run whose training could not continue: values that are not finite, or no pairs left."""
    what = "whether training finished (100%)"
    return Measure("training broke off", what, 0.0, 1.0, error.cause, decisive=True)


def fell_later(epoch: int, consensus: list[float]) -> str:
    """A warning if training went wrong after the chosen epoch. `consensus` has the chosen and every later epoch. The
    lowest counts: as the learning rate falls, a model that went wrong becomes confident again."""
    if min(consensus) >= FELL_LATER * consensus[0]:
        return ""
    return (
        f"Training went wrong after epoch {epoch}, which is the epoch kept: the consensus of the label-free "
        f"scores fell from {consensus[0]:.3f} to {min(consensus):.3f}. A lower learning rate (--lr) is likely to do "
        "better."
    )


class Verdict(NamedTuple):
    """The guard's conclusion from its measures."""

    verdict: str  # better, unknown, harm, or off: harm was found but --no-guard keeps the adapted model
    measures: list[Measure]
    warning: str = ""  # about the training, not about the model that is kept
    adapted: bool = True  # whether there is an adapted model
    labels: int = 0  # how many labels of target images would settle it
    start: str = ""  # what is wrong with the source-only model's own predictions

    @property
    def objections(self) -> list[Measure]:
        return objections(self.measures)

    @property
    def opening(self) -> str:
        if not self.objections:
            return "The guard judges that the adapted model is better than the source-only one."
        if self.verdict == "unknown":
            return "The guard cannot tell whether adaptation helped or did harm; the adapted model is kept."
        if self.verdict != "harm":
            return "The guard is off, so the adapted model is kept; it would have judged that adaptation did harm."
        if self.adapted:
            return "The guard judges that adaptation did harm, so the source-only model is kept."
        return "The guard stopped the run before there was an adapted model; the source-only model is kept."

    @property
    def advice(self) -> str:
        if self.verdict == "unknown":
            labels = (
                f"About {counted(self.labels, 'label')} of target images would settle it ('cdtrans ask' chooses them)."
            )
            return f"{labels} {self.warning}".rstrip()
        if self.verdict != "harm":
            return self.warning
        if self.adapted:
            return (
                f"About {counted(self.labels, 'label')} of target images would confirm it ('cdtrans ask' chooses them)."
            )
        return (
            "If labels and classes are right, use a stronger --backbone, or train the source longer (--source-epochs) "
            "if it was not learnt; --no-guard continues anyway, in another --out."
        )

    @property
    def paragraph(self) -> str:
        """The whole text, for the terminal."""
        evidence = "; ".join(f"{f.name}: {f.sentence}" for f in self.objections)
        told = f"Evidence, all without labels: {ended(evidence)}" if evidence else ""
        return " ".join(part for part in (self.opening, told, self.start, self.advice) if part)

    def summary(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "paragraph": self.paragraph,
            "opening": self.opening,
            "advice": self.advice,
            "findings": [f._asdict() for f in self.objections],
            "measures": [m._asdict() | {"harm": m.harm} for m in self.measures],
            "warning": self.warning,
            "start": self.start,
        }


def decide(
    measures: list[Measure], *, guard: bool, adapted: bool = True, warning: str = "", labels: int = 0
) -> Verdict:
    against = objections(measures)
    if not against:
        return Verdict("better", measures, warning)
    if adapted and not any(measure.decisive for measure in against):
        return Verdict("unknown", measures, warning, labels=labels)
    if guard:  # the source-only model is kept, whatever the later epochs did
        return Verdict("harm", measures, adapted=adapted, labels=labels)
    return Verdict("off", measures, warning)


def crowded_start(before: Impression, classes: Sequence[str]) -> str:
    """A finding about the source-only model: most of its predictions are one class, so most of them are wrong."""
    counts = (torch.bincount(x, minlength=len(classes)).tolist() for x in (before.predicted, before.source_labels))
    crowded = crowded_class(*counts)
    if crowded is None:
        return ""
    return (
        f"The source-only model puts {crowded.share:.0%} of the target images into the class "
        f"{classes[crowded.label]!r}: most of these are probably wrong."
    )


def labels_to_settle(before: Impression, after: Impression) -> int:
    """How many random target images must be labelled until SETTLING of them tell the two models apart."""
    images = len(after.predicted)
    differ = float((before.predicted != after.predicted).double().mean())
    return min(images, math.ceil(SETTLING / max(differ, SETTLING / images)))
