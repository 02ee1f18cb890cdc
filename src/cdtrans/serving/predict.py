"""Labels for any number of images, as a CSV that is written row by row and replaced only when complete."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cdtrans.data.domains import stream_images
from cdtrans.data.images import is_image_name, judge_unreadable
from cdtrans.errors import CdtransError, printable
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import Classifier, Prediction, Unreadable
from cdtrans.serving.recorded import confidences
from cdtrans.serving.trade_off import threshold_for_accuracy, threshold_for_share
from cdtrans.storage.files import atomic, csv_line
from cdtrans.storage.run_folder import require_output
from cdtrans.trust.preflight import ignored


@dataclass
class Counts:
    """Counts of a prediction. The keys are promised by `predict --json`."""

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

    @property
    def kept(self) -> int:
        return self.images - self.abstained

    @property
    def expected_accuracy(self) -> float | None:
        """Of the labels that were kept; None if there are none."""
        return self.right / self.kept if self.kept else None

    def summary(self) -> dict[str, int | float | None]:
        names = ("images", "kept", "abstained", "skipped", "threshold", "expected_accuracy")
        return {name: getattr(self, name) for name in names}


def find_threshold(
    run: Path, model: str, screen: Screen, *, abstain: float | None, keep: float | None, accuracy: float | None
) -> float:
    """The probability below which labels are left empty: as given, or by the confidences in the run's target images."""
    if sum(value is not None for value in (abstain, keep, accuracy)) > 1:
        raise CdtransError("--abstain, --keep and --accuracy exclude each other; give one of them.")
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


def predict_to_csv(
    classifier: Classifier,
    images: Path,
    file: Path | None,
    *,
    root: Path | None,
    top: int,
    threshold: float,
    max_bad: float,
    screen: Screen,
) -> Counts:
    """Write path, label, probability, the score for no class if the classifier has one and, for top > 1, the next
    classes; to standard output without a file."""
    counts = Counts(threshold)
    lines = csv_lines(classifier, images, root, top, counts, screen)
    if file is None:
        for line in lines:
            sys.stdout.buffer.write(line if not sys.stdout.isatty() else _for_eyes(line))
        sys.stdout.buffer.flush()
        check_skipped(counts, max_bad, screen)
    else:
        check_places(images, root, file)
        header = next(lines)
        with atomic(file) as out:
            for line in chain([header], lines):
                out.write(line)
            check_skipped(counts, max_bad, screen)
        unsure = f", {counts.abstained} of them left without a label (probability below {threshold:.3g})"
        screen.result(f"Wrote {file}: {counts.images} images{unsure if threshold else ''}.")
    if threshold and counts.images:
        of_these = "" if counts.expected_accuracy is None else f"; expected to be right: {counts.expected_accuracy:.1%}"
        screen.say(f"Kept {counts.kept} of {counts.images} labels ({counts.kept / counts.images:.0%}){of_these}.")
    return counts


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
    top = min(top, len(classifier.classes))
    others: list[str] = []
    total = sum(1 for _ in stream_images(images, root, others))  # counts names only, for the progress bar
    if others:
        finding = ignored("", others)
        screen.warn(f"{finding.statement}. {finding.advice}")
    ranks = range(1, top + 1) if top > 1 else ()
    columns = [f"{what}_{k}" for k in ranks for what in ("label", "probability")]
    unknown = ["no_class"] if classifier.source_only else []
    yield csv_line(["path", "label", "probability", *unknown, *columns])
    with screen.track("predicting", total) as task:
        for result in classifier.stream(stream_images(images, root), top=top):
            task.advance(1)
            if isinstance(result, Unreadable):
                counts.skipped += 1
                counts.first_skipped = counts.first_skipped or result
                screen.warn(f"skipped '{result.path}': {result.cause}")
            else:
                yield csv_line(_fields(result, kept=counts.add(result)))


def check_skipped(counts: Counts, max_bad: float, screen: Screen) -> None:
    """The same rule as for training: a few unreadable files are counted, many are an error."""
    if counts.first_skipped is not None:
        first = counts.first_skipped
        total = counts.images + counts.skipped
        screen.warn(judge_unreadable("", counts.skipped, total, str(first.path), first.cause, max_bad))


def _fields(result: Prediction, *, kept: bool) -> list[str]:
    ranked = result.top if len(result.top) > 1 else ()
    others = [text for name, p in ranked for text in (name, f"{p:.6f}")]
    label = result.label if kept else ""
    unknown = [] if result.no_class is None else [f"{result.no_class:.6f}"]
    return [str(result.path), label, f"{result.probability:.6f}", *unknown, *others]
