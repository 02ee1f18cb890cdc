"""The first lines of the page: how accurate the model is, as far as known."""

from dataclasses import dataclass
from shlex import quote

from cdtrans.errors import counted
from cdtrans.record.run_folder import MODEL_NAMES
from cdtrans.reporting.record import Record
from cdtrans.reporting.sections import Estimate, Missing
from cdtrans.reporting.target_labels import LabelledResults

LABELS_FOR_TENTHS = 200  # with fewer labelled images tenths of a percent mean nothing


@dataclass(frozen=True)
class Answer:
    """The accuracy on the target: measured with labels, else estimated, else unknown."""

    kind: str  # measured, estimated or unknown
    headline: str
    value: str
    note: str  # what the value rests on
    command: str  # that measures it, if it is not measured
    accuracy: float | None = None  # if it is measured


def answer(record: Record, estimate: Estimate | Missing, labelled: LabelledResults | Missing) -> Answer:
    model = f"{MODEL_NAMES[record.result['chosen_model']]} model"
    if not isinstance(labelled, Missing):
        value = shown(labelled.accuracy, labelled.images)
        of = "the target images" if labelled.whole_target else counted(labelled.images, "labelled target image")
        headline = f"The {model} is right on {value} of {of}."
        return Answer("measured", headline, value, measured_note(labelled), "", labelled.accuracy)
    if found := answered(record):
        accuracy, note, images = found
        value = shown(accuracy, images)
        headline = f"The {model} is right on {'' if images else 'about '}{value} of the target images."
        return Answer("measured", headline, value, note, "", accuracy)
    command = f"cdtrans ask {quote(str(record.run))}"
    if isinstance(estimate, Missing) or not estimate.known:
        why = estimate.why if isinstance(estimate, Missing) else estimate.sentence
        return Answer("unknown", f"The accuracy of the {model} on the target is unknown.", "unknown", why, command)
    value = f"{100 * estimate.low:.0f} to {100 * estimate.high:.0f}%"
    headline = f"The {model} is estimated to be right on {value} of the target images."
    return Answer("estimated", headline, value, "on the target, without labels", command)


def answered(record: Record) -> tuple[float, str, int] | None:
    """The chosen model's accuracy by the labels of `cdtrans answer`, what it rests on, and if it is exact the number of
    images, else 0."""
    try:
        result = (record.answers or {})["result"]
        measured = result[record.result["chosen_model"]]
        accuracy, low, high = (float(measured[name]) for name in ("estimate", "low", "high"))
        random, images = int(result["random"]), int(result["images"])
        exact = int(result["labelled"]) == images
    except (KeyError, TypeError, ValueError):  # nothing was measured, or the file is damaged
        return None
    if exact:
        rest = " that it was not trained with" if record.result.get("target_labels") else ""
        return accuracy, f"measured on all {counted(images, 'target image')}{rest}", images
    drawn = counted(random, "random target image")
    return accuracy, f"measured on {drawn}; 95% interval: {span((low, high), 0)}", 0


def measured_note(labelled: LabelledResults) -> str:
    """How far the measured accuracy can be relied on."""
    interval = "" if labelled.interval is None else span(labelled.interval, labelled.images)
    if labelled.whole_target:
        rest = f"; 95% interval for new images like these: {interval}" if interval else ""
        return f"measured on all {counted(labelled.images, 'target image')}{rest}"
    return f"measured on {counted(labelled.images, 'target image')}{f'; 95% interval: {interval}' if interval else ''}"


def shown(accuracy: float, images: int) -> str:
    return f"{100 * accuracy:.{_digits(images)}f}%"


def span(interval: tuple[float, float], images: int) -> str:
    low, high = (f"{100 * limit:.{_digits(images)}f}" for limit in interval)
    return f"{low} to {high}%"


def points(difference: float, images: int) -> str:
    """With a real minus sign, which is as wide as the plus."""
    return f"{100 * difference:+.{_digits(images)}f} points".replace("-", "−")


def _digits(images: int) -> int:
    return 1 if images >= LABELS_FOR_TENTHS else 0
