"""A run folder as typed values: read when they are asked for, never written. Needs no torch.

A file that is damaged, or missing although every run has it, is a RunError 'run-damaged' that names the file and what
to do. Files that a run may lack are None or empty."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cdtrans.config import Resolved, read_yaml
from cdtrans.errors import CdtransError, RunError
from cdtrans.record import layout
from cdtrans.record.files import intact
from cdtrans.record.layout import Content, File, Line
from cdtrans.record.model import Card, read_card
from cdtrans.record.outcome import Answers, Measured, NoClassCurve, Outcome, Questions, StoredLabel
from cdtrans.record.probabilities import Kept, accuracy_by_share, calibrated, probabilities
from cdtrans.schema import Misfit, build


class RunRecord:
    """Everything that a run has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # State of the run

    @property
    def begun(self) -> bool:
        return self.has(layout.CONFIG)

    @property
    def finished(self) -> bool:
        return self.has(layout.RESULT)

    def has(self, file: File[Any]) -> bool:
        return (self.folder / file.name).exists()

    # What every run has

    @cached_property
    def outcome(self) -> Outcome:
        self._require_finished()
        outcome = self._json(layout.RESULT)
        with self._intact(layout.RESULT):
            missing = {"source", outcome.choice.model} - outcome.estimates.keys()
            require(not missing, f"it has no estimate for the model '{next(iter(missing), '')}'")
        return outcome

    @cached_property
    def config(self) -> Resolved:
        with self._intact(layout.CONFIG):
            return build(Resolved, self.settings)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings as they are in the file."""
        with self._intact(layout.CONFIG) as file:
            try:
                return {"method_args": {}} | read_yaml(file)
            except CdtransError as error:  # its sentence would ask to correct the file
                raise Misfit("kind", "", str(error).rstrip(".")) from error

    @cached_property
    def data(self) -> layout.DataRecord:
        data = self._json(layout.DATA)
        if data.layout != layout.VERSION:
            raise RunError("run-version", f"'{self.folder}' was written by another version of cdtrans; {layout.AGAIN}.")
        return data

    @cached_property
    def environment(self) -> layout.Environment:
        return self._json(layout.ENVIRONMENT)

    @cached_property
    def images(self) -> layout.ImageTable:
        paths: dict[str, list[str]] = {"source": [], "holdout": [], "target": []}
        digests: dict[str, list[str]] = {domain: [] for domain in paths}
        for row in self._table(layout.IMAGES, ("domain", "index", "path", "digest")):
            with self._intact(layout.IMAGES):
                require(int(row["index"]) == len(paths[row["domain"]]), "its indices are not in order")
            paths[row["domain"]].append(row["path"])
            digests[row["domain"]].append(row["digest"])
        return layout.ImageTable(*({domain: tuple(of[domain]) for domain in of} for of in (paths, digests)))

    @cached_property
    def logits(self) -> layout.Logits:
        """Before the temperature."""
        logits = self._arrays(layout.LOGITS)
        shape = len(self.images.paths["target"]), len(self.classes)
        with self._intact(layout.LOGITS):
            for values in (logits.source, logits.source if logits.adapted is None else logits.adapted):
                require(values.shape == shape, f"its logits are {values.shape}, not {shape}: images and classes")
                require(np.isfinite(values).all(), "its numbers are not logits")
        return logits

    @cached_property
    def views(self) -> layout.Views:
        v = self._arrays(layout.VIEWS)
        source, target = (len(self.images.paths[domain]) for domain in ("source", "target"))
        lengths = (
            (len(v.sampled_source), (v.before_source, v.after_source)),
            (len(v.sampled_target), (v.before_target, v.after_target)),
            (source, (v.source_labels, v.source_predicted, v.source_confidence, v.source_own)),
            (target, (v.target_before, v.target_after, v.confidence_before, v.confidence_after, v.changed, v.no_class)),
        )
        with self._intact(layout.VIEWS):
            require(all(len(x) == n for n, arrays in lengths for x in arrays), "its arrays are of other images")
            require_within((v.source_labels, v.source_predicted, v.target_before, v.target_after), len(self.classes))
            require_within([v.sampled_source], source)
            require_within([v.sampled_target], target)
        return v

    @cached_property
    def log(self) -> tuple[Line, ...]:
        return self._lines(layout.LOG)

    def events(self, name: str) -> list[Line]:
        """The log's lines of one kind."""
        return [line for line in self.log if line.get("event") == name]

    @cached_property
    def timings(self) -> tuple[Line, ...]:
        return self._lines(layout.TIMINGS)

    # What a run may lack

    @property
    def evidence(self) -> layout.SavedEvidence | None:
        return self._arrays(layout.EVIDENCE) if self.has(layout.EVIDENCE) else None

    @cached_property
    def rounds(self) -> dict[int, layout.PairsRecord]:
        """Every search for pairs."""
        images, rounds = self.images.paths, {}
        for number in self._numbers(layout.ROUND):
            rounds[number] = r = self._arrays(file := layout.ROUND.numbered(number))
            with self._intact(file):
                require(len({x.shape for x in vars(r).values()}) == 1, "its arrays are of other pairs")
                require_within([r.source], len(images["source"]), -1)
                require_within([r.target], len(images["target"]))
                require_within([r.source_labels, r.target_labels], len(self.classes))
                require_within([r.kept], 2)
        return rounds

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        """The epochs with predictions; none if the user has deleted them."""
        return self._numbers(layout.PREDICTED)

    def predictions(self, epoch: int) -> layout.EpochPredictions:
        """The target after an epoch; 0 is the source-only model."""
        predictions = self._arrays(file := layout.PREDICTED.numbered(epoch))
        with self._intact(file):
            require(len(predictions.predicted) == len(self.images.paths["target"]), "it is about other images")
            require_within([predictions.predicted], len(self.classes))
        return predictions

    @cached_property
    def trained_labels(self) -> tuple[StoredLabel, ...]:
        """The target images that the run was trained with the labels of: they cannot measure its models."""
        if not self.has(layout.GIVEN):
            return ()
        rows = self._table(layout.GIVEN, ("path", "digest", "label", "part"))
        return tuple(StoredLabel(row["path"], row["digest"], row["label"]) for row in rows if not row["part"])

    @cached_property
    def evaluation(self) -> Measured | None:
        """The result of `eval`."""
        if not self.has(layout.MEASURED):
            return None
        measured = self._json(layout.MEASURED)
        with self._intact(layout.MEASURED):
            require(measured.model in measured.models, f"it has no scores of the model '{measured.model}'")
            for scores in (*measured.models.values(), *measured.epochs):
                require(len(scores.right) == len(scores.images) == len(measured.classes), "it has other classes")
        return measured

    @cached_property
    def questions(self) -> Questions | None:
        return self._json(layout.QUESTIONS) if self.has(layout.QUESTIONS) else None

    @cached_property
    def answers(self) -> Answers | None:
        return self._json(layout.ANSWERS) if self.has(layout.ANSWERS) else None

    @property
    def no_class_curve(self) -> NoClassCurve | None:
        """By the answers that `answer` has read, or else by those that the run was given."""
        return (self.answers and self.answers.curve) or self.outcome.class_set.curve

    @property
    def measured(self) -> Measured | None:
        """The evidence of target labels: from `eval`, or else from `answer`."""
        return self.evaluation or (self.answers.measured if self.answers else None)

    # Models

    def model_name(self, model: str = "chosen") -> str:
        """The folder of the 'chosen', 'adapted', 'last' or 'source' model of a finished run."""
        chosen = self.outcome.choice.model
        if model in ("adapted", "last") and not self.has_model(model):
            raise RunError(
                "model-missing",
                f"The run in '{self.folder}' has no {model} model: it ended before that; use --model source.",
            )
        return chosen if model == "chosen" else model

    def has_model(self, name: str) -> bool:
        return self.model_folder(name).is_dir()

    def model_folder(self, name: str) -> Path:
        return self.folder / name

    def card(self, name: str) -> Card:
        return read_card(self.model_folder(name))

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return self.card(layout.SOURCE).classes

    def calibrated_logits(self, model: str = "chosen") -> np.ndarray:
        """[Nt, K] logits of the target by a model of a finished run, divided by its temperature."""
        name = self.model_name(model)
        logits = getattr(self.logits, name, None)
        if logits is None:
            raise RunError("no-logits", f"'{self.folder}' keeps no logits of its {name} model; use another --model.")
        return calibrated(logits, self.card(name).temperature)

    def confidences(self, model: str = "chosen") -> np.ndarray:
        """[Nt] calibrated probability of the predicted class of each target image."""
        return np.asarray(probabilities(self.calibrated_logits(model)).max(axis=1))

    def accuracy_by_share(self) -> tuple[Kept, ...]:
        """Expected accuracies of the chosen model's most confident labels, among images that are not labelled as ones
        of no class."""
        confidences, curve = self.confidences(), self.outcome.class_set.curve
        return accuracy_by_share(confidences if curve is None else confidences[self.views.no_class <= curve.cut])

    def calibrated_with(self, model: str = "chosen") -> Literal["labels", "estimate", "nothing"]:
        """The origin of a model's temperature: labels that `answer` has read, or the estimate. The source-only model
        keeps its own, which does not depend on a target."""
        name = self.model_name(model)
        if name == layout.ADAPTED and self.answers is not None and self.answers.calibrated:
            return "labels"
        return "nothing" if name == layout.SOURCE or self.outcome.estimates[layout.ADAPTED] is None else "estimate"

    # The images

    def root(self, domain: Literal["source", "target"]) -> Path:
        """The folder that the paths of a domain are relative to."""
        place, root = Path(getattr(self.config, domain)), self.config.root
        return Path(root or place.parent) if os.path.isfile(place) else place  # a list is a file

    # Reading

    def _require_finished(self) -> None:
        if self.finished:
            return
        place, code = self.folder, "no-run"
        problem, remedy = "holds no finished run", "give the folder that 'cdtrans adapt' has written"
        if self.begun:
            code, remedy = "run-unfinished", "run its 'cdtrans adapt' command again to finish it"
        elif place.is_file():
            problem = "is a file"
        elif not place.is_dir():
            problem, remedy = "does not exist", f"make one with 'cdtrans adapt SOURCE TARGET --out {place}'"
        raise RunError(code, f"The run folder '{place}' {problem}; {remedy}.")

    @contextmanager
    def _intact(self, file: File[Any]) -> Iterator[Path]:
        """For reading a file and checking its content."""
        path = self.folder / file.name
        if not path.exists():
            raise RunError("run-damaged", f"'{path}' is missing; {file.advice}.")
        with intact(path, file.advice):
            yield path

    def _json(self, file: File[Content]) -> Content:
        with self._intact(file) as path:
            return build(file.holds, json.loads(path.read_text(encoding="utf-8")))

    def _lines(self, file: File[Line]) -> tuple[Line, ...]:
        with self._intact(file) as path:
            lines = tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
            require(all(isinstance(line, dict) for line in lines), "a line of it is no object")
        return lines

    def _table(self, file: File[Any], columns: tuple[str, ...]) -> list[dict[str, str]]:
        with self._intact(file) as path, open(path, encoding="utf-8", errors="surrogateescape", newline="") as lines:
            reader = csv.DictReader(lines)
            rows = list(reader)
            require(set(columns) <= set(reader.fieldnames or ()), "it lacks a column")
            require(all(row.get(name) is not None for row in rows for name in columns), "a row of it lacks a column")
        return rows

    def _arrays(self, file: File[Content]) -> Content:
        with self._intact(file) as path, np.load(path) as arrays:
            known = {spec.name: spec.default is MISSING for spec in fields(file.holds)}  # type: ignore[arg-type]
            missing = [name for name, needed in known.items() if needed and name not in arrays.files]
            require(not missing, f"it has no array '{''.join(missing[:1])}'")
            return file.holds(**{name: arrays[name] for name in known if name in arrays.files})

    def _numbers(self, series: File[Any]) -> tuple[int, ...]:
        """The numbers of the files of a series."""
        files = self.folder.glob(re.sub(r"{.*}", "*", series.name))
        numbers = (file.stem.rpartition("-")[2] for file in files)
        return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def require(fits: bool | np.bool_, cause: str) -> None:
    """Content that no run has written is damage."""
    if not fits:
        raise Misfit("kind", "", cause)


def require_within(indices: Iterable[np.ndarray], end: int, start: int = 0) -> None:
    """Indices of images or classes that a run has."""
    for x in indices:
        fits = x.dtype.kind in "biu" and ((x >= start) & (x < end)).all()
        require(fits, "its indices are of other images or classes")
