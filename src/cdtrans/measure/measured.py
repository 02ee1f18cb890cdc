"""Measure the models of a finished run with target labels: `eval` reads labelled images, `answer` labels of the run's
own target images. Both make one `Measured`."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cdtrans.config import DeviceName, LargestBad, Root, RunFolder, WhichModel
from cdtrans.errors import CdtransError, DataError, counted, named
from cdtrans.inputs.images import judge_unreadable
from cdtrans.inputs.scan import LabelledDomain
from cdtrans.measure.intervals import accuracy_interval, class_mean_interval, labels_to_decide, sign_test, wilson
from cdtrans.measure.labels import UNSURE, LabelsByImage, require_agreement, settled_part
from cdtrans.measure.matching import (
    FileAnswers,
    RunTarget,
    match,
    match_classes,
    read_target,
    require_untrained,
    scan_labels,
)
from cdtrans.record import layout, wording
from cdtrans.record.outcome import (
    NO_CLASS,
    SIGNIFICANT,
    Answers,
    Better,
    CalibrationBin,
    Comparison,
    Measured,
    NoClassCurve,
    Part,
    Scores,
)
from cdtrans.record.probabilities import fit_curve, temperature
from cdtrans.record.record import RunRecord
from cdtrans.record.run import lock_folder, recalibrate, rewrite
from cdtrans.reporting.page import write_report
from cdtrans.runtime.screen import Pace, Screen
from cdtrans.schema import Help, checked
from cdtrans.serving.classifier import Classifier, Unreadable, load

CALIBRATION_BINS = 10  # equal widths, a common choice
ENOUGH_TO_CALIBRATE = 20  # labels of the random part that calibrate better than no label


@dataclass(frozen=True)
class Answered:
    """The answers that a run has, and what they show. `summary()` is the object that `answer --json` prints."""

    target: int  # images of the target, without those that the run was trained with
    labelled: int  # images with a class or with NO_CLASS
    answers: Answers
    command: str  # uses them

    @property
    def measured(self) -> Measured | None:
        """None without a label of the random part."""
        return self.answers.measured

    def summary(self) -> dict[str, Any]:
        answers, measured = self.answers, None if self.measured is None else self.measured.summary()
        found = {"absent": list(answers.absent), "no_class": None if answers.curve is None else asdict(answers.curve)}
        return {"target": self.target, "labelled": self.labelled, "measured": measured, **found, "next": self.command}


@checked()
def evaluate(
    run: RunFolder,
    images: Annotated[
        str | Path, Help("Labelled target images: a folder of class folders, or a list of 'path label'.", "LABELLED")
    ],
    *,
    root: Root = None,
    model: WhichModel = "chosen",
    device: DeviceName = "auto",
    max_bad: LargestBad = 0.05,
    quiet: bool = False,
    screen: Screen | None = None,
) -> Measured:
    """Score a finished run's model on labelled images: a folder of class folders, or a list of 'path label' lines,
    whose paths start at `root`. `model` is as for `load`. At most the share `max_bad` of the files may be
    unreadable."""
    where, record, screen = Path(images), RunRecord(Path(run)), screen or Screen(quiet=quiet)
    name = record.model_name(model)
    labelled = scan_labels(where, None if root is None else Path(root))
    classifier = load(run, model=model, device=device)
    if warning := wording.trained_with_labels(record.outcome, name):
        screen.warn(warning)
    target = read_target(record)
    rows, skipped, trained_with = predict_labelled(classifier, labelled, where, target, max_bad, screen)
    digests, classes, predicted, confidence = (np.array(column) for column in zip(*rows, strict=True))
    places, scored = [target.find("", digest) for digest in digests], predicted
    if None in places:
        warn_of_source(record, digests, screen)
        measured = Measured(name, target.classes, len(rows), target=None, whole_target=False, models={})
    else:
        measured = measure(target, np.array(places), classes)
        scored = np.where(target.rejected[np.array(places)], -1, predicted)  # as in predictions.csv
    measured = replace(
        measured,
        model=name,
        models=measured.models | {name: score_predictions(classes, scored, len(target.classes))},
        calibration=calibration(confidence, predicted == classes),
        absent=of_absent(target, classes),
        skipped=skipped,
        trained_with=trained_with,
    )
    if model == "chosen" and measured.target is not None:
        keep(record, measured, screen)
    return measured


def predict_labelled(
    classifier: Classifier, labelled: LabelledDomain, where: Path, target: RunTarget, max_bad: float, screen: Screen
) -> tuple[list[tuple[str, int, int, float]], int, int]:
    """Digest, class, predicted class and confidence of the labelled images that can measure a model; how many others
    cannot be read, and how many the run was trained with."""
    true = match_classes(labelled, target.classes, where)
    rows: list[tuple[str, int, int, float]] = []
    skipped: list[Unreadable] = []
    trained_with = 0
    with screen.track("evaluating", len(labelled), pace=Pace(batch=classifier.batch)) as task:
        for i, result in enumerate(classifier.stream(labelled.files(), digests=True)):
            if isinstance(result, Unreadable):
                skipped.append(result)
                screen.warn(f"skipped '{result.path}': {result.cause}")
            elif target.trained_label("", result.digest) is not None:
                trained_with += 1
            else:
                rows.append((result.digest, true[i], target.classes.index(result.label), result.probability))
            task.advance(1)
    if skipped:
        first = skipped[0]
        screen.warn(judge_unreadable("labelled ", len(skipped), len(labelled), str(first.path), first.cause, max_bad))
    if trained_with:
        left_out = counted(trained_with, "image is left out", "images are left out")
        screen.say(f"{left_out}: the run was trained with their labels (--answers).")
    if not rows and trained_with:
        raise DataError(
            "nothing-to-measure",
            f"The run was trained with the labels of all images of '{where}'; label others to measure it.",
        )
    if not rows:
        raise DataError(
            "no-readable-image", f"No labelled image of '{where}' can be read: restore the files, or choose others."
        )
    return rows, len(skipped), trained_with


def warn_of_source(record: RunRecord, digests: Collection[str], screen: Screen) -> None:
    """Source images say nothing about the target."""
    if of_source := len(set(record.images.digests["source"]) & set(digests)):
        are = "is a source image" if of_source == 1 else "are source images"
        problem = f"{of_source} of {len(digests):,} labelled images {are} that the run was trained on"
        screen.warn(f"{problem}; for the accuracy on the target, give labelled target images only.")


def keep(record: RunRecord, measured: Measured, screen: Screen) -> None:
    """Write evaluation.json, unless there is one of more images. If the run folder is read-only, warn instead."""
    file = record.folder / layout.MEASURED.name
    try:
        before = record.evaluation.images if record.evaluation else 0
    except CdtransError:  # damaged, and therefore replaced
        before = 0
    if before > measured.images:
        screen.say(
            f"'{file}' keeps the earlier evaluation of {counted(before, 'image')} for the report; this one, of "
            f"{measured.images:,}, is only printed. Delete the file to replace it."
        )
        return
    try:
        rewrite(record.folder, layout.MEASURED, measured)
    except OSError as error:
        screen.warn(f"The evaluation could not be saved in '{record.folder}' for the report: {error.strerror}.")


@checked()
def answer(
    run: RunFolder,
    labels: Annotated[
        str | Path, Help("labels.csv, from ask.html or filled in by hand, or a Label Studio export.", "ANSWERS")
    ],
    *,
    screen: Screen | None = None,
) -> Answered:
    """Read a file of answers, measure the run's models with all labels so far, store both in RUN/answers.json, and
    write the report again."""
    screen, record = screen or Screen(quiet=True), RunRecord(Path(run))
    record.outcome  # noqa: B018 (an unfinished run is refused, and nothing is written there)
    with lock_folder(record.folder):  # others may answer or choose at the same time
        record = RunRecord(record.folder)
        target = read_target(record)
        require_untrained(target)
        before, given, earlier = labels_so_far(target), match(Path(labels), target, screen), record.answers
        occurs, belongs, every, groups = answers_so_far(target, given)
        require_agreement(occurs, [entry.label for entry in every.values()], target.classes, "all answers so far")
        announce(target, before, given.labels, screen)
        measured = measure_answers(target, every)
        if measured and measured.model == "adapted" and measured.images >= ENOUGH_TO_CALIBRATE:
            logits = record.logits.adapted
            assert logits is not None, "there is an adapted model"
            # a model is surer of images that it was trained with, and they are not measured
            recalibrate(record, temperature(logits[target.rows], measured.accuracy))
            measured = replace(measured, recalibrated=True)
        answers = Answers(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            calibrated=(earlier is not None and earlier.calibrated) or (measured is not None and measured.recalibrated),
            measured=measured,
            labels=tuple(every[i] for i in sorted(every)),
            occurs=occurs,
            belongs=tuple(belongs[i] for i in sorted(belongs)),
            groups=tuple(groups[i] for i in sorted(groups)),
            curve=curve_through(target, belongs),
        )
        rewrite(record.folder, layout.ANSWERS, answers)
    if record.has(layout.REPORT):
        write_report(RunRecord(record.folder), screen)
    command = wording.adapt_command(record.config.source, record.config.target, Path(labels))
    return Answered(len(target), sum(entry.label != UNSURE for entry in every.values()), answers, command)


def answers_so_far(target: RunTarget, given: FileAnswers | None = None) -> FileAnswers:
    """The answers that the run has read and those given now, which replace earlier ones."""
    before, now = target.record.answers or Answers("", False, None, ()), given or FileAnswers({}, {}, {}, {})
    belongs, groups = (
        {index: entry for entry in known if (index := target.find(entry.path, entry.digest)) is not None} | new
        for known, new in ((before.belongs, now.belongs), (before.groups, now.groups))
    )
    return FileAnswers(before.occurs | now.occurs, belongs, labels_so_far(target, now.labels), groups)


def curve_through(target: RunTarget, belongs: LabelsByImage) -> NoClassCurve | None:
    sure = [i for i, entry in belongs.items() if entry.label != UNSURE]
    none = np.array([belongs[i].label == NO_CLASS for i in sure], dtype=bool)
    return fit_curve(target.no_class, target.no_class[sure], none)


def asked_parts(target: RunTarget) -> dict[int, Part]:
    """The part of every image that `ask` has chosen."""
    questions = target.record.questions
    images = questions.images if questions else ()
    return {index: q.part for q in images if (index := target.find(q.path, q.digest)) is not None}


def labels_so_far(target: RunTarget, given: LabelsByImage | None = None) -> LabelsByImage:
    """The labels that the run has read and those given now, which replace earlier ones. The part of an image is settled
    by every question about it and by every label: it may have been drawn for the random part since."""
    answers, parts = target.record.answers, asked_parts(target)
    labels: LabelsByImage = {}
    for entry in (*(answers.labels if answers else ()), *(given or {}).values()):
        if (index := target.find(entry.path, entry.digest)) is not None:
            parts[index] = settled_part(parts.get(index, ""), entry.part)
            labels[index] = replace(entry, part=parts[index])
    return labels


def announce(target: RunTarget, before: LabelsByImage, given: LabelsByImage, screen: Screen) -> None:
    """Warnings about labels that replace others, or that this run's questions did not ask for."""
    asked = asked_parts(target)
    elsewhere = sum(label.part == "random" != asked.get(i) for i, label in given.items())
    if asked and elsewhere:
        are = counted(elsewhere, "label is", "labels are")
        screen.say(f"{are} of a random part that was drawn for another run, and used to measure this one too.")
    if changed := [target.paths[i] for i, new in given.items() if i in before and before[i].label != new.label]:
        screen.warn(f"{counted(len(changed), 'image')} had another label before, which is replaced: {named(changed)}.")
    if kept := len(before.keys() - given.keys()):
        screen.say(f"{counted(kept, 'label of earlier answers is', 'labels of earlier answers are')} used too.")


def measure_answers(target: RunTarget, labels: LabelsByImage) -> Measured | None:
    """Both models by the random part only, or by all labels if every image has one; None without such a label."""
    sure = {i: entry for i, entry in labels.items() if entry.label != UNSURE}
    used = sorted(i for i, entry in sure.items() if len(sure) == len(target) or entry.part == "random")
    if not used:
        return None
    true = [target.classes.index(name) if (name := sure[i].label) != NO_CLASS else -1 for i in used]
    unsure = sum(entry.label == UNSURE and entry.part == "random" for entry in labels.values())
    return replace(measure(target, np.array(used), np.array(true), random=True), unsure=unsure)


def measure(target: RunTarget, places: np.ndarray, true: np.ndarray, *, random: bool = False) -> Measured:
    """Both models of a run, and every epoch, by labels of its target: [n] places of the images among those that the run
    was not trained with, and [n] classes, -1 for none. With `random` the images are a random sample."""
    record, outcome = target.record, target.record.outcome
    whole = len(np.unique(places)) == len(target)
    classes = len(target.classes)

    def scores(predicted: np.ndarray) -> Scores:
        counts = score_predictions(true, predicted, classes)
        if whole or not random:
            return counts
        accuracy, interval = accuracy_interval(target.confidence, places, predicted == true)
        return replace(counts, accuracy=accuracy, interval=interval)

    models = {str(name): scores(predicted[places]) for name, predicted in target.predicted.items()}
    complete = record.epochs == tuple(range(len(record.epochs))) and outcome.adapted_epoch < len(record.epochs)
    by_epoch = [record.predictions(epoch).predicted[target.rows] for epoch in record.epochs] if complete else []
    every = [np.where(target.rejected, -1, predicted)[places] for predicted in by_epoch]
    return Measured(
        model=outcome.choice.model,
        classes=target.classes,
        images=len(places),
        target=len(target),
        whole_target=whole,
        models=models,
        epochs=tuple(replace(scores(predicted), confusion=()) for predicted in every),
        adapted_epoch=outcome.adapted_epoch,
        comparison=compare_models(target, places, true, whole=whole, random=random) if "adapted" in models else None,
        random=random,
        no_class=int(((true < 0) & ~target.rejected[places]).sum()),
        absent=of_absent(target, true),
    )


def of_absent(target: RunTarget, true: np.ndarray) -> int:
    """How many of the images with these classes [n] are of classes that the run takes for absent."""
    absent = target.record.outcome.class_set.absent
    return int(np.isin(true, [target.classes.index(name) for name in absent]).sum())


def score_predictions(true: np.ndarray, predicted: np.ndarray, classes: int) -> Scores:
    """[n] true and [n] predicted classes -> scores; -1 is no class, which only a run with answers about it predicts."""
    known = true >= 0
    kept = known & (predicted >= 0)
    confusion = np.bincount(true[kept] * classes + predicted[kept], minlength=classes**2).reshape(classes, classes)
    right, images = np.diag(confusion), np.bincount(true[known], minlength=classes)
    correct = int((true == predicted).sum())
    accuracy, interval = correct / len(true), wilson(correct, len(true))
    class_mean, class_interval = accuracy, interval
    if images.any():
        class_mean = float((right[images > 0] / images[images > 0]).mean())
        class_interval = class_mean_interval(right, images)
    rows = tuple(map(tuple, confusion.tolist()))
    return Scores(accuracy, interval, class_mean, class_interval, tuple(right.tolist()), tuple(images.tolist()), rows)


def compare_models(target: RunTarget, places: np.ndarray, true: np.ndarray, *, whole: bool, random: bool) -> Comparison:
    """The adapted model against the source-only one. If every target image is labelled, chance plays no part."""
    adapted, source = (target.predicted[name][places] == true for name in ("adapted", "source"))
    wins, losses = int((adapted & ~source).sum()), int((source & ~adapted).sum())
    disagree = int((target.predicted["adapted"] != target.predicted["source"]).sum())
    p = sign_test(wins, losses)
    better: Better = "adapted" if wins > losses else "source"
    if disagree == 0 or (whole and wins == losses):
        better = "neither"
    elif not whole and p >= SIGNIFICANT:
        better = "open"
    more = labels_to_decide(wins, losses, len(places), len(target)) if random and better == "open" else None
    return Comparison(wins, losses, p, better, disagree, more)


def calibration(confidence: np.ndarray, right: np.ndarray) -> tuple[CalibrationBin, ...]:
    """[N] confidences and [N] whether each is correct -> the bins with images, the lowest confidence first."""
    place = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    bins = [place == k for k in np.unique(place)]
    return tuple(CalibrationBin(float(confidence[b].mean()), float(right[b].mean()), int(b.sum())) for b in bins)
