"""Labels for any number of images, as a CSV that is written row by row and replaced only when complete."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from cdtrans.data.domains import stream_images
from cdtrans.data.images import judge_unreadable
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import Classifier, Prediction, Unreadable
from cdtrans.storage.files import atomic, csv_line, require_writable
from cdtrans.trust.preflight import ignored


@dataclass
class Counts:
    """Counts of a prediction. The keys are promised by `predict --json`."""

    images: int = 0
    abstained: int = 0
    skipped: int = 0
    first_skipped: Unreadable | None = field(default=None, repr=False)

    def summary(self) -> dict[str, int]:
        return {"images": self.images, "abstained": self.abstained, "skipped": self.skipped}


def predict_to_csv(
    classifier: Classifier,
    images: Path,
    file: Path | None,
    *,
    root: Path | None,
    top: int,
    abstain: float,
    max_bad: float,
    screen: Screen,
) -> Counts:
    """Write path, label, probability and, for top > 1, the next classes; to standard output without a file."""
    counts = Counts()
    lines = csv_lines(classifier, images, root, top, abstain, counts, screen)
    if file is None:
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        check_skipped(counts, max_bad, screen)
    else:
        require_writable(file, "predictions", "--csv")
        header = next(lines)  # fails here for a wrong path, before a file is made
        with atomic(file) as out:
            for line in chain([header], lines):
                out.write(line)
            check_skipped(counts, max_bad, screen)
        unsure = f", {counts.abstained} of them left without a label (probability below {abstain:g})" if abstain else ""
        screen.result(f"Wrote {file}: {counts.images} images{unsure}.")
    return counts


def check_places(images: Path, root: Path | None, file: Path | None) -> None:
    """Check that there is an image, and that the CSV can be written."""
    if file is not None:
        require_writable(file, "predictions", "--csv")
    next(stream_images(images, root))


def csv_lines(
    classifier: Classifier, images: Path, root: Path | None, top: int, abstain: float, counts: Counts, screen: Screen
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
    yield csv_line(["path", "label", "probability", *columns])
    with screen.track("predicting", total) as task:
        for result in classifier.stream(stream_images(images, root), top=top):
            task.advance(1)
            if isinstance(result, Unreadable):
                counts.skipped += 1
                counts.first_skipped = counts.first_skipped or result
                screen.warn(f"skipped '{result.path}': {result.cause}")
            else:
                counts.images += 1
                counts.abstained += result.probability < abstain
                yield csv_line(_fields(result, abstain))


def check_skipped(counts: Counts, max_bad: float, screen: Screen) -> None:
    """The same rule as for training: a few unreadable files are counted, many are an error."""
    if counts.first_skipped is not None:
        first = counts.first_skipped
        total = counts.images + counts.skipped
        screen.warn(judge_unreadable("", counts.skipped, total, str(first.path), first.cause, max_bad))


def _fields(result: Prediction, abstain: float) -> list[str]:
    label = result.label if result.probability >= abstain else ""
    ranked = result.top if len(result.top) > 1 else ()
    others = [text for name, p in ranked for text in (name, f"{p:.6f}")]
    return [str(result.path), label, f"{result.probability:.6f}", *others]
