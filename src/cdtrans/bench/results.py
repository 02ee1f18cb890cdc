"""What the finished runs of a benchmark came to: a line of results.jsonl for each, and their mean over the seeds."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.config import read_yaml
from cdtrans.data.benchmarks import Benchmark, Task
from cdtrans.storage.run_folder import CONFIG, read_result

SCORED = "eval.json"  # what `cdtrans eval` said of a run; its presence means that there is nothing left to do

# What is reported of every run, in the order of the table's rows.
KINDS = {
    "source_only": "source only",
    "last_epoch": "CDTrans, last epoch",
    "label_free": "CDTrans, label-free choice",
    "best_by_labels": "CDTrans, best epoch by target labels",
}


@dataclass(frozen=True)
class RunResult:
    """Scores are accuracies from 0 to 1: of all images, or for VisDA-2017 the mean over the classes."""

    task: str
    seed: int
    run: str  # its folder, from the benchmark's
    stage_1: str  # the run that trained it, in the same way; it is counted in that one's seconds
    backbone: str
    device: str
    images: int
    scores: dict[str, float]  # by kind; a run whose predictions somebody has deleted has only the label-free choice
    per_class: dict[str, dict[str, float | None]]  # by kind and class, where the benchmark's score is their mean
    epochs: dict[str, int]  # of the kinds that choose one
    seconds: float  # of `adapt`, from the files to the predictions; what a kill cut off is not in it
    device_seconds: float  # the same, shared out among the runs that were side by side


def read_run(benchmark: Benchmark, task: Task, seed: int, out: Path) -> RunResult | None:
    """None for a run that is not finished and scored."""
    folder = run_folder(out, task, seed)
    if not (folder / SCORED).exists():
        return None
    told = json.loads((folder / SCORED).read_text(encoding="utf-8"))
    metric = "class_mean_accuracy" if benchmark.class_mean else "accuracy"
    scores, per_class = {"label_free": told[metric]}, {"label_free": list(told["per_class"].values())}
    epochs = {"label_free": read_result(folder)["chosen_epoch"]}
    history = told.get(f"{metric}_by_epoch")
    if history:
        scores["source_only"], per_class["source_only"] = history[0], told["per_class_by_epoch"][0]
    if history and len(history) > 1:  # the guard may have ended the run before stage 2
        epochs["best_by_labels"] = max(range(1, len(history)), key=lambda epoch: history[epoch])
        for kind, epoch in (("last_epoch", -1), ("best_by_labels", epochs["best_by_labels"])):
            scores[kind], per_class[kind] = history[epoch], told["per_class_by_epoch"][epoch]
    sessions = read_sessions(folder)
    return RunResult(
        task=task.name,
        seed=seed,
        run=folder.relative_to(out).as_posix(),
        stage_1=trained_in(folder, out),
        backbone=read_yaml(folder / CONFIG)["backbone"],
        device=json.loads((folder / "environment.json").read_text(encoding="utf-8"))["device"],
        images=told["images"],
        scores={kind: scores[kind] for kind in KINDS if kind in scores},
        per_class={k: dict(zip(told["classes"], v, strict=True)) for k, v in per_class.items() if benchmark.class_mean},
        epochs=epochs,
        seconds=sum(session["seconds"] for session in sessions),
        device_seconds=sum(session["seconds"] / session["jobs"] for session in sessions),
    )


def run_folder(out: Path, task: Task, seed: int) -> Path:
    return out / task.folder / f"seed-{seed}"


def trained_in(folder: Path, out: Path) -> str:
    """The run that trained a run's stage 1, from the folder `out` if it is in there: the run itself, if no other."""
    taken: str | None = read_yaml(folder / CONFIG).get("source_model")  # an older run's has no such line
    if taken is None:
        return folder.relative_to(out).as_posix()
    inside = os.path.relpath(taken, out)
    if inside.startswith(".."):
        return taken
    return trained_in(out / inside, out) if (out / inside / CONFIG).exists() else Path(inside).as_posix()


def shared_stage_1(trained: Mapping[str, str]) -> str:
    """What a table says of stage 1; `trained` has for each finished run the one that trained it."""
    if all(run == by for run, by in trained.items()):
        return "Every run trained its own stage 1."
    times = len(set(trained.values()))
    told = (
        f"Stage 1 was trained {'once' if times == 1 else f'{times} times'} for these {len(trained)} runs: those of the "
        "same source and seed start from one source-only model, which is counted once, in the run that trained it."
    )
    elsewhere = sorted(set(trained.values()) - trained.keys())
    return f"{told} Not in the cost, since the table has no such run: {', '.join(elsewhere)}." if elsewhere else told


def result_lines(results: Sequence[RunResult]) -> bytes:
    return "".join(json.dumps(asdict(result)) + "\n" for result in results).encode()


def sessions_file(folder: Path) -> Path:
    """Beside a run's folder: how long each of its sessions took, and how many runs were side by side."""
    return folder.with_name(f"{folder.name}.sessions.json")


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    file = sessions_file(folder)
    sessions: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return sessions


class Spread(NamedTuple):
    """The mean over seeds and, from two of them on, their standard deviation (of a sample)."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


Values = Mapping[int, Mapping[str, float]]  # seed -> column of the table -> percent


def columns(benchmark: Benchmark) -> tuple[str, ...]:
    """A column is a task, or for VisDA-2017, which has one task, a class."""
    return benchmark.class_names if benchmark.class_mean else tuple(task.name for task in benchmark.tasks)


def values(benchmark: Benchmark, results: Sequence[RunResult], kind: str) -> Values:
    """What the finished runs came to, column by column."""
    found: dict[int, dict[str, float]] = {}
    for result in results:
        if kind in result.scores:
            told = result.per_class[kind] if benchmark.class_mean else {result.task: result.scores[kind]}
            percent = {column: 100 * value for column, value in told.items() if value is not None}
            found.setdefault(result.seed, {}).update(percent)
    return found


def spread(found: Values, names: Sequence[str]) -> Spread | None:
    """Of the mean over some columns; only the seeds that have all of these count, and without any there is none."""
    means = [statistics.fmean(row[c] for c in names) for row in found.values() if all(c in row for c in names)]
    if not means:
        return None
    return Spread(statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else None)
