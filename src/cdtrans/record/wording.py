"""Every sentence about the outcome of a run, made from typed values: for the screen, --json, the report, the model card
and notebooks."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Literal, NamedTuple

from cdtrans.errors import counted, ended, first_of, named
from cdtrans.record.outcome import NO_CLASS, Answers, Choice, Crowd, Interval, Measure, Measured, ModelName, Outcome
from cdtrans.record.probabilities import SHARES, Kept

MODEL_NAMES: dict[str, str] = {"source": "source-only", "adapted": "adapted", "last": "last"}

# By code: what a measure of the guard measures, and the problem if it is below its limit.
MEASURES = {
    "source-not-learnt": (
        "accuracy of the source-only model on its own training images",
        "the source-only model is right on only {value:.0%} of the images it was trained on (healthy runs: over "
        "{limit:.0%}): are the source's labels right, and was it trained long enough?",
    ),
    "labels-not-learnable": (
        "accuracy of a probe on the source, cross-validated, from chance (0%) to perfect (100%)",
        "a probe is right on only {unseen:.0%} of the source images that it has not seen (always the largest class: "
        "{chance:.0%}): are the source's labels right?",
    ),
    "source-forgotten": (
        "share of the accuracy on the source that is kept",
        "accuracy on the source fell from {before:.0%} to {after:.0%}",
    ),
    "training-broken": (
        "agreement of the predictions with the nearest source images' labels, from chance (0%) to perfect (100%)",
        "the predictions agree with the labels of the nearest source images no more often than by chance",
    ),
    "support-fell": (
        "change of the agreement with the nearest source images' labels, from the source-only model to the adapted one",
        "the labels of the nearest ten source images support {after:.0%} of the predictions, and {before:.0%} of the "
        "source-only model's",
    ),
    "not-supported": (
        "agreement of the predictions with the nearest source images' labels, beyond chance and relative to what the "
        "features can know, less a penalty for the shift of the class shares",
        "the labels of the nearest source images support {first:.0%} of the predictions, and the class shares differ "
        "from the source's by {shift:.0%}, as happens if the target has other or fewer classes than the source, but "
        "also if it is very different from it",
    ),
    "no-source-images": (
        "whether there are source images to check with (100%)",
        "without them it was not checked whether the source's labels can be learnt, whether the adapted model has "
        "forgotten the source, and whether the source's labels support its predictions",
    ),
    "training-broke-off": ("whether training finished (100%)", "{cause}"),
}

FEATURES = {
    "pretrained": "The evidence comes from features of the pretrained backbone, before the run trained it.",
    "source-only": (
        "The evidence comes from features of the source-only model, because no pretrained weights were available. They "
        "tend to agree with that model's own predictions: trust the evidence less."
    ),
}
CALIBRATED = {
    "estimate": "With it, the probabilities are calibrated to that estimate.",
    "labels": "With it, the probabilities are calibrated with the labels of some target images.",
    "nothing": "The probabilities are not calibrated on the target: fewer of the labels may be right than they say.",
}
UNANSWERED = {
    "share": "some images show none of the classes, and nobody has said how many",
    "images": "many images look unlike every class; they may show something else, or the domains may be far apart",
    "classes": "some classes seem absent, and nobody has looked whether they are",
}


Tone = Literal["good", "warned", "bad"]


class Headline(NamedTuple):
    """The verdict in a few words and in one sentence."""

    tone: Tone
    badge: str
    sentence: str


VERDICTS: dict[str, tuple[Tone, str]] = {
    "better": ("good", "better"),
    "unknown": ("warned", "cannot tell"),
    "harm": ("bad", "harm found"),
}


def headline(outcome: Outcome, measured: Measured | None = None) -> Headline:
    """The verdict, its premise, and the model that the run uses; `opening` says why."""
    uses = f"This run uses {chosen_model(outcome.choice)}"
    if outcome.contradicted_by(measured):
        return Headline("bad", "claim refuted", f"{uses}.")
    if outcome.trained_with_labels:
        sentence = "This run was trained on pairs made with target labels: it is a measurement, not an adaptation."
        return Headline("warned", "trained with target labels", sentence)
    if outcome.choice.by == "person":
        sentence = f"{uses}, which was chosen by hand ('cdtrans choose') against the run's own choice."
        return Headline("warned", "chosen by hand", sentence)
    if not outcome.adapted_epoch:
        return Headline("bad", "stopped", f"{uses}: there is no adapted model.")
    if outcome.setback and outcome.verdict.kind == "better":
        return Headline("warned", "later epochs went wrong", f"{uses}, an earlier one.")
    claims = outcome.verdict.kind == "better" or outcome.estimate
    holds = f" What is said of it holds {premise(outcome)}." if claims else ""
    return Headline(*VERDICTS[outcome.verdict.kind], f"{uses}.{holds}")


def premise(outcome: Outcome) -> str:
    """The condition of the verdict, the estimate and the expected accuracies: which classes the target shows."""
    known = outcome.class_set
    number = f"{known.total - len(known.absent)} " if known.total else ""
    classes = {
        "assumed": f"your {number}classes",
        "noticed": f"the {number}classes that seem to occur ({len(known.absent)} seem absent: "
        f"{first_of(known.absent)})",
        "asked": f"the {number}classes that you did not rule out",
        "told": f"the {number}classes that you named",
    }[known.by]
    all_occur = " and all of them occur" if known.by == "assumed" else ""
    if known.strangers:
        labelled = f"by your answers {known.strangers:.0%} of the images show none, and are labelled so"
        return f"for images of {classes} ({labelled}){', if all of these occur' if all_occur else ''}"
    if known.strangers is None:
        return f"for those images that show one of {classes}"
    if known.others is False or known.curve is not None:
        return f"if all of {classes} occur" if all_occur else f"if the target shows just {classes}"
    return f"if every image shows one of {classes}{all_occur}"


def noticed_classes(outcome: Outcome, run: Path) -> str:
    """The classes that the run has noticed as absent, and how to say otherwise; empty if none."""
    absent = outcome.class_set.absent
    if outcome.class_set.by != "noticed":
        return ""
    return (
        f"{len(absent)} of your {outcome.class_set.total} classes seem absent from the target, so the adapted model "
        f"never predicts them: {', '.join(absent)}. If some occur, say so in one minute ('{ask_command(run)}') or with "
        "--target-classes all."
    )


def trained_with_labels(outcome: Outcome, model: str) -> str:
    """A warning about a model of an ablation, or empty."""
    if not outcome.trained_with_labels or model == "source":
        return ""
    return "The model was trained with target labels (cdtrans ablate): it says nothing about adaptation."


def opening(outcome: Outcome) -> str:
    """The guard's conclusion."""
    if outcome.verdict.kind == "better":
        return f"The guard judges that the adapted model is better than the source-only one, {premise(outcome)}."
    if outcome.verdict.kind == "unknown":
        kept = "the source-only model agrees better with the source, so it is used"
        kept = kept if outcome.own_choice == "source" else "the adapted model is kept"
        return f"The guard cannot tell whether adaptation helped or did harm; {kept}."
    if not outcome.guard:
        return "The guard is off, so the adapted model is kept; it would have judged that adaptation did harm."
    if outcome.adapted_epoch:
        return "The guard judges that adaptation did harm, so the source-only model is kept."
    return "The guard stopped the run before there was an adapted model; the source-only model is kept."


def findings(outcome: Outcome) -> list[str]:
    """The evidence against the adapted model."""
    return [f"{finding.code.replace('-', ' ')}: {finding_sentence(finding)}" for finding in outcome.verdict.findings]


def evidence(outcome: Outcome) -> str:
    """The guard's conclusion and the findings, without advice."""
    against = "; ".join(findings(outcome))
    return f"{opening(outcome)} Evidence, all without labels: {ended(against)}" if against else opening(outcome)


def finding_sentence(finding: Measure) -> str:
    """The problem that a measure has detected."""
    numbers = {name: max(0.0, value) for name, value in finding.numbers.items()}  # agreement may be below chance
    _, sentence = MEASURES[finding.code]
    return sentence.format(value=finding.value, limit=finding.limit, cause=finding.cause, **numbers)


def advice(outcome: Outcome, run: Path) -> str:
    """Advice after the verdict, or nothing."""
    if outcome.doubtful_classes or (outcome.question and outcome.verdict.kind != "harm"):
        question = "which classes occur, and whether some images show none of them"
        return f"Next: '{ask_command(run)}' asks, in one minute, {question}. {setback(outcome)}".rstrip()
    if outcome.verdict.kind == "unknown":
        return f"{labels_would(outcome, 'settle it')} {setback(outcome)}".rstrip()
    if outcome.own_choice == "adapted":
        return setback(outcome)
    if outcome.adapted_epoch:
        return labels_would(outcome, "confirm it")
    return (
        "If labels and classes are right, use a stronger --backbone, or train the source longer (--source-epochs) if "
        "it was not learnt; --no-guard continues anyway, in another --out."
    )


def labels_would(outcome: Outcome, purpose: str) -> str:
    """The number of labels to give, if it is one that a person would give."""
    if not outcome.labels:
        return "The models differ on so few images that no small number of labels would tell which is better."
    return f"About {counted(outcome.labels, 'label')} of target images would {purpose} ('cdtrans ask' chooses them)."


def ask_command(run: Path) -> str:
    return f"cdtrans ask {quote(str(run))}"


def setback(outcome: Outcome) -> str:
    """A warning if training went wrong after the chosen epoch, or empty."""
    if outcome.setback is None:
        return ""
    before, lowest = outcome.setback.consensus, outcome.setback.lowest
    return (
        f"Training went wrong after epoch {outcome.adapted_epoch}, which is the epoch kept: the consensus of the "
        f"label-free scores fell from {before:.3f} to {lowest:.3f}. A lower learning rate (--lr) is likely to do "
        "better."
    )


def crowd(crowd: Crowd | None, model: str = "source") -> str:
    """A warning if a model puts most images into one class, or empty."""
    if crowd is None:
        return ""
    return (
        f"The {MODEL_NAMES[model]} model puts {crowd.share:.0%} of the target images into the class {crowd.label!r}: "
        "most of these are probably wrong."
    )


def explanation(outcome: Outcome, run: Path, measured: Measured | None = None) -> str:
    """The claim that labels refute, the verdict, its evidence, advice, and how to use the other model: a paragraph."""
    parts = [refuted_claim(outcome, measured), evidence(outcome), noticed_classes(outcome, run), crowd(outcome.crowd)]
    parts.append(advice(outcome, run))
    if outcome.choice.by == "person":
        name = MODEL_NAMES[outcome.choice.model]
        parts.append(f"Since then the {name} model was chosen by hand ('cdtrans choose').")
    elif outcome.own_choice == "source" and outcome.adapted_epoch:
        parts.append(
            f"To use the adapted model anyway: '{choose_command(run, 'adapted')}', or just once: 'cdtrans predict "
            f"{quote(str(run))} IMAGES --model adapted'."
        )
    return " ".join(filter(None, parts))


def estimate(outcome: Outcome, model: str = "chosen") -> str:
    """The accuracy to expect of a model on the target, and the premise."""
    if model == "chosen":
        model = outcome.choice.model
    if model not in outcome.estimates:
        return "The accuracy of this model on the target was not estimated."
    found = outcome.estimates[model]
    if found is None and outcome.question:
        return f"The accuracy on the target is unknown: {UNANSWERED[outcome.question]}. 'cdtrans ask' finds out."
    if found is None:
        labels = f"about {counted(outcome.labels, 'label')}" if outcome.labels else "those that 'cdtrans ask' chooses"
        return f"The accuracy on the target is unknown without labels: {labels} would show it."
    unasked = outcome.class_set.by == "assumed" and outcome.class_set.others is None
    to_check = " 'cdtrans ask' finds out in one minute whether these classes are right." if unasked else ""
    return (
        f"Estimated accuracy on the target, without labels: {found.low:.0%} to {found.high:.0%}, {premise(outcome)}. "
        f"In one of ten runs the true accuracy is outside this range.{to_check}"
    )


def kept_accuracy(table: Sequence[Kept], outcome: Outcome) -> str:
    """The accuracy to expect of the most confident labels, and the premise."""
    kept = dict(zip(SHARES, table, strict=True))
    parts = [f"{kept[share].accuracy:.0%} of the most confident {kept[share].share:.0%}" for share in (0.8, 0.5)]
    return (
        f"Expected accuracy, by the model's probabilities: {kept[1.0].accuracy:.0%} of all images, "
        f"{', '.join(parts)} (see 'cdtrans predict --keep'), {premise(outcome)}."
    )


def chosen_model(choice: Choice) -> str:
    return "the source-only model" if choice.model == "source" else f"the adapted model of epoch {choice.epoch}"


def done(outcome: Outcome, run: Path, *, with_estimate: bool) -> str:
    """The last line of a run, with the estimate if nothing else has shown it."""
    found = outcome.estimate if with_estimate else None
    accuracy = f", estimated accuracy {found.low:.0%} to {found.high:.0%} {premise(outcome)}" if found else ""
    return f"Done: {run} (chosen: {chosen_model(outcome.choice)}{accuracy})"


def next_step(run: Path) -> str:
    return f"Next: cdtrans predict {quote(str(run))} IMAGES --csv predictions.csv"


def choice_confirmed(run: Path, choice: Choice, *, changed: bool) -> str:
    """The answer of `cdtrans choose`."""
    if not changed:
        return f"The run in '{run}' already uses the {MODEL_NAMES[choice.model]} model; nothing was changed."
    other: ModelName = "source" if choice.model == "adapted" else "adapted"
    back = choose_command(run, other)
    return f"The run in '{run}' now uses {chosen_model(choice)}; '{back}' changes it back."


def choose_command(run: Path | str, model: str) -> str:
    return f"cdtrans choose {quote(str(run))} {model}"


# Target labels

LABELS_FOR_TENTHS = 200  # fewer labelled images do not support tenths of a percent
EXACT = (
    "Every target image is labelled, so accuracies are exact for this target; the 95% intervals are for new images like"
    " these."
)


class Accuracy(NamedTuple):
    """The accuracy of the chosen model on the target, as far as it is known."""

    kind: Literal["measured", "estimated", "unknown"]
    headline: str
    value: str
    basis: str
    command: str  # to measure it


def accuracy(outcome: Outcome, measured: Measured | None, run: Path) -> Accuracy:
    """Measured with labels, else estimated, else unknown."""
    model, command = f"{MODEL_NAMES[outcome.choice.model]} model", ask_command(run)
    if measured is not None and outcome.choice.model in measured.models:
        value = accuracy_percent(measured.models[outcome.choice.model].accuracy, measured.images)
        images = "the target images" if measured.whole_target or measured.random else None
        about = "about " if images and not measured.whole_target else ""
        images = images or counted(measured.images, "labelled target image")
        headline = refuted_claim(outcome, measured) or f"The {model} is right on {about}{value} of {images}."
        return Accuracy("measured", headline, value, measured_basis(measured, outcome), command)
    if outcome.estimate is not None:
        value = f"{100 * outcome.estimate.low:.0f} to {100 * outcome.estimate.high:.0f}%"
        headline = f"The {model} is estimated to be right on {value} of the target images."
        return Accuracy("estimated", headline, value, f"on the target, without labels, {premise(outcome)}", command)
    headline = f"The accuracy of the {model} on the target is unknown."
    return Accuracy("unknown", headline, "unknown", estimate(outcome), command)


def refuted_claim(outcome: Outcome, measured: Measured | None) -> str:
    """The accuracy by labels beside the range that the run gave, if they refute it or its premise; otherwise empty."""
    claimed = outcome.estimate
    if measured is None or claimed is None or not outcome.contradicted_by(measured):
        return ""
    scores, n = measured.models[outcome.choice.model], measured.images
    shown = f": {counted(measured.no_class, 'image shows', 'images show')} none of them" if measured.no_class else ""
    return (
        f"Measured {accuracy_percent(scores.accuracy, n)} ({span(scores.interval, n)}, {counted(n, 'image')}), where "
        f"the run claimed {100 * claimed.low:.0f} to {100 * claimed.high:.0f}%, {premise(outcome)}{shown}."
    )


def measured_basis(measured: Measured, outcome: Outcome) -> str:
    """The images that a measured accuracy rests on, and its interval."""
    interval = span(measured.models[outcome.choice.model].interval, measured.images)
    if measured.whole_target:
        rest = " that it was not trained with" if outcome.target_labels else ""
        images = f"{counted(measured.images, 'target image')}{rest}"
        return f"measured on all {images}; 95% interval for new images like these: {interval}"
    kind = "random target image" if measured.random else "target image"
    return f"measured on {counted(measured.images, kind)}; 95% interval: {interval}"


def adapt_command(source: str, target: str, answers: Path) -> str:
    """The command that uses a file of answers. A run without source images has its own flags, which are named here by
    dots."""
    places = f"{quote(source)} {quote(target)}" if source else f"--target {quote(target)} ..."
    return f"cdtrans adapt {places} --answers {quote(str(answers))}"


def answers_show(answers: Answers, outcome: Outcome) -> list[str]:
    """The result of answers about the target's classes; whatever contradicts the run comes first."""
    by_run, sentences = outcome.class_set, []
    missed = [name for name in answers.absent if name not in by_run.absent]
    wronged = [name for name in by_run.absent if answers.occurs.get(name)]
    if missed:
        do = counted(len(missed), "class does", "classes do")
        sentences.append(
            f"{do} not occur in the target, and this run took it for granted that they do: {named(missed)}."
        )
    if wronged:
        do = counted(len(wronged), "class occurs", "classes occur")
        sentences.append(f"{do} in the target, and this run never predicts them: {named(wronged)}.")
    if curve := answers.curve:
        images = f"About {curve.share:.0%} of the target images belong to none of the classes"
        cut = f"images with a score above {curve.cut:.2f} are taken for such"
        every = "" if by_run.curve else ", and this run gives every image a class"
        sentences.append(f"{images}{every} ({cut}).")
    elif answers.belongs:
        sentences.append(f"No image was marked '{NO_CLASS}', so there is no cut.")
    return sentences


def labels_show(labelled: int, measured: Measured | None, outcome: Outcome, run: Path) -> list[str]:
    """The result of labels for target images."""
    if not labelled:
        return [
            "There is no label to measure or calibrate with: give classes, not 'unsure', for images that the model was"
            " not trained with ('cdtrans ask' chooses some)."
        ]
    if measured is None:
        return [
            f"{counted(labelled, 'label is', 'labels are')} stored, but none is of the random part. They were chosen"
            " because the model is unsure of them, so they cannot measure its accuracy: label some of the random part"
            " too."
        ]
    n, chosen = measured.images, outcome.choice.model
    basis = f"all {n} images" if measured.whole_target else f"{counted(n, 'random image')} of {measured.target}"
    refuted = refuted_claim(outcome, measured)
    sentences = [refuted] if refuted else []
    for name, scores in sorted(measured.models.items(), key=lambda item: item[0] != chosen):
        where = f", which this run uses, from {basis}" if name == chosen else " on the same images"
        value = f"{accuracy_percent(scores.accuracy, n)}, 95% interval {span(scores.interval, n)}"
        sentences.append(f"Accuracy of the {MODEL_NAMES[name]} model{where}: {value}.")
    if measured.no_class:
        sentences.append(f"Counted as wrong, being of none of the classes: {counted(measured.no_class, 'image')}.")
    if measured.absent:
        sentences.append(of_absent_classes(measured))
    if measured.unsure:
        left_out = counted(measured.unsure, "random image is", "random images are")
        sentences.append(
            f"{left_out} marked 'unsure' and left out; if such images are harder than the others, these accuracies are"
            " too high."
        )
    if measured.recalibrated:
        sentences.append("The adapted model's probabilities are now calibrated with these labels.")
    if measured.whole_target:
        sentences.append(EXACT)
    return [*sentences, comparison(measured, outcome, run) or "There is no adapted model to compare with."]


def of_absent_classes(measured: Measured) -> str:
    images = counted(measured.absent, "image is", "images are")
    return f"{images} of classes that the run takes for absent: they count as wrong. To change that: --target-classes."


def comparison(measured: Measured, outcome: Outcome, run: Path) -> str:
    """The better model by labels, and whether the run uses it; empty if only one model was measured."""
    compared, chosen = measured.comparison, outcome.choice.model
    if compared is None:
        return ""
    if compared.disagree == 0:
        return "Both models give every image the same label, so neither is better."
    p = "p < 0.001" if compared.p < 0.001 else f"p = {compared.p:.2g}"
    images = counted(measured.images, "labelled image")
    alone = (
        f"Only the adapted model is right on {compared.adapted_alone:,} of {images}, only the source-only model on "
        f"{compared.source_alone:,} (paired test, {p})"
    )
    here = " on this target" if measured.whole_target else ""
    if compared.better == "neither":
        return f"{alone}: neither is better{here}."
    if compared.better == "open":
        return f"{alone}: these labels do not decide which model is better. {more_labels(measured)}"
    better = f"{alone}: the {MODEL_NAMES[compared.better]} model is better{here}"
    if compared.better == chosen:
        return f"{better}, and the run uses it.{guard_was(outcome, compared.better)}"
    who = "you chose" if outcome.choice.by == "person" else "the run uses"
    return (
        f"{better}, but {who} the other one; '{choose_command(run, compared.better)}' changes that."
        f"{guard_was(outcome, compared.better)}"
    )


def more_labels(measured: Measured) -> str:
    """The number of labels that would decide an open comparison."""
    compared = measured.comparison
    if not measured.random or compared is None:
        return "More labels may."
    if compared.more_labels is None:
        return (
            "They are too close to say how many more labels would decide it; they disagree on"
            f" {compared.disagree:,} of {measured.target:,} images."
        )
    more = "One more random label" if compared.more_labels == 1 else f"About {compared.more_labels} more random labels"
    return f"{more} would probably decide it."


def guard_was(outcome: Outcome, better: str) -> str:
    """Whether the guard was right, if it has judged."""
    if outcome.verdict.kind == "unknown":
        return ""
    right = better == ("adapted" if outcome.verdict.kind == "better" else "source")
    return f" The guard was {'right' if right else 'wrong'}."


def accuracy_percent(share: float, images: int = LABELS_FOR_TENTHS) -> str:
    """An accuracy, with as many digits as this number of labelled images supports."""
    return f"{100 * share:.{_digits(images)}f}%"


def span(interval: Interval, images: int = LABELS_FOR_TENTHS) -> str:
    """42.2 to 67.8%"""
    low, high = (f"{100 * limit:.{_digits(images)}f}" for limit in (interval.low, interval.high))
    return f"{low} to {high}%"


def points(difference: float, images: int) -> str:
    """With a real minus sign, which is as wide as the plus."""
    return f"{100 * difference:+.{_digits(images)}f} points".replace("-", "−")


def _digits(images: int) -> int:
    return 1 if images >= LABELS_FOR_TENTHS else 0
