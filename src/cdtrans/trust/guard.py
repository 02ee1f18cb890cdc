"""Decide whether adaptation helped, did harm, or cannot be judged: compare the adapted with the source-only model.

    harm      only on decisive evidence: the source's labels cannot be learnt, the predictions agree with the nearest
              source images no more than by chance or far less than the source-only model's, or training broke off.
              The source-only model is kept.
    better    the source's labels support the adapted model's predictions (trust.support) no less than the source-only
              model's, and it is still accurate on the source
    unknown   otherwise, for instance if the target has other classes or is very different from the source, or if there
              are no source images. The adapted model is kept, with a warning and the number of labels that would
              settle it; where the classes are in doubt, the model that the source supports more (Outcome.falls_back).

How often each is right, on data that the limits were not set on: docs/results/guard.md.
"""

import math
from collections.abc import Sequence

import torch

from cdtrans.errors import Hopeless
from cdtrans.record.outcome import Measure, Setback, Support, Verdict
from cdtrans.trust.support import Evidence, Impression

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
MOST_LABELS = 100  # more than these are no advice


def judge_source(before: Impression, evidence: Evidence) -> list[Measure]:
    """The measures that are known before stage 2 starts: a decisive objection among them ends the run."""
    if not before.has_source:
        return []
    chance = float(torch.bincount(before.source_labels).max()) / len(before.source_labels)
    unseen = float(evidence.learnable)
    learnable = (unseen - chance) / max(1 - chance, 1e-9)
    numbers = {"unseen": unseen, "chance": chance}
    return [
        Measure("source-not-learnt", before.source_accuracy, LEARNT, decisive=True),
        Measure("labels-not-learnable", learnable, LEARNABLE, decisive=True, numbers=numbers),
    ]


def judge_adapted(before: Impression, after: Impression, evidence: Evidence) -> list[Measure]:
    """Compare the adapted model with the source-only one."""
    if not before.has_source:
        return [Measure("no-source-images", 0.0, 1.0)]  # the other measures need them
    kept = after.source_accuracy / max(before.source_accuracy, 1e-9)
    accuracy = {"before": before.source_accuracy, "after": after.source_accuracy}
    support, at_start = evidence.support(after.predicted), evidence.support(before.predicted)
    gained = support.mean - at_start.mean
    means = {"before": at_start.mean, "after": support.mean}
    fell = Measure("support-fell", gained, -FELL, gained < -FELL_FAR and telling(after, evidence), means)
    known = {"first": support.first, "shift": support.shift}
    return [
        *judge_source(before, evidence),
        # Not decisive: methods without a source loss, such as SHOT, can forget the source and gain on the target.
        Measure("source-forgotten", kept, FORGOTTEN, numbers=accuracy),
        Measure("training-broken", support.mean, CHANCE, decisive=True),
        *([fell] if evidence.pretrained else []),  # its own features would favour the source-only model
        Measure("not-supported", support_score(support), SUPPORTED, numbers=known),
    ]


def telling(after: Impression, evidence: Evidence) -> bool:
    """Whether a fall of support is decisive: the features separate the source's classes, and there are enough images to
    rule out chance. This held for the runs that the limit comes from."""
    return float(evidence.learnable) >= TELLING and len(after.predicted) >= MANY


def support_score(support: Support) -> float:
    return support.first - SHIFT_COUNTS * support.shift


def supported(support: Support) -> bool:
    return support_score(support) >= SUPPORTED


def gave_up(error: Hopeless) -> Measure:
    """The measure of a run whose training could not continue: values that are not finite, or no pairs left."""
    return Measure("training-broke-off", 0.0, 1.0, decisive=True, cause=error.cause)


def fell_later(consensus: Sequence[float]) -> Setback | None:
    """Whether training went wrong after the chosen epoch. `consensus` has the chosen and every later epoch. The lowest
    counts: as the learning rate falls, a model that went wrong becomes confident again."""
    lowest = min(consensus)
    return None if lowest >= FELL_LATER * consensus[0] else Setback(consensus[0], lowest)


def decide(measures: Sequence[Measure], *, adapted: bool = True) -> Verdict:
    """The verdict of these measures; `adapted`: whether there is an adapted model."""
    against = [measure for measure in measures if measure.harm]
    decisive = not adapted or any(measure.decisive for measure in against)
    return Verdict("better" if not against else "harm" if decisive else "unknown", tuple(measures))


def labels_to_settle(before: Impression, after: Impression) -> int:
    """How many random target images must be labelled until SETTLING of them tell the two models apart; 0 if that is the
    whole target, or more than anyone would label."""
    images = len(after.predicted)
    differ = float((before.predicted != after.predicted).double().mean())
    needed = math.ceil(SETTLING / max(differ, SETTLING / images))
    return needed if needed < images and needed <= MOST_LABELS else 0
