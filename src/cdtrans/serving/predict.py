"""Labels for any number of images. The table of predictions is written in one step, when it is complete."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from cdtrans.errors import CdtransError, Interrupted, counted, printable
from cdtrans.inputs.domains import stream_images, stream_names
from cdtrans.inputs.folders import no_image, walk
from cdtrans.inputs.images import is_image_name, judge_unreadable
from cdtrans.inputs.shards import Files, Shard, chunks, find_shards, share
from cdtrans.inputs.stream import cut
from cdtrans.inputs.tars import TarMember, is_tar_name
from cdtrans.record.files import atomic, csv_line, csv_lines
from cdtrans.record.probabilities import threshold_for_accuracy, threshold_for_share
from cdtrans.record.run_folder import find_model, require_output
from cdtrans.runtime.imports import importing
from cdtrans.runtime.ranks import launched_rank, launched_world
from cdtrans.runtime.screen import Screen, Task
from cdtrans.schema import checked
from cdtrans.serving.classifier import Classifier, Prediction, Predictions, Unreadable, key_warning, load
from cdtrans.serving.exported import exported_file, is_exported, require_run
from cdtrans.serving.parts import Counts, Part, PartFolder, Results, StoredPart, folder_of, predict_parts
from cdtrans.serving.recorded import calibrated_with, confidences
from cdtrans.serving.tables import CsvTable, ParquetTable, Table, column_names, require_parquet
from cdtrans.trust.preflight import ignored

NAMED_SKIPS = 10  # how many unreadable files are named on the screen; all are in a list
POLL_SECONDS = 0.2  # between checks whether the other processes are done
COUNTED_AT_ONCE = 1000  # names between two updates of the progress bar


@dataclass(frozen=True)
class Predicted:
    """What `predict` returns."""

    csv: Path | None  # the CSV file with the predictions, if one was written
    parquet: Path | None  # the Parquet file with the predictions, if one was written
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
        files = {"csv": self.csv, "parquet": self.parquet}
        return {k: None if file is None else str(file) for k, file in files.items()} | {
            name: getattr(self, name) for name in names
        }

    def _repr_html_(self) -> str:
        if self.expected_accuracy is None:
            return self.predictions.html(f"{counted(self.images, 'image')}, no label kept")
        share = f"{self.kept} of {self.images} labels kept, expected to be right: {self.expected_accuracy:.1%}"
        file = self.csv or self.parquet
        return self.predictions.html(share, f"The predictions are in {file}." if file else "")


@checked("images")
def predict(
    run: str | Path,
    images: str | Path,
    *,
    csv: str | Path | IO[bytes] | None = None,
    parquet: str | Path | None = None,
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
    """Label images with the classifier of a finished run, or with a file that `export` wrote. `images` is a folder with
    images at any depth, an image file, a list of paths (relative to `root`), a tar, or a folder or list of tars. For
    images in memory, use `load(run).predict(images)`.

    With `csv` (a path or an open binary file) or `parquet` (a path), the predictions are written there, in bounded
    memory for any number of images, and the result has only their counts. If a call is killed, make it again to
    resume. Processes of `torchrun` that make the same call share the images; only rank 0 returns the counts of all.

    `top` is how many of the most probable classes are listed. One of `abstain` (a probability), `keep` (a share of the
    images) and `accuracy` (expected of the labels) decides which labels are left empty. With `unknown` there is a score
    for images of no class. `model` is as for `load`. At most the share `max_bad` of the files may be unreadable."""
    if not isinstance(images, str | Path):
        raise CdtransError("The images to predict must be a path; for images in memory, use load(run).predict(images).")
    if csv is not None and parquet is not None:
        raise CdtransError("--csv and --parquet cannot be combined; give one of them.")
    images, screen = Path(images), screen or Screen(quiet=quiet)
    exported = is_exported(run)
    if exported:
        only_runs = {"keep": keep is not None, "accuracy": accuracy is not None, "unknown": unknown}
        require_run(run, only_runs | {"model": model != "chosen"})
    run = exported_file(run) if exported else Path(run)
    root = None if root is None else Path(root)
    file = Path(parquet) if parquet is not None else Path(csv) if isinstance(csv, str | Path) else csv
    threshold = find_threshold(run, model, screen, abstain=abstain, keep=keep, accuracy=accuracy)
    if not exported:
        find_model(run, model)
    kind = "parquet" if parquet is not None else "csv"
    check_places(images, root, file, kind, run if exported else None)  # before torch is imported
    if launched_world() > 1 and device != "cpu":
        with importing():
            from cdtrans.runtime.ranks import take_gpu
        take_gpu()
    classifier = load(run, model=model, device=device, unknown=unknown)
    if warning := key_warning(run, classifier):
        screen.warn(warning)
    if not exported and {abstain, keep, accuracy} != {None} and calibrated_with(run, model) == "nothing":
        screen.warn(
            "The probabilities of this model are not calibrated on the target, so fewer of the labels may be right "
            "than they say; 'cdtrans ask' chooses images to label, and 'cdtrans answer' measures with them."
        )
    screen.say(f"model: {classifier.name}")
    return classify(
        classifier, images, file, kind, root=root, top=top, threshold=threshold, max_bad=max_bad, screen=screen
    )


def find_threshold(
    run: Path, model: str, screen: Screen, *, abstain: float | None, keep: float | None, accuracy: float | None
) -> float:
    """The probability below which labels are left empty: as given, or found from the run's own target images."""
    if sum(value is not None for value in (abstain, keep, accuracy)) > 1:
        raise CdtransError("--abstain, --keep and --accuracy cannot be combined; give one of them.")
    if abstain is not None and not 0 <= abstain <= 1:
        raise CdtransError(f"The probability to abstain below must be from 0 to 1, not {abstain:g}.")
    if keep is not None:
        found = threshold_for_share(confidences(run, model), keep)
    elif accuracy is not None:
        found = threshold_for_accuracy(confidences(run, model), accuracy)
    else:
        return abstain or 0.0
    screen.say(
        f"threshold: {found.threshold:.3f}; {found.share:.0%} of the run's own target images reach it, and "
        f"{found.accuracy:.0%} of their labels are expected to be right"
    )
    return found.threshold


def classify(
    classifier: Classifier,
    images: Path,
    file: Path | IO[bytes] | None,
    kind: str = "csv",
    *,
    root: Path | None,
    top: int,
    threshold: float,
    max_bad: float,
    screen: Screen,
) -> Predicted:
    """Write a table of the kind 'csv' or 'parquet'; without a file, return the predictions."""
    predictions, columns, shards = Predictions(), column_names(classifier, top), find_shards(images, root)
    if isinstance(file, Path):
        check_places(images, root, file, kind)
        table: Table = ParquetTable(columns) if kind == "parquet" else CsvTable(columns)
        job = TableJob(classifier, file, table, top, threshold, max_bad, screen)
        counts = job.write(images, shards)
    else:
        counts = Counts(threshold)
        total = count_images(images, shards, screen)
        with screen.track("predicting", total) as task:
            results = classifier.stream_batches(cut(stream_images(images, root), classifier.batch), top=top)
            found = labelled(results, counts, task, lambda skipped: _warn(skipped, screen))
            if file is None:
                predictions.extend(found)
            else:
                write_lines(file, columns, found)
        check_skipped(counts, shards, max_bad, screen)
    if isinstance(file, Path) and launched_rank() == 0:
        unsure = f", {counts.abstained} of them left without a label (probability below {threshold:.3g})"
        screen.result(f"Wrote {file}: {counted(counts.images, 'image')}{unsure if threshold else ''}.")
    files = {name: file if isinstance(file, Path) and name == kind else None for name in ("csv", "parquet")}
    kept = counts.images - counts.abstained
    expected = counts.right / kept if kept else None
    numbers = (counts.images, kept, counts.abstained, counts.skipped, threshold, expected)
    if threshold and counts.images:
        of_these = "" if expected is None else f"; expected to be right: {expected:.1%}"
        screen.say(f"Kept {kept} of {counts.images} labels ({kept / counts.images:.0%}){of_these}.")
    return Predicted(files["csv"], files["parquet"], *numbers, predictions)


def check_places(
    images: Path, root: Path | None, file: Path | IO[bytes] | None, kind: str, model: Path | None = None
) -> None:
    """Check that there is at least one image, and that the table can be written without replacing an input."""
    if isinstance(file, Path):
        flag, inputs = f"--{kind}", [model, images if images.is_file() else None]
        require_output(file, "predictions", flag, *inputs)
        require_output(skipped_list(file), "list of unreadable files", flag, *inputs)
        if is_image_name(file.name) or is_tar_name(file.name):
            raise CdtransError(
                f"'{file}' has the name of an image or tar, but predictions are a table; choose another {flag}."
            )
        if folder_of(file).exists() and not folder_of(file).is_dir():
            raise CdtransError(
                f"'{folder_of(file)}' must be a folder, for finished parts, but is a file; choose another {flag}."
            )
        if kind == "parquet":
            require_parquet(file)
    elif file is not None and launched_world() > 1:
        raise CdtransError("Several processes cannot share standard output; give --csv or --parquet FILE.")
    damaged = ""
    for image in stream_images(images, root):
        if not (isinstance(image, TarMember) and image.path == image.tar):
            return
        damaged = damaged or f"'{image.tar}' cannot be read: {image.problem}."
    raise CdtransError(damaged) if damaged else no_image(images, "")


@dataclass
class TableJob:
    """Writes a table of predictions: predicts parts, and joins them at the end."""

    classifier: Classifier
    file: Path
    table: Table
    top: int
    threshold: float
    max_bad: float
    screen: Screen
    named: int = 0  # unreadable files so far; the first are named on the screen

    def write(self, images: Path, shards: list[Shard]) -> Counts:
        """Images that fit into one part are predicted and written directly, without a folder of parts."""
        total = count_images(images, shards, self.screen) if launched_rank() == 0 else None
        plain = launched_world() == 1 and len(shards) == 1 and not folder_of(self.file).exists()
        if plain and (first := next(chunks(shards, 0))).last:
            with self.screen.track("predicting", len(first.images)) as task:
                batches = cut(first.images, self.classifier.batch)
                part = self.part(self.classifier.stream_batches(batches, top=self.top), task)
            return self.join([part], shards)
        settings = {"table": self.table.name, "top": self.top, "threshold": self.threshold}
        settings |= {"unknown": self.classifier.source_only is not None, "model": self.classifier.digest()}
        with PartFolder(self.file, settings, shards) as folder:
            try:
                counts = self.in_parts(folder, total)
            except KeyboardInterrupt as error:
                if any(folder.stored()):
                    raise Interrupted(signal.SIGINT) from error
                raise
            if launched_rank() == 0:
                folder.remove()
        return counts

    def in_parts(self, folder: PartFolder, total: int | None) -> Counts:
        """Predict and join the parts. Rank 0 returns the counts of all images, the others those of their own images."""
        from cdtrans.runtime.ranks import Finish

        if done := folder.done():
            self.screen.say(f"Resuming from '{folder.folder}'; parts whose images have changed are predicted again.")
        mine = None if total is None else share(total, launched_world())  # the work of rank 0, which shows its progress
        finish = Finish() if launched_world() > 1 else None
        with self.screen.track("predicting", mine, done) as task:
            counts = predict_parts(self.classifier, folder, self.top, lambda results: self.part(results, task))
        if finish is not None:
            finish.arrive()
        if launched_rank() != 0:
            return Counts(self.threshold).of_all(counts)
        if finish is not None:
            with self.screen.track("waiting for the other processes", None):
                while not finish.reached():
                    time.sleep(POLL_SECONDS)
        return self.join(folder.collect(), folder.shards)

    def part(self, results: Results, task: Task) -> Part:
        """A part from its results. Warns about the first unreadable files."""
        counts, skipped = Counts(self.threshold), []

        def skip(file: Unreadable) -> None:
            skipped.append((file.path, file.cause))
            if self.named < NAMED_SKIPS:
                _warn(file, self.screen)
            self.named += 1

        rows = self.table.rows(labelled(results, counts, task, skip))
        return Part(counts, csv_lines(skipped), rows)

    def join(self, parts: Sequence[Part | StoredPart], shards: Sequence[Shard]) -> Counts:
        """Write the list of unreadable files, if there are any, and the table, unless too many are unreadable."""
        counts, listed = Counts(self.threshold).of_all(part.counts for part in parts), skipped_list(self.file)
        if counts.skipped:
            with atomic(listed) as out:
                out.write(csv_line(["path", "cause"]))
                out.writelines(part.load().skipped for part in parts if part.counts.skipped)
        else:
            listed.unlink(missing_ok=True)
        check_skipped(counts, shards, self.max_bad, self.screen, listed)
        with self.screen.track("joining parts", len(parts)) as task, atomic(self.file) as out:
            self.table.join(out, (_loaded(part, task) for part in parts))
        return counts


def _loaded(part: Part | StoredPart, task: Task) -> bytes:
    task.advance(1)
    return part.load().rows


def count_images(images: Path, shards: list[Shard], screen: Screen) -> int | None:
    """The number of images, for the progress bar; None for tars, which would have to be read to count them. Also warns
    about ignored files that may be images."""
    others: list[str] = []
    total: int | None = None
    if isinstance(shards[0], Files):
        total = 0
        with screen.track("counting images", None) as task:
            for names in cut(stream_names(shards[0].where, shards[0].root, others), COUNTED_AT_ONCE):
                total += len(names)
                task.advance(len(names))
    elif images.is_dir():
        others = [path for path, _ in walk(images) if not is_tar_name(path)]
    if others:
        finding = ignored("", others)
        screen.warn(f"{finding.statement}. {finding.advice}")
    return total


def labelled(results: Results, counts: Counts, task: Task, skip: Callable[[Unreadable], None]) -> Iterator[Prediction]:
    """The predictions one by one. Labels below the threshold are emptied, and `counts` is updated."""
    for result in results:
        task.advance(1)
        if isinstance(result, Unreadable):
            counts.skip(result)
            skip(result)
        else:
            yield result if counts.add(result) else replace(result, label="")


def skipped_list(file: Path) -> Path:
    return file.with_name(f"{file.name}.skipped.csv")


def check_skipped(
    counts: Counts, shards: Sequence[Shard], max_bad: float, screen: Screen, listed: Path | None = None
) -> None:
    """As in training: a few unreadable files are a warning, many are an error. Damaged tars are also compared with the
    number of tars, because nobody knows how many images are missing."""
    if counts.tars > max_bad * len(shards):
        where = f" (listed in '{listed}')" if listed else ""
        raise CdtransError(
            f"{counts.tars} of {len(shards)} tars cannot be read to the end{where}: repair or remove them, or raise "
            f"--max-bad above {max_bad:g}."
        )
    everything = f"; all are listed in '{listed}'" if listed else ""
    if counts.skipped:
        path, cause = counts.first_skipped
        total = counts.images + counts.skipped
        screen.warn(judge_unreadable("", counts.skipped, total, path, f"{cause}{everything}", max_bad))


def _warn(file: Unreadable, screen: Screen) -> None:
    screen.warn(f"skipped '{file.path}': {file.cause}")


def write_lines(out: IO[bytes], columns: list[str], predictions: Iterable[Prediction]) -> None:
    """Write a CSV line by line, as the predictions arrive."""
    table = CsvTable(columns)
    lines = chain([table.header()], (table.rows([p]) for p in predictions))
    out.writelines(map(_for_eyes, lines) if out.isatty() else lines)
    out.flush()


def _for_eyes(line: bytes) -> bytes:
    """Escape control characters in names for a terminal; a file or pipe gets the names unchanged."""
    return printable(line.decode("utf-8", "surrogateescape"), keep="\r\n").encode()
