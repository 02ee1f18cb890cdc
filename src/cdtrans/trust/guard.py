"""Did adaptation hurt? Objections against it, by comparing the source-only model with the adapted one.

Some are decisive: the source's labels cannot be learnt, the model has forgotten the source, training broke off. Then
the source-only model is handed over. The others compare with the source-only model's opinion of the target, and the
better the adaptation, the further it is from that: they cannot tell harm from a gain across a wide gap, so the adapted
model is handed over with a warning.

The limits lie between what healthy runs and spoilt ones showed on Office-31 and on the built-in task; every figure is
in docs/results/guard.md.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cdtrans.errors import Hopeless
from cdtrans.trust.impression import Impression

# What healthy runs showed, and what spoilt ones did where that is the evidence against them:
LEARNT = 0.5  # accuracy on the source-only model's own training images: 91 % and more; shuffled labels 28 % and less
LEARNABLE = 0.2  # of the way from chance to always right, cross-validated; shuffled labels are at chance
WELL_LEARNT = 0.8  # the same; no limit, but below it this is the first thing to mend
SOURCE_AGREEMENT = 0.5  # 80 % and more; a target of noise or of few classes, or training gone wrong, 28 % and less
FORGOTTEN = 0.8  # share of the accuracy on the source that is kept: 95 % and more; a rate 100 times too high 15 to 75 %
VANISHED = 0.75  # share of the predicted classes that are left: 96 % and more; a rate 100 times too high 30 %
SHIFTED = (
    0.15  # total variation of predictions and first centres: 12 % and less; other or fewer classes 15.4 % and more
)
CENTERS_KEPT = 0.7  # share of predictions that are the first centres': 77 % and more; other or fewer classes 24 to 69 %
CONSENSUS_FALL = 0.01  # of the consensus, against its own noise; it rose by 0.27 and more in healthy runs
FELL_LATER = 0.9  # share of the chosen epoch's consensus that all later ones have: 99 %; rate x 100 62 to 66 %

LABELS = 50  # target images: enough to see a difference of 15 points between two models

OTHER_CLASSES = ": has the target other or fewer classes than the source?"


class Measure(NamedTuple):
    """Something that the guard looks at."""

    name: str  # of the harm
    what: str  # is measured
    found: float
    limit: float
    healthy: Literal["above", "below"]  # the side of the limit
    sentence: str  # what is said if it is on the other side
    decisive: bool = False  # whether it alone is harm

    @property
    def harm(self) -> bool:
        return self.found < self.limit if self.healthy == "above" else self.found > self.limit


def objections(measures: list[Measure]) -> list[Measure]:
    return [measure for measure in measures if measure.harm]


def judge_source(before: Impression) -> list[Measure]:
    """What can be seen before stage 2 has cost anything: a decisive objection here makes it hopeless."""
    right = before.source_accuracy
    chance = float(torch.bincount(before.source_labels).max()) / len(before.source_labels)
    unseen = float(before.source_learnable)
    learnable = (unseen - chance) / max(1 - chance, 1e-9)
    cause = OTHER_CLASSES
    if right < WELL_LEARNT:  # then it cannot find the classes in the target either, whichever these are
        cause = f": it is right on only {right:.0%} of the images it was trained on, so first train it longer"
    if right < LEARNT:  # which has been said
        cause = ""
    return [
        Measure(
            "source not learnt",
            "accuracy of the source-only model on its own training images",
            right,
            LEARNT,
            "above",
            f"the source-only model is right on only {right:.0%} of the images it was trained on (healthy runs: over "
            f"{LEARNT:.0%}): are the source's labels right, and was it trained long enough?",
            decisive=True,
        ),
        Measure(
            "labels not learnable",
            "accuracy of a probe on the source, cross-validated, from chance (0%) to perfect (100%)",
            learnable,
            LEARNABLE,
            "above",
            f"a probe is right on only {unseen:.0%} of the source images that it has not seen (always "
            f"the largest class: {chance:.0%}): are the source's labels right?",
            decisive=True,
        ),
        _agreement("domains apart", before, "before adaptation", cause),
    ]


def judge_adapted(
    before: Impression, after: Impression, scores_before: dict[str, float], scores_after: dict[str, float]
) -> list[Measure]:
    """The adapted model against the source-only one."""
    kept = after.source_accuracy / max(before.source_accuracy, 1e-9)
    classes_before, classes_after = (len(x.predicted.unique()) for x in (before, after))
    shift = shifted(after.predicted, before.centers, after.target_logits.shape[1])
    same = float((after.predicted == before.centers).double().mean())
    sure, sure_before = scores_after["consensus"], scores_before["consensus"]
    cause = OTHER_CLASSES if before.source_accuracy >= WELL_LEARNT else ""
    return [
        *judge_source(before),
        _agreement("domains drifted apart", after, "after adaptation", cause),
        Measure(
            "source forgotten",
            "share of the accuracy on the source that is kept",
            kept,
            FORGOTTEN,
            "above",
            f"accuracy on the source fell from {before.source_accuracy:.0%} to {after.source_accuracy:.0%}",
            decisive=True,
        ),
        Measure(
            "vanished classes",
            "share of the predicted classes that are left",
            classes_after / classes_before,
            VANISHED,
            "above",
            f"of {classes_before} predicted classes {classes_after} are left",
        ),
        Measure(
            "predictions shifted",
            "predictions that would have to change class to have the frequencies of the first centres",
            shift,
            SHIFTED,
            "below",
            f"{shift:.0%} of the predictions would have to change class to have the frequencies that the class "
            f"centres had at the start (healthy runs: under {SHIFTED:.0%})",
        ),
        Measure(
            "centres abandoned",
            "predictions that are what the class centres said at the start",
            same,
            CENTERS_KEPT,
            "above",
            f"only {same:.0%} of the predictions are what the class centres said at the start "
            f"(healthy runs: over {CENTERS_KEPT:.0%})",
        ),
        Measure(
            "consensus fell",
            f"consensus of the label-free scores; the limit is the source-only model's less {CONSENSUS_FALL}",
            sure,
            sure_before - CONSENSUS_FALL,
            "above",
            f"the consensus of the label-free scores fell from {sure_before:.3f} to {sure:.3f}",
        ),
    ]


def gave_up(error: Hopeless) -> Measure:
    """Training that could not continue: values that are not finite, or no pairs left."""
    what = "whether training came to its end (100%)"
    return Measure("training broke off", what, 0.0, 1.0, "above", error.cause, decisive=True)


def fell_later(epoch: int, consensus: list[float]) -> str:
    """What the choice of this epoch has saved the run from: no objection against it, but people should know.
    `consensus` is the chosen epoch's and that of every later one. The lowest counts: as the learning rate falls, a
    model that has lost its way becomes sure of itself again."""
    if min(consensus) >= FELL_LATER * consensus[0]:
        return ""
    return (
        f"Training went wrong after epoch {epoch}, which is the one handed over: the consensus of the label-free "
        f"scores fell from {consensus[0]:.3f} to {min(consensus):.3f}. A lower learning rate (--lr) is likely to do "
        "better."
    )


class Verdict(NamedTuple):
    """What the guard makes of its measures."""

    verdict: str  # kept, unknown, harm, or off: harm was found but --no-guard keeps the adapted model
    measures: list[Measure]
    warning: str = ""  # of what speaks against the training, though not against the model that is handed over
    adapted: bool = True  # whether there is an adapted model

    @property
    def objections(self) -> list[Measure]:
        return objections(self.measures)

    @property
    def opening(self) -> str:
        if not self.objections:
            return "The guard found nothing against the adapted model."
        if self.verdict == "unknown":
            return "The guard cannot tell whether adaptation helped or did harm; the adapted model is the chosen one."
        if self.verdict != "harm":
            return (
                "The guard was switched off and the adapted model is kept, but it would have judged that adaptation "
                "did harm."
            )
        if self.adapted:
            return "The guard judges that adaptation did harm, and the source-only model is the chosen one."
        return "The guard stopped the run before there was an adapted model; the source-only model is the chosen one."

    @property
    def advice(self) -> str:
        if self.verdict == "unknown":
            labels = f"Label {LABELS} target images and compare both models with 'cdtrans eval' to know."
            return f"{labels} {self.warning}".rstrip()
        if self.verdict != "harm":
            return self.warning
        if self.adapted:
            return f"To know for certain, label {LABELS} target images and compare both models with 'cdtrans eval'."
        return (
            "If labels and classes are right, train the source longer (--source-epochs) or take a stronger --backbone; "
            "--no-guard continues anyway, in another --out."
        )

    @property
    def paragraph(self) -> str:
        """All of it, for the screen."""
        evidence = "; ".join(f"{f.name}: {f.sentence}" for f in self.objections)
        told = f"Evidence, all without labels: {evidence}." if evidence else ""
        return " ".join(part for part in (self.opening, told, self.advice) if part)

    def summary(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "paragraph": self.paragraph,
            "opening": self.opening,
            "advice": self.advice,
            "findings": [f._asdict() for f in self.objections],
            "measures": [m._asdict() | {"harm": m.harm} for m in self.measures],
            "warning": self.warning,
        }


def decide(measures: list[Measure], *, guard: bool, adapted: bool = True, warning: str = "") -> Verdict:
    against = objections(measures)
    if not against:
        return Verdict("kept", measures, warning)
    if adapted and not any(measure.decisive for measure in against):
        return Verdict("unknown", measures, warning)
    if guard:  # the source-only model is handed over, whatever the later epochs did
        return Verdict("harm", measures, adapted=adapted)
    return Verdict("off", measures, warning)


def shifted(predicted: Tensor, centers: Tensor, classes: int) -> float:
    """Total variation between the frequencies of two labellings of the same images."""
    a, b = (torch.bincount(x, minlength=classes).double() / max(1, len(x)) for x in (predicted, centers))
    return float((a - b).abs().sum() / 2)


def _agreement(name: str, model: Impression, when: str, cause: str) -> Measure:
    return Measure(
        name,
        f"source images whose nearest target image is in their own class, {when}",
        model.source_agreement,
        SOURCE_AGREEMENT,
        "above",
        f"{when} only {model.source_agreement:.0%} of the source images have a nearest target image in their own class "
        f"(healthy runs: over {SOURCE_AGREEMENT:.0%}){cause}",
    )
