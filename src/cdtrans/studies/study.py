"""A study: variants x tasks x seeds, each an ordinary run folder, and the tables of their results.

One process at a time owns the folder of a study, and all its runs share one recipe. Every run is a process of its own,
so that several fit on one GPU, a failure does not affect other runs, and a killed study resumes like a killed run.
Results are read from the run folders alone, and the tables are written again each time a run ends."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cdtrans.errors import DeviceError, RunError, SettingsError, first_of
from cdtrans.record.files import atomic, intact, try_lock
from cdtrans.runtime.ranks import launched_world
from cdtrans.runtime.screen import Screen
from cdtrans.schema import check
from cdtrans.studies.jobs import Job, PlannedRun, run_jobs
from cdtrans.studies.results import KINDS, Results

ARTICLES = {"benchmark": "a", "ablation": "an"}


@dataclass(frozen=True)
class BenchResult:
    """The state of a benchmark or an ablation after a call."""

    out: Path
    table: str  # the file in `out` to read first
    asked: int  # runs of this call
    finished: int  # finished runs among them
    failed: tuple[str, ...]  # names of runs that failed, or whose folder is damaged
    numbers: dict[str, Any]  # the numbers of the table

    def summary(self) -> dict[str, Any]:
        """The promised keys of `bench --json` and `ablate --json`."""
        counts = {"runs": self.asked, "finished": self.finished, "failed": list(self.failed)}
        return {"out": str(self.out), **counts, **self.numbers}


@dataclass(frozen=True)
class Study:
    """A planned study. `write` writes the tables from the finished runs and returns the numbers for --json."""

    kind: Literal["benchmark", "ablation"]
    out: Path
    recipe: dict[str, Any]  # the settings that all runs share
    runs: tuple[PlannedRun, ...]
    table: str  # the file to read first
    write: Callable[[Results, frozenset[Path]], Mapping[str, Any]]
    by_class: bool = False  # whether scores are means over the classes
    prepare: Callable[[], None] = lambda: None  # writes files that the runs need

    def carry_out(self, jobs: int, screen: Screen) -> BenchResult:
        """Run everything unfinished, `jobs` at a time. A run that fails is named, and the others continue."""
        results = Results(self.out, screen, by_class=self.by_class)
        failed: set[Path] = set()

        def write() -> Mapping[str, Any]:
            return self.write(results, frozenset(failed))

        def ended(job: Job) -> None:
            if job.failure:
                failed.add(job.run.folder)
            write()
            if not job.failure and (result := results.get(job.run.folder)):
                scores = ", ".join(f"{KINDS[kind]} {100 * score:.1f}" for kind, score in result.scores.items())
                screen.say(f"{job.run.name}: {scores} ({result.seconds / 60:.1f} min)")

        with owned(self.out, self.kind, self.recipe):
            self.prepare()
            write()
            run_jobs(self.kind, self.runs, jobs, screen, ended)
            numbers = dict(write())
        asked = {run.folder: run.name for run in self.runs}
        others = sorted(folder.relative_to(self.out).as_posix() for folder in results.damaged - asked.keys())
        wrong = [name for folder, name in asked.items() if folder in failed | results.damaged]
        finished = sum(results.get(folder) is not None for folder in asked)
        return BenchResult(self.out, self.table, len(self.runs), finished, (*wrong, *others), numbers)


@contextmanager
def owned(out: Path, kind: Literal["benchmark", "ablation"], recipe: dict[str, Any]) -> Iterator[None]:
    """Lock a study's folder for this process and save its recipe there. Refuse a folder with other contents."""
    if launched_world() > 1:
        raise SettingsError(
            "study-under-torchrun",
            f"The runs of {ARTICLES[kind]} {kind} are processes of their own; start the command in one process, with "
            "--jobs N for several runs in parallel.",
        )
    check_folder(out, kind, recipe)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = try_lock(out / ".lock")
    except OSError as error:
        raise DeviceError(
            "out-not-writable", f"The folder '{out}' cannot be written: {error.strerror}; choose another --out."
        ) from error
    if lock is None:
        raise RunError("study-locked", f"Another process is running the {kind} in '{out}'; choose another --out.")
    with lock:
        check_folder(out, kind, recipe)
        with atomic(recipe_file(out, kind)) as file:
            file.write((json.dumps(recipe, indent=2, sort_keys=True) + "\n").encode())
        yield


def recipe_file(out: Path, kind: str) -> Path:
    """The file that marks the folder of a study and keeps the settings of its runs."""
    return out / ("bench.json" if kind == "benchmark" else f"{kind}.json")


def check_folder(out: Path, kind: str, recipe: dict[str, Any]) -> None:
    """Refuse a folder with other contents. Writes nothing."""
    file = recipe_file(out, kind)
    if file.exists():
        with intact(file, "restore it, or choose another --out"):
            before: dict[str, Any] = check(json.loads(file.read_text(encoding="utf-8")), dict[str, Any], "")
        if changed := [key for key in recipe if before.get(key) != json.loads(json.dumps(recipe[key]))]:
            differences = first_of([f"{key}: {before.get(key)} there, {recipe[key]} now" for key in changed])
            raise RunError("other-study", f"'{out}' holds another {kind}'s runs ({differences}); choose another --out.")
    elif out.exists() and (
        not out.is_dir() or any(p.name not in (".lock", f".{file.name}.draft") for p in out.iterdir())
    ):
        raise RunError(
            "not-a-study", f"'{out}' exists and is not {ARTICLES[kind]} {kind}'s folder; choose another --out."
        )
