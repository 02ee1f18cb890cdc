"""Read labels for target images, measure the run's models with them, and store them."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from cdtrans.config import RunFolder
from cdtrans.errors import counted, named
from cdtrans.measure.answers import read_answers, read_parts, write_answers
from cdtrans.measure.comparison import EXACT, SIGNIFICANT, sign_test, wilson
from cdtrans.measure.intervals import Interval, accuracy_interval, labels_to_decide
from cdtrans.measure.labels import NO_CLASS, UNSURE, Answer, Answers, settled_part
from cdtrans.measure.matching import match
from cdtrans.measure.target import FinishedTarget, read_target
from cdtrans.record.model import read_card
from cdtrans.record.probabilities import temperature
from cdtrans.record.run_folder import MODEL_NAMES, choose_command
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, checked
from cdtrans.serving.recorded import LOGITS, calibrated_with, recalibrate, target_logits

ENOUGH = 20  # labels of the random part that calibrate better than no label
Better = Literal["adapted", "source", "neither", "open"]


@dataclass(frozen=True)
class Comparison:
    """The adapted model against the source-only one, on the images of the random part."""

    better: Better  # neither: equally many right, and every image is labelled; open: too few labels
    adapted_only: int  # images on which only the adapted model is right
    source_only: int
    p: float  # of the sign test
    disagree: int  # images of the whole target on which the models disagree
    more_labels: int | None  # that would probably decide it, if it is open and they can


@dataclass(frozen=True)
class Answered:
    """The result of the labels. The keys of `summary` are promised by `answer --json`."""

    images: int  # of the target
    labelled: int  # with a class or with NO_CLASS
    random: int  # of these, in the random part
    unsure: int  # in the random part
    no_class: int  # in the random part: they count as wrong
    chosen: str  # the model that the run uses
    verdict: str  # of the guard
    adapted: Interval | None  # accuracy; None without a label of the random part, or without an adapted model
    source: Interval | None  # accuracy of the source-only model; None without a label of the random part
    comparison: Comparison | None  # None if one of the two is None
    recalibrated: bool = False  # whether the adapted model's probabilities were recalibrated

    def summary(self) -> dict[str, Any]:
        accuracy = None if self.accuracy is None else asdict(self.accuracy)
        return asdict(self) | {"accuracy": accuracy}

    @property
    def accuracy(self) -> Interval | None:
        """The accuracy of the chosen model."""
        return self.adapted if self.chosen == "adapted" else self.source

    @property
    def complete(self) -> bool:
        """Whether every image has a label: accuracies are exact then."""
        return self.labelled == self.images

    def sentences(self, run: str | Path = "RUN") -> list[str]:
        """The result in sentences. `run` is the run folder, for a command to copy."""
        if not self.labelled:
            return [
                f"There is no label to measure or calibrate with: give classes, not '{UNSURE}', for images that the"
                " model was not trained with ('cdtrans ask' chooses some)."
            ]
        if self.accuracy is None or self.source is None:
            return [
                f"{counted(self.labelled, 'label is', 'labels are')} stored, but none is of the random part. They were"
                " chosen because the model is unsure of them, so they cannot measure its accuracy: label some of the"
                " random part too."
            ]
        basis = f"{counted(self.random, 'random image')} of {self.images}"
        if self.complete:
            basis = f"all {self.images} images"
        chosen = f"{MODEL_NAMES[self.chosen]} model, which this run uses"
        said = [f"Accuracy of the {chosen}, from {basis}: {self._measured(self.accuracy)}."]
        if self.adapted is not None:
            name, other = ("source-only", self.source) if self.chosen == "adapted" else ("adapted", self.adapted)
            said.append(f"Accuracy of the {name} model on the same images: {self._measured(other)}.")
        if self.no_class:
            said.append(
                f"Counted as wrong, because they belong to none of the classes: {counted(self.no_class, 'image')}."
            )
        if self.unsure:
            left_out = counted(self.unsure, "random image is", "random images are")
            said.append(
                f"{left_out} marked '{UNSURE}' and left out; if such images are harder than the others, these"
                " accuracies are too high."
            )
        if self.recalibrated:
            said.append("The adapted model's probabilities are now calibrated with these labels.")
        if self.complete:
            said.append(EXACT)
        return [*said, *self._compared(run)]

    def _measured(self, interval: Interval) -> str:
        """With its interval, as `eval` prints it if every image has a label."""
        right = round(interval.estimate * self.images)
        low, high = wilson(right, self.images) if self.complete else (interval.low, interval.high)
        return f"{interval.estimate:.1%}, 95% interval {low:.1%} to {high:.1%}"

    def _compared(self, run: str | Path) -> list[str]:
        found = self.comparison
        if found is None:
            return ["There is no adapted model to compare with."]
        if found.disagree == 0:
            return ["Both models give every image the same label, so neither is better."]
        alone = (
            f"Only the adapted model is right on {found.adapted_only} of these images, only the source-only model on"
            f" {found.source_only}"
        )
        here = " on this target" if self.complete else ""
        if found.better == "neither":
            return [f"{alone}: neither is better{here}."]
        test = f" (sign test, p = {found.p:.2g})"
        if found.better == "open":
            return [f"{alone}{test}: these labels do not decide which model is better. {self._outlook(found)}"]
        better = MODEL_NAMES[found.better]
        if found.better == self.chosen:
            return [f"{alone}{test}: the {better} model is better{here}, and the run uses it.{self._guard(found)}"]
        return [
            f"{alone}{test}: the {better} model is better{here}, but the run uses the other one; "
            f"'{choose_command(Path(run), found.better)}' changes that.{self._guard(found)}"
        ]

    def _guard(self, found: Comparison) -> str:
        """Whether the guard was right, if it has judged."""
        if self.verdict not in ("better", "harm"):
            return ""
        right = found.better == ("adapted" if self.verdict == "better" else "source")
        return f" The guard was {'right' if right else 'wrong'}."

    def _outlook(self, found: Comparison) -> str:
        if found.more_labels is None:
            return (
                "They are too close to say how many more labels would decide it; they disagree on"
                f" {found.disagree} of {self.images} images."
            )
        more = "One more random label" if found.more_labels == 1 else f"About {found.more_labels} more random labels"
        return f"{more} would probably decide it."


@checked()
def answer(
    run: RunFolder,
    labels: Annotated[
        str | Path, Help("labels.csv, from ask.html or filled in by hand, or a Label Studio export.", "LABELS")
    ],
    *,
    screen: Screen | None = None,
) -> Answered:
    """Read a file of labels, measure the run's models with all labels so far, and store both in RUN/answers.json."""
    screen = screen or Screen(quiet=True)
    target = read_target(Path(run))
    given = match(Path(labels), target, read_parts(target), screen)
    answers = merge(read_answers(target), given, target, screen)
    warn_of_one_class(answers, screen)
    result = measure(target, answers)
    recorded = (target.run / LOGITS).exists()  # not by older runs
    if recorded and result.adapted is not None and result.chosen == "adapted" and result.random >= ENOUGH:
        logits = target_logits(target.run, "adapted") * read_card(target.run / "adapted").temperature
        logits = logits[target.rows]  # a model is surer of images that it was trained with, and they are not measured
        recalibrate(target.run, temperature(logits, result.adapted.estimate))
        result = replace(result, recalibrated=True)
    before = target.adapted and calibrated_with(target.run, "adapted") == "labels"
    write_answers(target, answers, result.summary(), calibrated=result.recalibrated or before)
    return result


def merge(before: Answers, given: Answers, target: FinishedTarget, screen: Screen) -> Answers:
    """Earlier answers and new ones; a new one replaces an earlier one."""
    changed = [target.paths[i] for i, new in given.items() if i in before and before[i].label != new.label]
    if changed:
        screen.warn(f"{counted(len(changed), 'image')} had another label before, which is replaced: {named(changed)}.")
    kept = len(before.keys() - given.keys())
    if kept:
        screen.say(f"{counted(kept, 'label of earlier answers is', 'labels of earlier answers are')} used too.")
    again = {i: Answer(new.label, settled_part(before[i].part, new.part)) for i, new in given.items() if i in before}
    return before | given | again


def warn_of_one_class(answers: Answers, screen: Screen) -> None:
    labels = {a.label for a in answers.values() if a.label != UNSURE}
    if len(labels) == 1 and len(answers) > 1:
        screen.warn(f"All labels are {labels.pop()!r}; if the target has other classes too, check the file.")


def measure(target: FinishedTarget, answers: Answers) -> Answered:
    """Both models' accuracy, and which is better, from the random part only; from all labels if every image has one."""
    sure = {i: a for i, a in answers.items() if a.label != UNSURE}
    complete = len(sure) == len(target)
    used = sorted(i for i, a in sure.items() if complete or a.part == "random")
    adapted = source = comparison = None
    if used:
        labelled = np.array(used)
        true = np.array([target.classes.index(n) if (n := sure[i].label) != NO_CLASS else -1 for i in used])
        by_adapted, by_source = (p[labelled] == true for p in (target.adapted_predicted, target.source_predicted))
        source = accuracy_interval(target.confidence, labelled, by_source)
        if target.adapted:
            adapted = accuracy_interval(target.confidence, labelled, by_adapted)
            disagree = int((target.adapted_predicted != target.source_predicted).sum())
            comparison = compare(by_adapted, by_source, len(target), disagree)
    return Answered(
        images=len(target),
        labelled=len(sure),
        random=len(used),
        unsure=sum(a.label == UNSURE and a.part == "random" for a in answers.values()),
        no_class=sum(sure[i].label == NO_CLASS for i in used),
        chosen=target.chosen,
        verdict=target.verdict,
        adapted=adapted,
        source=source,
        comparison=comparison,
    )


def compare(adapted: np.ndarray, source: np.ndarray, images: int, disagree: int) -> Comparison:
    """[n] whether each model is right on the labelled images; `images` and `disagree` are of the whole target."""
    wins, losses = int((adapted & ~source).sum()), int((source & ~adapted).sum())
    p = sign_test(wins, losses)
    better: Better = "adapted" if wins > losses else "source"
    if disagree == 0 or (len(adapted) == images and wins == losses):
        better = "neither"
    elif len(adapted) < images and p > SIGNIFICANT:
        better = "open"
    more = labels_to_decide(wins, losses, len(adapted), images) if better == "open" else None
    return Comparison(better, wins, losses, p, disagree, more)
