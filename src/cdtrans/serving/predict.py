"""Labels for any number of images, as a CSV that is written row by row and replaced only when complete."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from cdtrans.data.domains import stream_images
from cdtrans.data.images import is_image_name, judge_unreadable
from cdtrans.errors import CdtransError, printable
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import Classifier, Prediction, Predictions, Unreadable, key_warning, load
from cdtrans.serving.exported import exported_file, is_exported, require_run
from cdtrans.serving.recorded import confidences
from cdtrans.serving.trade_off import threshold_for_accuracy, threshold_for_share
from cdtrans.storage.files import atomic, csv_line
from cdtrans.storage.run_folder import find_model, require_output
from cdtrans.trust.preflight import ignored


@dataclass(frozen=True)
class Predicted:
    """What `predict` hands back."""

    csv: Path | None  # the file that has the predictions, if there is one
    images: int
    kept: int  # labels
    abstained: int  # images whose label is left empty: their probability is below the threshold
    skipped: int  # files that cannot be read
    threshold: float
    expected_accuracy: float | None  # of the labels that were kept; None if there are none
    predictions: Predictions  # in order; empty if they were written to a file

    def summary(self) -> dict[str, Any]:
        """The promised keys of `predict --json`."""
        names = ("images", "kept", "abstained", "skipped", "threshold", "expected_accuracy")
        return {"csv": None if self.csv is None else str(self.csv)} | {name: getattr(self, name) for name in names}

    def _repr_html_(self) -> str:
        if self.expected_accuracy is None:
            return self.predictions.html(f"{self.images} images, no label kept")
        share = f"{self.kept} of {self.images} labels kept, expected to be right: {self.expected_accuracy:.1%}"
        return self.predictions.html(share, f"The predictions are in {self.csv}." if self.csv else "")


@dataclass
class Counts:
    """Counts while images are predicted."""

    threshold: float  # labels of a lower probability are left empty
    images: int = 0
    abstained: int = 0
    skipped: int = 0
    right: float = 0.0  # labels that are expected to be right: the sum of the probabilities of those that were kept
    first_skipped: Unreadable | None = field(default=None, repr=False)

    def add(self, prediction: Prediction) -> bool:
        """Whether its label is kept."""
        kept = prediction.probability >= self.threshold
        self.images += 1
        self.abstained += not kept
        self.right += prediction.probability if kept else 0.0
        return kept

    def result(self, file: Path | None, predictions: Predictions) -> Predicted:
        kept = self.images - self.abstained
        expected = self.right / kept if kept else None
        return Predicted(file, self.images, kept, self.abstained, self.skipped, self.threshold, expected, predictions)


def predict(
    run: str | Path,
    images: str | Path,
    *,
    csv: str | Path | IO[bytes] | None = None,
    top: int = 1,
    abstain: float | None = None,
    keep: float | None = None,
    accuracy: float | None = None,
    unknown: bool = False,
    root: str | Path | None = None,
    model: str = "chosen",
    device: str = "auto",
    max_bad: float = 0.05,
    quiet: bool = False,
    screen: Screen | None = None,
) -> Predicted:
    """Label images with the classifier of a finished run, or of a file that `export` wrote: a folder of any depth, an
    image file, or a list of paths, which start at `root`. For images in memory, use `load(run).predict(images)`.

    With `csv`, a file or an open binary one, the predictions are written there, in bounded memory for any number of
    images, and the result has only their counts. `top` is how many of the most probable classes are listed. One of
    `abstain` (a probability), `keep` (a share of the images) and `accuracy` (expected of the labels) decides which
    labels are left empty. With `unknown` there is a score for images of no class. `model` is as for `load`. At most the
    share `max_bad` of the files may be unreadable."""
    if not isinstance(images, str | Path):
        raise CdtransError("The images to predict must be a path; for images in memory, use load(run).predict(images).")
    images, screen = Path(images), screen or Screen(quiet=quiet)
    exported = is_exported(run)
    if exported:
        only_runs = {"keep": keep is not None, "accuracy": accuracy is not None, "unknown": unknown}
        require_run(run, only_runs | {"model": model != "chosen"})
    run = exported_file(run) if exported else Path(run)
    root, file = None if root is None else Path(root), Path(csv) if isinstance(csv, str | Path) else csv
    threshold = find_threshold(run, model, screen, abstain=abstain, keep=keep, accuracy=accuracy)
    if not exported:
        find_model(run, model)
    elif isinstance(file, Path):
        require_output(file, "predictions", "--csv", run)
    check_places(images, root, file if isinstance(file, Path) else None)  # before torch is imported
    classifier = load(run, model=model, device=device, unknown=unknown)
    if warning := key_warning(run, classifier):
        screen.warn(warning)
    screen.say(f"model: {classifier.name}")
    return classify(classifier, images, file, root=root, top=top, threshold=threshold, max_bad=max_bad, screen=screen)


def find_threshold(
    run: Path, model: str, screen: Screen, *, abstain: float | None, keep: float | None, accuracy: float | None
) -> float:
    """The probability below which labels are left empty: as given, or by the confidences in the run's target images."""
    if sum(value is not None for value in (abstain, keep, accuracy)) > 1:
        raise CdtransError("--abstain, --keep and --accuracy exclude each other; give one of them.")
    if abstain is not None and not 0 <= abstain <= 1:
        raise CdtransError(f"The probability to abstain below must be from 0 to 1, not {abstain:g}.")
    if keep is not None:
        found = threshold_for_share(confidences(run, model), keep)
    elif accuracy is not None:
        found = threshold_for_accuracy(confidences(run, model), accuracy)
    else:
        return abstain or 0.0
    screen.say(
        f"threshold: {found.threshold:.3f}, which {found.share:.0%} of the run's own target images reach, expected "
        f"{found.accuracy:.0%} right"
    )
    return found.threshold


def classify(
    classifier: Classifier,
    images: Path,
    file: Path | IO[bytes] | None,
    *,
    root: Path | None,
    top: int,
    threshold: float,
    max_bad: float,
    screen: Screen,
) -> Predicted:
    """Write path, label, probability, the score for no class if the classifier has one and, for top > 1, the next
    classes; without a file, keep the predictions."""
    counts, predictions = Counts(threshold), Predictions()
    if file is None:
        predictions.extend(labelled(classifier, images, root, top, counts, screen))
        check_skipped(counts, max_bad, screen)
    else:
        check_places(images, root, file if isinstance(file, Path) else None)
        with atomic(file) if isinstance(file, Path) else nullcontext(file) as out:
            lines = csv_lines(classifier, images, root, top, counts, screen)
            out.writelines(map(_for_eyes, lines) if out.isatty() else lines)
            out.flush()
            check_skipped(counts, max_bad, screen)
    if isinstance(file, Path):
        unsure = f", {counts.abstained} of them left without a label (probability below {threshold:.3g})"
        screen.result(f"Wrote {file}: {counts.images} images{unsure if threshold else ''}.")
    result = counts.result(file if isinstance(file, Path) else None, predictions)
    if threshold and result.images:
        of_these = "" if result.expected_accuracy is None else f"; expected to be right: {result.expected_accuracy:.1%}"
        screen.say(f"Kept {result.kept} of {result.images} labels ({result.kept / result.images:.0%}){of_these}.")
    return result


def _for_eyes(line: bytes) -> bytes:
    """On a terminal, control characters of a name are shown and not obeyed; a file or pipe gets the name as it is."""
    return printable(line.decode("utf-8", "surrogateescape"), keep="\r\n").encode()


def check_places(images: Path, root: Path | None, file: Path | None) -> None:
    """Check that there is an image, and that the CSV can be written and replaces none."""
    if file is not None:
        require_output(file, "predictions", "--csv", images if images.is_file() else None)
        if is_image_name(file.name):
            raise CdtransError(f"'{file}' is the name of an image; the predictions are a CSV, choose another --csv.")
    next(stream_images(images, root))


def csv_lines(
    classifier: Classifier, images: Path, root: Path | None, top: int, counts: Counts, screen: Screen
) -> Iterator[bytes]:
    """The CSV line by line; `counts` is kept up to date."""
    ranks = range(1, min(top, len(classifier.classes)) + 1) if top > 1 else ()
    columns = [f"{what}_{k}" for k in ranks for what in ("label", "probability")]
    unknown = ["no_class"] if classifier.source_only else []
    yield csv_line(["path", "label", "probability", *unknown, *columns])
    for prediction in labelled(classifier, images, root, top, counts, screen):
        yield csv_line(_fields(prediction))


def labelled(
    classifier: Classifier, images: Path, root: Path | None, top: int, counts: Counts, screen: Screen
) -> Iterator[Prediction]:
    """The predictions one by one, without a label below the threshold; `counts` is kept up to date."""
    others: list[str] = []
    total = sum(1 for _ in stream_images(images, root, others))  # counts names only, for the progress bar
    if others:
        finding = ignored("", others)
        screen.warn(f"{finding.statement}. {finding.advice}")
    with screen.track("predicting", total) as task:
        for result in classifier.stream(stream_images(images, root), top=top):
            task.advance(1)
            if isinstance(result, Unreadable):
                counts.skipped += 1
                counts.first_skipped = counts.first_skipped or result
                screen.warn(f"skipped '{result.path}': {result.cause}")
            else:
                yield result if counts.add(result) else replace(result, label="")


def check_skipped(counts: Counts, max_bad: float, screen: Screen) -> None:
    """The same rule as for training: a few unreadable files are counted, many are an error."""
    if counts.first_skipped is not None:
        first = counts.first_skipped
        total = counts.images + counts.skipped
        screen.warn(judge_unreadable("", counts.skipped, total, str(first.path), first.cause, max_bad))


def _fields(result: Prediction) -> list[str]:
    ranked = result.top if len(result.top) > 1 else ()
    others = [text for name, p in ranked for text in (name, f"{p:.6f}")]
    unknown = [] if result.no_class is None else [f"{result.no_class:.6f}"]
    return [str(result.path), result.label, f"{result.probability:.6f}", *unknown, *others]
