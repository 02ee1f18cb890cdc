"""The results of finished runs: a line of results.jsonl for each, and means over the seeds."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.config import read_yaml
from cdtrans.inputs.benchmarks import Benchmark, Task
from cdtrans.record.run_folder import CONFIG, TIMINGS, read_result

SCORED = "eval.json"  # the output of `cdtrans eval`; a run that has it is finished

# What is reported of every run, in the order of the table's rows.
KINDS = {
    "source_only": "source only",
    "last_epoch": "last epoch",
    "label_free": "label-free choice",
    "best_by_labels": "best epoch by target labels",
}


def row_title(kind: str, method: str) -> str:
    """What a table calls a row of a method's runs."""
    name = "CDTrans" if method == "cdtrans" else method
    return KINDS[kind] if kind == "source_only" else f"{name}, {KINDS[kind]}"


@dataclass(frozen=True)
class RunResult:
    """Scores are accuracies from 0 to 1: of all images, or for VisDA-2017 the mean over the classes."""

    task: str
    seed: int
    run: str  # its folder, relative to the benchmark's
    stage_1: str  # the folder of the run that trained it, whose seconds include it
    backbone: str
    device: str
    images: int
    scores: dict[str, float]  # by kind; only the label-free choice if the predictions were deleted
    per_class: dict[str, dict[str, float | None]]  # by kind and class, if the benchmark's score is their mean
    epochs: dict[str, int]  # by kind, if it chooses one
    curve: list[float]  # accuracy after every epoch, by target labels; the first is source only
    seconds: float  # of `adapt`, from the files to the predictions; without killed sessions
    device_seconds: float  # the same, divided by the number of runs at the same time
    peak_memory: int | None  # bytes of the GPU that tensors had at most


def read_run(benchmark: Benchmark, task: Task, seed: int, out: Path, method: str = "") -> RunResult | None:
    """None for a run that is not finished and scored. `method` is the folder of its method, where there are several."""
    folder = run_folder(out / method, task, seed)
    try:
        scored_at = (folder / SCORED).stat().st_mtime_ns
    except FileNotFoundError:
        return None
    return _read_scored(benchmark, task, seed, out, folder, scored_at)


@cache  # many runs are read each time one ends
def _read_scored(benchmark: Benchmark, task: Task, seed: int, out: Path, folder: Path, scored_at: int) -> RunResult:
    evaluation = json.loads((folder / SCORED).read_text(encoding="utf-8"))
    metric = "class_mean_accuracy" if benchmark.class_mean else "accuracy"
    scores, per_class = {"label_free": evaluation[metric]}, {"label_free": list(evaluation["per_class"].values())}
    epochs = {"label_free": read_result(folder)["chosen_epoch"]}
    history = evaluation.get(f"{metric}_by_epoch")
    if history:
        scores["source_only"], per_class["source_only"] = history[0], evaluation["per_class_by_epoch"][0]
    if history and len(history) > 1:  # the guard may have ended the run before stage 2
        epochs["best_by_labels"] = max(range(1, len(history)), key=lambda epoch: history[epoch])
        for kind, epoch in (("last_epoch", -1), ("best_by_labels", epochs["best_by_labels"])):
            scores[kind], per_class[kind] = history[epoch], evaluation["per_class_by_epoch"][epoch]
    sessions, names = read_sessions(folder), evaluation["classes"]
    return RunResult(
        task=task.name,
        seed=seed,
        run=folder.relative_to(out).as_posix(),
        stage_1=trained_in(folder, out),
        backbone=read_yaml(folder / CONFIG)["backbone"],
        device=json.loads((folder / "environment.json").read_text(encoding="utf-8"))["device"],
        images=evaluation["images"],
        scores={kind: scores[kind] for kind in KINDS if kind in scores},
        per_class={k: dict(zip(names, v, strict=True)) for k, v in per_class.items() if benchmark.class_mean},
        epochs=epochs,
        curve=history or [],
        seconds=sum(session["seconds"] for session in sessions),
        device_seconds=sum(session["seconds"] / session["jobs"] for session in sessions),
        peak_memory=_peak_memory(folder),
    )


def _peak_memory(folder: Path) -> int | None:
    """Of all sessions of a run; None on a CPU."""
    lines = (folder / TIMINGS).read_text(encoding="utf-8").splitlines() if (folder / TIMINGS).exists() else []
    return max((line["peak_memory"] for line in map(json.loads, lines) if "peak_memory" in line), default=None)


def run_folder(out: Path, task: Task, seed: int) -> Path:
    return out / task.folder / f"seed-{seed}"


def seeds_in(folder: Path) -> Iterator[int]:
    """The seeds of the finished runs of a task."""
    for file in folder.glob(f"seed-*/{SCORED}"):
        if (seed := file.parent.name.removeprefix("seed-")).isdecimal():
            yield int(seed)


def trained_in(folder: Path, out: Path) -> str:
    """The run that trained this run's stage 1, relative to `out` if it is inside; maybe this run itself."""
    source_model: str | None = read_yaml(folder / CONFIG).get("source_model")  # older runs lack it
    if source_model is None:
        return folder.relative_to(out).as_posix()
    inside = os.path.relpath(source_model, out)
    if inside.startswith(".."):
        return source_model
    return trained_in(out / inside, out) if (out / inside / CONFIG).exists() else Path(inside).as_posix()


def shared_stage_1(trained: Mapping[str, str]) -> str:
    """A table's sentence about stage 1; `trained` maps each finished run to the run that trained its stage 1."""
    if all(run == by for run, by in trained.items()):
        return "Every run trained its own stage 1."
    times = len(set(trained.values()))
    note = (
        f"Stage 1 was trained {'once' if times == 1 else f'{times} times'} for these {len(trained)} runs: those of the "
        "same source and seed start from one source-only model, which is counted once, in the run that trained it."
    )
    elsewhere = sorted(set(trained.values()) - trained.keys())
    return f"{note} Not in the cost, since the table has no such run: {', '.join(elsewhere)}." if elsewhere else note


def result_lines(results: Sequence[RunResult]) -> bytes:
    return "".join(json.dumps(asdict(result)) + "\n" for result in results).encode()


def sessions_file(folder: Path) -> Path:
    """Beside a run's folder: how long each session took, and how many runs were active."""
    return folder.with_name(f"{folder.name}.sessions.json")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    file = sessions_file(folder)
    sessions: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return sessions


class Spread(NamedTuple):
    """The mean over seeds and, for two or more, the sample standard deviation."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


Values = Mapping[int, Mapping[str, float]]  # seed -> column of the table -> percent


def columns(benchmark: Benchmark) -> tuple[str, ...]:
    """A column is a task, or for VisDA-2017, which has one task, a class."""
    return benchmark.class_names if benchmark.class_mean else tuple(task.name for task in benchmark.tasks)


def values(benchmark: Benchmark, results: Sequence[RunResult], kind: str) -> Values:
    """The scores of the finished runs by seed and column."""
    by_seed: dict[int, dict[str, float]] = {}
    for result in results:
        if kind in result.scores:
            scores = result.per_class[kind] if benchmark.class_mean else {result.task: result.scores[kind]}
            percent = {column: 100 * value for column, value in scores.items() if value is not None}
            by_seed.setdefault(result.seed, {}).update(percent)
    return by_seed


def spread(by_seed: Values, names: Sequence[str]) -> Spread | None:
    """Mean and deviation, over the seeds, of the mean of these columns. Only seeds with all of them count; None without
    any."""
    means = [statistics.fmean(row[c] for c in names) for row in by_seed.values() if all(c in row for c in names)]
    if not means:
        return None
    return Spread(statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else None)
