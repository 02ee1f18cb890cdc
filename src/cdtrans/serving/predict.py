"""Labels for any number of images. A table of predictions is written in one step, when it is complete."""

import io
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from cdtrans.config import DeviceName, LargestBad, Root, WhichModel
from cdtrans.errors import ArgumentTypeError, DataError, SettingsError, counted, ended, printable
from cdtrans.inputs.images import is_image_name, judge_unreadable
from cdtrans.inputs.scan import find_tars, no_image, stream_images, stream_names, walk
from cdtrans.inputs.stream import TarMember, cut, is_tar_name
from cdtrans.record import wording
from cdtrans.record.files import atomic, csv_lines
from cdtrans.record.outcome import NO_CLASS
from cdtrans.record.probabilities import no_class_cut, threshold_for_accuracy, threshold_for_share
from cdtrans.record.record import RunRecord
from cdtrans.record.run import require_output
from cdtrans.runtime.ranks import launched_world
from cdtrans.runtime.screen import Pace, Screen, TrackedTask
from cdtrans.schema import Help, Misfit, Range, check_value, checked
from cdtrans.serving.classifier import Classifier, Prediction, Predictions, Unreadable, find_model, load
from cdtrans.serving.parts import Counts, PartFolder, PartInput, PartOutput, folder_of, parts_of
from cdtrans.trust.preflight import ignored

NAMED_SKIPS = 10  # unreadable files that are named on the screen; all are in a list
COUNTED_AT_ONCE = 1000  # names between two updates of the progress bar


@dataclass(frozen=True)
class Predicted:
    """The result of `predict`."""

    csv: Path | None  # the CSV file with the predictions, if one was written
    parquet: Path | None  # the Parquet file with the predictions, if one was written
    images: int
    kept: int  # labels
    abstained: int  # images whose label is left empty: their probability is below the threshold
    no_class: int  # images labelled 'none of these classes' (`unknown`)
    skipped: int  # files that cannot be read
    threshold: float
    expected_accuracy: float | None  # share of the kept labels that are right; None without any
    predictions: Predictions  # in order; empty if they were written to a file

    def summary(self) -> dict[str, Any]:
        """The promised keys of `predict --json`."""
        values = {name: value for name, value in vars(self).items() if name != "predictions"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def _repr_html_(self) -> str:
        if self.expected_accuracy is None:
            return self.predictions.html(f"{counted(self.images, 'image')}, no label kept")
        share = f"{self.kept} of {self.images} labels kept, expected to be right: {self.expected_accuracy:.1%}"
        file = self.csv or self.parquet
        return self.predictions.html(share, f"The predictions are in {file}." if file else "")


@checked("images")
def predict(
    run: Annotated[str | Path, Help("A finished run folder, or an exported file.", "RUN")],
    images: Annotated[str | Path, Help("A folder of any depth, an image, a list of paths, or tars.", "IMAGES")],
    *,
    csv: Annotated[str | Path | IO[bytes] | None, Help("Write predictions here (default: standard output).")] = None,
    parquet: Annotated[str | Path | None, Help("Write the predictions to a Parquet file instead.")] = None,
    top: Annotated[int, Help("How many of the most probable classes to list."), Range(minimum=1)] = 1,
    abstain: Annotated[float | None, Help("Leave the label empty below this probability."), Range(0, 1)] = None,
    keep: Annotated[float | None, Help("Label only this share of the images, the most confident, such as 0.8.")] = None,
    accuracy: Annotated[float | None, Help("Label as many as this expected accuracy allows, such as 0.95.")] = None,
    unknown: Annotated[
        float | str | None,
        Help(
            "Label images 'none of these classes' whose no_class is above this (0 to 1); auto: as answered.", "CUT|auto"
        ),
    ] = None,
    all_classes: Annotated[bool, Help("Predict classes too that the run took for absent from its target.")] = False,
    root: Root = None,
    model: WhichModel = "chosen",
    device: DeviceName = "auto",
    max_bad: LargestBad = 0.05,
    quiet: bool = False,
    screen: Screen | None = None,
) -> Predicted:
    """Label images with the classifier of a finished run, or with a file that `export` wrote. For images in memory, use
    `load(run).predict(images)`.

    With `csv` (a path or an open binary file) or `parquet` (a path), the predictions are written there, in bounded
    memory for any number of images, and the result has only their counts. If a call is killed, make it again to
    resume.

    At most one of `abstain`, `keep` and `accuracy` can be given; it decides which labels are left empty. `unknown` is a
    number from 0 to 1 or "auto": images whose `no_class` is above it are labelled 'none of these classes', with that
    score as their probability. `all_classes` is as for `load`."""
    if launched_world() > 1:
        raise SettingsError("predict-under-torchrun", "'cdtrans predict' is one process; start it without torchrun.")
    if not isinstance(images, str | Path):
        advice = "for images in memory, use load(run).predict(images)"
        raise ArgumentTypeError("images-not-a-path", f"The images to predict must be a path; {advice}.")
    if csv is not None and parquet is not None:
        raise SettingsError("two-tables", "--csv and --parquet cannot be combined; give one of them.")
    images, screen = Path(images), screen or Screen(quiet=quiet)
    run_options = {"keep": keep is not None, "accuracy": accuracy is not None, "unknown": unknown is not None}
    found = find_model(run, run_options | {"all-classes": all_classes, "model": model != "chosen"})
    record, exported = (found, None) if isinstance(found, RunRecord) else (None, found)
    if record:
        record.model_name(model)
    root = None if root is None else Path(root)
    file = Path(parquet) if parquet is not None else Path(csv) if isinstance(csv, str | Path) else csv
    threshold = find_threshold(record, model, abstain, keep, accuracy, screen)
    cut = None if record is None or unknown is None else find_cut(record, unknown)
    kind = "parquet" if parquet is not None else "csv"
    check_places(images, root, file, kind, exported)  # before torch is imported
    classifier = load(exported or run, model=model, device=device, unknown=cut is not None, all_classes=all_classes)
    if record and (warning := wording.trained_with_labels(record.outcome, record.model_name(model))):
        screen.warn(warning)
    if record and {abstain, keep, accuracy} != {None} and record.calibrated_with(model) == "nothing":
        advice = "'cdtrans ask' chooses images to label, and 'cdtrans answer' measures with them."
        screen.warn(f"{wording.CALIBRATED['nothing']} {advice}")
    screen.say(f"model: {classifier.name}")
    return PredictionJob(classifier, images, root, kind, top, threshold, max_bad, screen, cut).run(file)


def find_threshold(
    run: RunRecord | None, model: str, abstain: float | None, keep: float | None, accuracy: float | None, screen: Screen
) -> float:
    """The probability below which labels are left empty: as given, or by the run's own target images."""
    if sum(value is not None for value in (abstain, keep, accuracy)) > 1:
        raise SettingsError("two-thresholds", "--abstain, --keep and --accuracy cannot be combined; give one of them.")
    if run is not None and keep is not None:
        kept = threshold_for_share(run.confidences(model), keep)
    elif run is not None and accuracy is not None:
        kept = threshold_for_accuracy(run.confidences(model), accuracy)
    else:
        return abstain or 0.0
    screen.say(
        f"threshold: {kept.threshold:.3f}; {kept.share:.0%} of the run's own target images reach it, and "
        f"{kept.accuracy:.0%} of their labels are expected to be right"
    )
    return kept.threshold


def find_cut(run: RunRecord, unknown: float | str) -> float:
    """The score above which an image is taken for one of no class: as given, or as the run's answers say."""
    try:
        cut = check_value(unknown, float | Literal["auto"], "--unknown", written=True, limits=Range(0, 1))
    except Misfit as error:
        raise SettingsError("unknown-cut", ended(str(error))) from error
    if cut != "auto":
        return float(cut)
    if run.no_class_curve is None:
        raise SettingsError(
            "no-answered-cut",
            f"--unknown auto needs answers about images of no class, and the run in '{run.folder}' has none: 'cdtrans "
            "ask' asks for them, or give a number from 0 to 1.",
        )
    return no_class_cut(run.no_class_curve)


def check_places(
    images: Path, root: Path | None, file: Path | IO[bytes] | None, kind: str, model: Path | None = None
) -> None:
    """Check that there is at least one image, and that the table can be written without replacing an input."""
    if isinstance(file, Path):
        flag, inputs = f"--{kind}", [model, images if images.is_file() else None]
        require_output(file, "predictions", flag, *inputs)
        require_output(skipped_list(file), "list of unreadable files", flag, *inputs)
        if is_image_name(file.name) or is_tar_name(file.name):
            raise SettingsError("table-name", f"'{file}' has the name of an image or tar; choose another {flag}.")
        if folder_of(file).exists() and not folder_of(file).is_dir():
            raise SettingsError("no-folder-for-parts", f"'{folder_of(file)}' is no folder; choose another {flag}.")
        if kind == "parquet" and find_spec("pyarrow") is None:
            raise SettingsError("package-missing", f"'{file}' needs pyarrow: 'pip install cdtrans[parquet]'.")
    damaged: TarMember | None = None
    for image in stream_images(images, root):
        if not (isinstance(image, TarMember) and image.path == image.tar):
            return
        damaged = damaged or image
    if damaged:
        raise DataError("tar-damaged", f"'{damaged.tar}' cannot be read: {damaged.problem}.")
    raise no_image(images)


@dataclass
class PredictionJob:
    """Labels images: for a CSV or Parquet file, for a stream, or as a list."""

    classifier: Classifier
    images: Path
    root: Path | None
    kind: str  # format of the table, a key of TABLES
    top: int
    threshold: float
    max_bad: float
    screen: Screen
    cut: float | None = None  # score above which an image is labelled NO_CLASS; None without scores
    named: int = 0  # unreadable files so far; the first are named on the screen

    def run(self, file: Path | IO[bytes] | None) -> Predicted:
        self.columns = table_columns(self.classifier, self.top)
        self.tars = len(find_tars(self.images, self.root))
        total, counts, predictions = self.count_images(), Counts(), Predictions()
        images = stream_images(self.images, self.root)
        if isinstance(file, Path):
            counts = self.write(file, images, total)
        else:
            with self.screen.track("predicting", total, pace=Pace(batch=self.classifier.batch)) as task:
                results = self.classifier.stream_batches(cut(images, self.classifier.batch), top=self.top)
                kept = self.keep_labels(results, counts, task)
                if file is None:
                    predictions.extend(kept)
                else:
                    write_lines(file, self.columns, kept)
            self.judge(counts)
        left_out = counts.images - counts.kept - counts.no_class
        expected = counts.right / counts.kept if counts.kept else None
        if isinstance(file, Path):
            unsure = f", {left_out} of them left without a label (probability below {self.threshold:.3g})"
            self.screen.result(f"Wrote {file}: {counted(counts.images, 'image')}{unsure if self.threshold else ''}.")
        if self.threshold and counts.images:
            share, of_these = counts.kept / counts.images, f"; expected to be right: {expected:.1%}" if expected else ""
            self.screen.say(f"Kept {counts.kept} of {counts.images} labels ({share:.0%}){of_these}.")
        if counts.no_class:
            self.screen.say(f"Labelled '{NO_CLASS}': {counts.no_class} of {counted(counts.images, 'image')}.")
        csv, parquet = (file if isinstance(file, Path) and self.kind == kind else None for kind in TABLES)
        numbers = (counts.images, counts.kept, left_out, counts.no_class, counts.skipped, self.threshold, expected)
        return Predicted(csv, parquet, *numbers, predictions)

    def count_images(self) -> int | None:
        """The number of images, for the progress bar; None for tars, which would have to be read to count them. Also
        warns about ignored files that may be images."""
        others: list[str] = []
        total = None
        if not self.tars:
            total = 0
            with self.screen.track("counting images", None) as task:
                for names in cut(stream_names(self.images, self.root, others), COUNTED_AT_ONCE):
                    total += len(names)
                    task.advance(len(names))
        elif self.images.is_dir():
            others = [path for path, _ in walk(self.images) if not is_tar_name(path)]
        if others:
            finding = ignored("", others)
            self.screen.warn(f"{finding.statement}. {finding.advice}")
        return total

    def write(self, file: Path, images: Iterable[Path | TarMember], total: int | None) -> Counts:
        """Images that fit into one part are predicted and written directly, without a folder of parts."""
        parts = parts_of(images)
        first = list(islice(parts, 2))
        if len(first) < 2 and not folder_of(file).exists():
            with self.screen.track("predicting", total, pace=Pace(batch=self.classifier.batch)) as task:
                outputs = [output for _, output in self.predict_parts(first, task)]
            return self.join(file, outputs)
        settings: dict[str, Any] = {"top": self.top, "threshold": self.threshold}
        settings |= {"unknown": self.cut, "model": self.classifier.digest()}
        folder = PartFolder(file, settings)
        with folder.locked() as done:
            if done:
                again = "parts whose images have changed are predicted again"
                self.screen.say(f"Resuming from '{folder.folder}'; {again}.")
            with self.screen.track("predicting", total, done, pace=Pace(batch=self.classifier.batch)) as task:
                for part, output in self.predict_parts(folder.missing(chain(first, parts)), task):
                    folder.store(part, output)
            counts = self.join(file, folder)
            folder.remove()
        return counts

    def predict_parts(self, parts: Iterable[PartInput], task: TrackedTask) -> Iterator[tuple[PartInput, PartOutput]]:
        """All parts form one stream, so that a GPU does not wait between them. No batch holds images of two parts, so
        that a part does not depend on what was predicted before it."""
        started: deque[PartInput] = deque()

        def batches() -> Iterator[list[Path | TarMember]]:
            for part in parts:
                started.append(part)
                yield from cut(part.images, self.classifier.batch)

        results = self.classifier.stream_batches(batches(), top=self.top)
        for first in results:
            part, counts = started.popleft(), Counts()
            skipped: list[tuple[Path | None, str]] = []
            own = chain([first], islice(results, len(part.images) - 1))
            rows = table_rows(self.keep_labels(own, counts, task, skipped))
            yield part, PartOutput(counts, csv_lines(skipped), rows)

    def keep_labels(
        self,
        results: Iterable[Prediction | Unreadable],
        counts: Counts,
        task: TrackedTask,
        skipped: list[tuple[Path | None, str]] | None = None,
    ) -> Iterator[Prediction]:
        """The predictions one by one. Labels of images of no class are replaced, those below the threshold are emptied,
        and `counts` is updated. Unreadable files are listed in `skipped`; the first are named on the screen, or all
        without a list."""
        for result in results:
            task.advance(1)
            if isinstance(result, Prediction):
                if self.cut is not None and result.no_class is not None and result.no_class > self.cut:
                    result = replace(result, label=NO_CLASS, probability=result.no_class)
                elif result.probability < self.threshold:
                    result = replace(result, label="")
                counts.add(result)
                yield result
                continue
            counts.skip(result)
            if skipped is not None:
                skipped.append((result.path, result.cause))
            if skipped is None or self.named < NAMED_SKIPS:
                self.screen.warn(f"skipped '{result.path}': {result.cause}")
            self.named += 1

    def join(self, file: Path, outputs: Iterable[PartOutput]) -> Counts:
        """Write the list of unreadable files, if there are any, and the table, unless too many are unreadable."""
        listed = skipped_list(file)
        counts = sum((output.counts for output in outputs), Counts())
        if counts.skipped:
            with atomic(listed) as out:
                out.write(csv_lines([("path", "cause")]))
                out.writelines(output.skipped for output in outputs)
        else:
            listed.unlink(missing_ok=True)
        self.judge(counts, listed)
        with self.screen.track("joining parts", None), atomic(file) as out:
            TABLES[self.kind](out, self.columns, (output.rows for output in outputs))
        return counts

    def judge(self, counts: Counts, listed: Path | None = None) -> None:
        """As in training: a few unreadable files are a warning, many are an error. Damaged tars are also compared with
        the number of tars, because nobody knows how many images are missing."""
        if counts.tars > self.max_bad * self.tars:
            problem = f"{counts.tars} of {self.tars} tars cannot be read to the end"
            advice = f"repair or remove them, or raise --max-bad above {self.max_bad:g}"
            raise DataError("too-many-damaged-tars", f"{problem}: {advice}.")
        if counts.skipped:
            (path, cause), total = counts.first_skipped, counts.images + counts.skipped
            cause += f"; all are listed in '{listed}'" if listed else ""
            self.screen.warn(judge_unreadable("", counts.skipped, total, path, cause, self.max_bad))


def skipped_list(file: Path) -> Path:
    return file.with_name(f"{file.name}.skipped.csv")


def table_columns(classifier: Classifier, top: int) -> list[str]:
    ranks = range(1, min(top, len(classifier.classes)) + 1) if top > 1 else ()
    best = [f"{what}_{k}" for k in ranks for what in ("label", "probability")]
    return ["path", "label", "probability", *["no_class"] * (classifier.no_class is not None), *best]


def table_rows(predictions: Iterable[Prediction]) -> bytes:
    """CSV lines. Probabilities have six decimals, and a label that was left out is empty."""
    rows = []
    for p in predictions:
        unknown = [] if p.no_class is None else [p.no_class]
        best = chain(*p.top) if len(p.top) > 1 else ()
        values = [str(p.path), p.label, p.probability, *unknown, *best]
        rows.append([x if isinstance(x, str) else f"{x:.6f}" for x in values])
    return csv_lines(rows)


def write_csv(file: IO[bytes], columns: list[str], parts: Iterable[bytes]) -> None:
    file.write(csv_lines([columns]))
    file.writelines(parts)


def write_parquet(file: IO[bytes], columns: list[str], parts: Iterable[bytes]) -> None:
    """A row group for every part. Probabilities are float32, and a label that was left out is null. Parquet holds only
    text: other bytes of a name are shown as \\xff."""
    import pyarrow
    from pyarrow import csv, parquet

    texts = [name == "path" or name.startswith("label") for name in columns]
    types = [pyarrow.string() if is_text else pyarrow.float32() for is_text in texts]
    schema = pyarrow.schema(list(zip(columns, types, strict=True)))
    how = {
        "read_options": csv.ReadOptions(column_names=columns),
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "convert_options": csv.ConvertOptions(column_types=schema, null_values=[""], strings_can_be_null=True),
    }
    with parquet.ParquetWriter(file, schema) as table:
        for part in filter(None, parts):
            text = part.decode("utf-8", "backslashreplace").encode()
            table.write_table(csv.read_csv(io.BytesIO(text), **how))


TABLES = {"csv": write_csv, "parquet": write_parquet}


def write_lines(out: IO[bytes], columns: list[str], predictions: Iterable[Prediction]) -> None:
    """Write a CSV line by line, as the predictions arrive."""
    lines = chain([csv_lines([columns])], (table_rows([p]) for p in predictions))
    out.writelines(map(_for_eyes, lines) if out.isatty() else lines)
    out.flush()


def _for_eyes(line: bytes) -> bytes:
    """Escape control characters in names for a terminal; a file or pipe gets the names unchanged."""
    return printable(line.decode("utf-8", "surrogateescape"), keep="\r\n").encode()
