"""Answers given by people, and their files: our CSV, the one that ask.html saves, Label Studio's CSV and JSON.

    path   label                      part
           a class                    occurs, or absent: whether the class occurs in the target (page 1 of ask.html)
    x.png  none or one of these ...   belongs: whether the image shows one of the classes (page 2)
    x.png  a class, none of these ... random, informative or other: what the image shows (page 3)
    x.png  a new name                 group: similar images of no class, named on the report

Any image may also be `unsure`; a class that one is unsure of has no row."""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.errors import DataError, MissingFileError, counted, nearest
from cdtrans.record.outcome import NO_CLASS, Part, StoredLabel

LARGEST_FILE = 10**8  # bytes
BLANK = " \t\r\n"  # other white space may belong to the name of a class
UNSURE = "unsure"
ONE_CLASS = "one of these classes"
CLASS_OCCURS, CLASS_ABSENT, BELONGS, GROUP = "occurs", "absent", "belongs", "group"  # parts of rows that are not labels
LABEL_COLUMNS = ("path", "label", "part")
HOW_TO = "'cdtrans ask RUN' writes one to fill in"
LEAST_CLASSES = 2

LabelsByImage = dict[int, StoredLabel]  # by index in the target


def require_clear(names: Iterable[str]) -> None:
    """Refuse a class that has the name of another answer: its images would be left out, or count as wrong."""
    if unclear := sorted({UNSURE, NO_CLASS, ONE_CLASS} & set(names)):
        raise DataError(
            "class-unclear",
            f"The run has a class '{unclear[0]}', which files of labels use for another answer; rename the class and "
            "run 'cdtrans adapt' again with another --out, or measure with class folders and 'cdtrans eval'.",
        )


def settled_part(*parts: str) -> Part:
    """The part of an image that questions and label files assign to these parts. Random in any of them is random: every
    draw of `ask`, for this run or an earlier one, gives every image the same chance, so several draws together are a
    random sample too (docs/results/labels.md). Leaving out images that a later question chose as informative would bias
    the sample, because they are harder than the others."""
    if "random" in parts:
        return "random"
    return "informative" if "informative" in parts else "other"


class LabelRow(NamedTuple):
    """One line of a file; the label is empty if none was given."""

    place: str  # 'line 3' or 'task 3', for messages
    path: str
    label: str
    part: str = ""
    digest: str = ""

    @property
    def about_class(self) -> bool:
        return self.part in (CLASS_OCCURS, CLASS_ABSENT)

    @property
    def answered(self) -> bool:
        """A row of page 1 that nobody has filled in is a class and nothing else."""
        return bool(self.label and (self.path or self.part or self.digest))


class AnswerRows(NamedTuple):
    """The rows of a file that hold an answer."""

    occurs: dict[str, bool]  # classes of page 1
    images: list[LabelRow]  # the other rows
    left: int  # rows of the file without an answer


def read_answers(file: Path, classes: tuple[str, ...]) -> AnswerRows:
    """The answers in a file, all about known classes."""
    rows = read_rows(file)
    filled = [row for row in rows if row.answered]
    if not filled:
        raise DataError(
            "no-label", f"'{file}' holds {counted(len(rows), 'row')} and no label yet: fill in the column 'label'."
        )
    known = {CLASS_OCCURS: [*classes], CLASS_ABSENT: [*classes], BELONGS: [ONE_CLASS, NO_CLASS, UNSURE]}
    labels = [*classes, UNSURE, NO_CLASS]
    unknown = [row for row in filled if row.part != GROUP and row.label not in known.get(row.part, labels)]
    if unknown:
        row, more = unknown[0], f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        names = nearest(row.label, known.get(row.part, labels))
        raise DataError(
            "class-unknown", f"The class {row.label!r} in {row.place} of '{file}'{more} is unknown: {names}"
        )
    require_clear({row.label for row in filled} & set(classes))
    said = {part: {row.label for row in filled if row.part == part} for part in (CLASS_OCCURS, CLASS_ABSENT)}
    if both := sorted(said[CLASS_OCCURS] & said[CLASS_ABSENT]):
        raise contradiction(f"'{file}'", f"the class '{both[0]}' occurs, and it does not")
    occurs = {name: name in said[CLASS_OCCURS] for name in classes if name in said[CLASS_OCCURS] | said[CLASS_ABSENT]}
    images = [row for row in filled if not row.about_class]
    require_agreement(occurs, [row.label for row in images if row.part != GROUP], classes, f"'{file}'")
    return AnswerRows(occurs, images, len(rows) - len(filled))


def require_agreement(occurs: dict[str, bool], labels: Iterable[str], classes: tuple[str, ...], where: str) -> None:
    """Refuse labels of classes that do not occur, and a target in which hardly a class does."""
    absent = {name for name, there in occurs.items() if not there}
    if wrong := sorted(absent & set(labels)):
        raise contradiction(where, f"the class '{wrong[0]}' does not occur, and an image has its label")
    if len(classes) - len(absent) < LEAST_CLASSES:
        few = f"{len(absent)} of {len(classes)} classes do not occur; a classifier needs at least two that do"
        raise DataError("too-few-classes", f"{where}: {few}.")


def contradiction(where: str, problem: str) -> DataError:
    return DataError("answers-contradict", f"By {where} {problem}; correct one of the two.")


def read_rows(file: Path) -> list[LabelRow]:
    """Every row of the file, including those without a label."""
    if not file.exists():
        raise MissingFileError("no-labels-file", f"The labels file '{file}' does not exist; {HOW_TO}.")
    if file.is_dir():
        raise DataError(
            "labels-format", f"'{file}' is a folder, not a file of labels; for class folders use 'cdtrans eval'."
        )
    with file.open("rb") as lines:
        content = lines.read(LARGEST_FILE + 1)  # a device never ends
    if len(content) > LARGEST_FILE:
        raise DataError("labels-format", f"'{file}' is larger than any file of labels; {HOW_TO}.")
    if b"\0" in content:
        raise DataError("labels-format", f"'{file}' is neither a CSV nor a JSON file; {HOW_TO}.")
    text = content.decode("utf-8-sig", "surrogateescape")
    if not text.strip():
        raise DataError("labels-empty", f"The labels file '{file}' is empty; {HOW_TO}.")
    return _json_rows(file, text) if text.lstrip()[0] in "[{" else _csv_rows(file, text)


def _csv_rows(file: Path, text: str) -> list[LabelRow]:
    header = text.lstrip().splitlines()[0]
    delimiter = next((d for d in ",;\t" if d in header), ",")  # spreadsheets may save with ';' or a tab
    try:
        reader = csv.DictReader(io.StringIO(text.lstrip(), newline=""), delimiter=delimiter)
        names = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
        if not {"path", "label"} <= names.keys():
            raise DataError(
                "labels-columns",
                f"'{file}' needs a first line with the columns 'path' and 'label', but has"
                f" {', '.join(map(repr, filter(None, names)))[:200]}; {HOW_TO}.",
            )
        if "probability" in names:
            raise DataError(
                "labels-predicted",
                f"'{file}' has a column 'probability', so it holds predictions and no labels; {HOW_TO}.",
            )
        columns = [names.get(name, name) for name in (*LABEL_COLUMNS, "digest")]
        return [
            LabelRow(f"line {reader.line_num}", *((line.get(column) or "").strip(BLANK) for column in columns))
            for line in reader
        ]
    except csv.Error as error:
        raise DataError("labels-format", f"'{file}' cannot be read as a CSV ({error}); {HOW_TO}.") from error


def _json_rows(file: Path, text: str) -> list[LabelRow]:
    """Label Studio's exports 'JSON' and 'JSON-MIN', of the tasks that `ask` writes."""
    try:
        tasks = json.loads(text)
        return [row for n, task in enumerate(tasks, 1) for row in _task_rows(f"task {n}", task)]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            "labels-format",
            f"'{file}' is not a Label Studio export (JSON or JSON-MIN) of the tasks that 'cdtrans ask' wrote.",
        ) from error


def _task_rows(place: str, task: dict[str, Any]) -> list[LabelRow]:
    """One row for each annotation, or one without a label."""
    data = task.get("data", task)  # JSON-MIN has neither 'data' nor 'annotations'
    given = [
        _choice(result["value"])
        for annotation in task.get("annotations", ())
        if not annotation.get("was_cancelled")
        for result in annotation["result"]
        if result.get("type") == "choices"
    ]
    labels = given or [_choice(task.get("label"))]
    return [LabelRow(place, data["path"], label, data.get("part", ""), data.get("digest", "")) for label in labels]


def _choice(value: Any) -> str:
    if isinstance(value, dict):
        value = value["choices"][0]
    return str(value or "").strip(BLANK)
