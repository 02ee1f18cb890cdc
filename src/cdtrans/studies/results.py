"""The results of finished runs: a line of results.jsonl for each, and means over the seeds."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cdtrans.errors import CdtransError
from cdtrans.inputs.benchmarks import Benchmark, FoundBenchmark
from cdtrans.record import layout
from cdtrans.record.files import intact
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.schema import check_value
from cdtrans.studies.recipes import start_of

# The numbers reported of every run, in the order of the table's rows.
SCORE_TITLES = {
    "source_only": "source only",
    "last_epoch": "last epoch",
    "label_free": "label-free choice",
    "best_by_labels": "best epoch by target labels",
}


@dataclass(frozen=True)
class RunResult:
    """A run's scores, from 0 to 1, and its cost. Kinds of later epochs are missing if the run ended before stage 2, and
    all but the label-free choice if its predictions were deleted."""

    task: str
    seed: int
    run: str  # the run's folder, relative to the study's
    stage_1: str  # folder of the run that trained stage 1, whose seconds include it
    backbone: str
    device: str
    images: int  # target images with labels
    target_images: int
    scores: dict[str, float]  # by kind: accuracy, or the mean over the classes if the benchmark is scored by it
    class_means: dict[str, float]  # by kind: the mean over the classes
    per_class: dict[str, dict[str, float | None]]  # by kind and class
    epochs: dict[str, int]  # the epoch of each kind that chooses one
    curve: list[float]  # score after every epoch; the first is source only
    seconds: float  # duration of `adapt`, from the files to the predictions; without killed sessions
    device_seconds: float  # the same, divided by the number of runs at the same time
    peak_memory: int | None  # largest number of bytes that tensors had on the GPU


@dataclass(frozen=True)
class Session:
    """A session of `adapt` in a study. The runs that are active at the same time share the device's seconds."""

    seconds: float
    device_seconds: float


class FinishedRuns:
    """The finished runs of a study, each read once. A damaged one is named on the screen and left out."""

    def __init__(self, out: Path, screen: Screen, *, by_class: bool = False) -> None:
        self.out, self.screen, self.by_class = out, screen, by_class
        self.failed: set[Path] = set()  # by this call, or damaged
        self._results: dict[Path, RunResult] = {}

    def get(self, folder: Path, task: str = "") -> RunResult | None:
        """The result of a run; None if it is not finished and scored, or damaged."""
        if folder not in self._results and folder not in self.failed and is_scored(folder):
            try:
                self._results[folder] = read_result(folder, self.out, task, by_class=self.by_class)
            except CdtransError as error:
                self.leave_out(folder, error)
        return self._results.get(folder)

    def leave_out(self, folder: Path, error: CdtransError) -> None:
        """Treat a run as damaged."""
        self.failed.add(folder)
        self._results.pop(folder, None)
        self.screen.warn(
            f"The table leaves out the run in '{folder}': {error} Or delete this folder to make the run again."
        )


def is_scored(folder: Path) -> bool:
    """Whether a run is finished: made, and scored with target labels."""
    return RunRecord(folder).has(layout.MEASURED)


def read_result(folder: Path, out: Path, task: str, *, by_class: bool) -> RunResult:
    """The result of a scored run. `by_class`: its score is the mean over the classes."""
    record = RunRecord(folder)
    measured, metric = record.evaluation, "class_mean_accuracy" if by_class else "accuracy"
    assert measured is not None, "it is scored"
    curve = [float(getattr(scores, metric)) for scores in measured.epochs]
    epochs = {"label_free": record.outcome.choice.epoch}
    scores = {"label_free": measured.scores}
    if curve:
        scores["source_only"] = measured.epochs[0]
    if len(curve) > 1:  # the guard may have ended the run before stage 2
        epochs["best_by_labels"] = max(range(1, len(curve)), key=lambda epoch: curve[epoch])
        scores |= {"last_epoch": measured.epochs[-1], "best_by_labels": measured.epochs[epochs["best_by_labels"]]}
    scores = {kind: scores[kind] for kind in SCORE_TITLES if kind in scores}
    sessions = read_sessions(folder)
    return RunResult(
        task=task,
        seed=record.config.seed,
        run=folder.relative_to(out).as_posix(),
        stage_1=trained_in(folder, out),
        backbone=record.config.backbone,
        device=record.environment.device,
        images=measured.images,
        target_images=record.data.target.images,
        scores={kind: getattr(each, metric) for kind, each in scores.items()},
        class_means={kind: each.class_mean_accuracy for kind, each in scores.items()},
        per_class={kind: dict(zip(measured.classes, each.per_class, strict=True)) for kind, each in scores.items()},
        epochs=epochs,
        curve=curve,
        seconds=sum(session.seconds for session in sessions),
        device_seconds=sum(session.device_seconds for session in sessions),
        peak_memory=max(
            (peak for line in record.timings if isinstance(peak := line.get("peak_memory"), int)), default=None
        ),
    )


def trained_in(folder: Path, out: Path) -> str:
    """The run that trained this run's stage 1, relative to `out` if it is inside; maybe this run itself."""
    source_model = RunRecord(folder).config.source_model
    if source_model is None:
        return folder.relative_to(out).as_posix()
    inside = os.path.relpath(source_model, out)
    if inside.startswith(".."):
        return source_model
    try:
        return trained_in(out / inside, out)
    except CdtransError:  # deleted or damaged
        return Path(inside).as_posix()


def beside(folder: Path, ending: str) -> Path:
    """A study's own file about a run. It is beside the run's folder, because `adapt` needs an empty one."""
    return folder.with_name(f"{folder.name}.{ending}")


def read_sessions(folder: Path) -> list[Session]:
    file = beside(folder, "sessions.json")
    if not file.exists():
        return []
    with intact(file, "delete it; the table then lacks the run's time"):
        sessions: list[Session] = check_value(json.loads(file.read_text(encoding="utf-8")), list[Session], "")
    return sessions


def shared_stage_1(results: Sequence[RunResult]) -> str:
    """A table's sentence about the runs that trained stage 1."""
    runs, trained = {result.run for result in results}, {result.stage_1 for result in results}
    if all(result.run == result.stage_1 for result in results):
        return "Every run trained its own stage 1."
    note = (
        f"Stage 1 was trained {'once' if len(trained) == 1 else f'{len(trained)} times'} for these {len(runs)} runs: "
        "those of the same source and seed start from one source-only model, which is counted once, in the run that "
        "trained it."
    )
    elsewhere = sorted(trained - runs)
    return f"{note} Not in the cost, since the table has no such run: {', '.join(elsewhere)}." if elsewhere else note


@dataclass(frozen=True)
class BenchResults:
    """The finished runs of a benchmark."""

    data: FoundBenchmark
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]  # means are over these
    backbone: str
    by_method: Mapping[str, Sequence[RunResult]]  # in the order of the rows
    start: str | None = None  # start of several methods; None if there is one
    misfits: Mapping[str, str] = field(default_factory=dict)  # methods that the backbone does not suit; their needs
    failed: Mapping[str, int] = field(default_factory=dict)  # failed runs by method

    @property
    def benchmark(self) -> Benchmark:
        return self.data.benchmark

    def own_start(self, method: str) -> bool:
        """Whether a method of several begins with another recipe than `start`."""
        return start_of(method, self.start) != self.start

    @property
    def columns(self) -> tuple[str, ...]:
        return self.benchmark.class_names if self.benchmark.class_mean else self.tasks

    @property
    def finished(self) -> list[RunResult]:
        return [result for results in self.by_method.values() for result in results]


class Spread(NamedTuple):
    """The mean over seeds and, for two or more, the sample standard deviation."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


# seed -> column of the table -> percent; a column is a task, or for VisDA-2017 a class
Values = Mapping[int, Mapping[str, float]]


def values(benchmark: Benchmark, results: Sequence[RunResult], kind: str) -> Values:
    """The scores of the finished runs by seed and column."""
    by_seed: dict[int, dict[str, float]] = {}
    for result in results:
        if kind in result.scores:
            scores = result.per_class[kind] if benchmark.class_mean else {result.task: result.scores[kind]}
            percent = {column: 100 * value for column, value in scores.items() if value is not None}
            by_seed.setdefault(result.seed, {}).update(percent)
    return by_seed


def seed_spread(by_seed: Values, names: Sequence[str]) -> Spread | None:
    """Mean and deviation, over the seeds, of the mean of these columns. Only seeds with all of them count; None without
    any."""
    means = [statistics.fmean(row[c] for c in names) for row in by_seed.values() if all(c in row for c in names)]
    if not means:
        return None
    return Spread(statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else None)
