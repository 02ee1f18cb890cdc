"""A study: variants x tasks x seeds, each an ordinary run folder, and the tables of their results.

One process at a time owns the folder of a study, and all its runs share one recipe. Every run is a process of its own
(`cdtrans adapt`, then `cdtrans eval`), so that several fit on one GPU, a failure does not affect other runs, and a
killed study resumes like a killed run. Results are read from the run folders alone, and the tables are written again
each time a run ends.

Runs with the same stage 1 share it: the first trains it, the others wait for its source model and start from it. If the
first fails before that, the next one trains it. The folders decide each time which run is which: a run that has begun
resumes as it began and never waits, so there is always a run that can proceed."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from cdtrans.errors import (
    VERDICT_AGAINST,
    CdtransError,
    DeviceError,
    Interrupted,
    RunError,
    SettingsError,
    counted,
    first_of,
)
from cdtrans.record import layout
from cdtrans.record.files import atomic, intact, try_lock
from cdtrans.record.record import RunRecord
from cdtrans.runtime import processes
from cdtrans.runtime.ranks import launched_world
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.schema import check_value
from cdtrans.studies.results import SCORE_TITLES, FinishedRuns, Session, beside, is_scored, read_sessions

RECIPE_FILES = {"benchmark": "bench.json", "ablation": "ablation.json"}  # each marks a study's folder
POLL_SECONDS = 0.05  # between checks of the processes


@dataclass(frozen=True)
class PlannedRun:
    """A run: the first arguments of the command that makes it, the labels that score it, and its settings."""

    name: str
    folder: Path
    adapt: tuple[str, ...]
    labels: Path
    settings: dict[str, Any]  # the complete configuration
    peers: tuple[Path, ...] = ()  # the folders of all runs that share its stage 1

    @property
    def record(self) -> RunRecord:
        """The run's folder as it is now."""
        return RunRecord(self.folder)

    @property
    def score(self) -> tuple[str, ...]:
        """The arguments of the command that scores it."""
        device, max_bad, root = (self.settings[name] for name in ("device", "max_bad", "root"))
        rooted = ("--root", root) if root else ()
        where = ("--device", device, "--max-bad", str(max_bad), *rooted)
        return ("eval", str(self.folder), str(self.labels), "--json", *where)

    def source_model(self) -> str | None:
        """The run that stage 1 is taken from; None if this run trains it."""
        if self.record.begun and self.peers:
            return self.record.config.source_model
        return next((str(peer) for peer in self.peers if RunRecord(peer).has_model(layout.SOURCE)), None)

    def waits(self, under_way: Collection[Path]) -> bool:
        """Whether a running peer is training the stage 1 that this run could start from."""
        if self.record.begun or not any(peer in under_way for peer in self.peers):
            return False
        return self.source_model() is None

    def command(self) -> tuple[str, ...]:
        source_model = self.source_model()
        origin = () if source_model is None else ("--source-model", source_model)
        return (*self.adapt, "--config", str(beside(self.folder, "yaml")), "--out", str(self.folder), *origin)

    def busy(self) -> bool:
        """Whether a process has the folder locked: a run of a killed study may still be saving its state."""
        file = self.folder / layout.LOCK_FILE
        if not file.exists():
            return False
        lock = try_lock(file)
        if lock is not None:
            lock.close()
        return lock is None


class ActiveRun:
    """A run in progress. Call `advance` regularly; it returns True once the run has ended. `failure` then says what
    went wrong, or is empty."""

    def __init__(self, run: PlannedRun, side_by_side: int) -> None:
        self.run, self.log, self.side_by_side, self.failure = run, beside(run.folder, "log"), side_by_side, ""
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            read_sessions(run.folder)  # a damaged file is reported before the work
            with atomic(beside(run.folder, "yaml")) as file:
                file.write(yaml.safe_dump(run.settings, sort_keys=False).encode())
            self._begin(scoring=run.record.finished)
        except CdtransError as error:
            self.failure = str(error)

    def _begin(self, *, scoring: bool) -> None:
        self.scoring, self.started, self.device_seconds = scoring, time.monotonic(), 0.0
        arguments = self.run.score if scoring else self.run.command()
        self.process = processes.start_process(arguments, self.log, self.log, side_by_side=self.side_by_side)

    def advance(self) -> bool:
        if self.failure:  # it could not begin
            return True
        code = self.process.exitcode
        if code is None:
            return False
        self.note_time()
        harm = code == VERDICT_AGAINST and not self.scoring  # the guard's verdict is a result, not a failure
        if code and not harm:
            cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        elif not self.scoring:
            self._begin(scoring=True)
            return False
        elif is_scored(self.run.folder):
            return True
        else:
            cause = "its scores could not be saved"
        self.failure = f"{cause}, {_last_line(self.log)} ({self.log})"
        return True

    def note_time(self) -> None:
        """Save how long this session of `adapt` took. A resumed run has several sessions."""
        if not self.scoring:
            seconds = round(time.monotonic() - self.started, 3)
            sessions = [*read_sessions(self.run.folder), Session(seconds, min(seconds, round(self.device_seconds, 3)))]
            with atomic(beside(self.run.folder, "sessions.json")) as file:
                file.write((json.dumps([asdict(session) for session in sessions]) + "\n").encode())


def run_jobs(
    title: str, runs: Sequence[PlannedRun], jobs: int, screen: Screen, on_end: Callable[[ActiveRun], None]
) -> None:
    """Run everything unfinished, `jobs` at a time; `on_end` is called with each run that has ended. A run that failed
    is named in a warning."""
    pending = [run for run in runs if not is_scored(run.folder)]
    active: list[ActiveRun] = []
    finished, side_by_side = len(runs) - len(pending), min(jobs, max(1, len(pending)))
    screen.say(counted(len(runs), "run") + (f", {finished} finished already" if finished else ""))
    checked_at = time.monotonic()
    with StopSignals.caught(), screen.track(title, len(runs), finished) as bar, stopped_at_end(active):
        while pending or active:
            if StopSignals.received is not None:
                raise Interrupted(StopSignals.received)
            since, checked_at = checked_at, time.monotonic()
            for job in active:
                job.device_seconds += (checked_at - since) / len(active)
            started = start_ready(pending, active, side_by_side)
            for job in started:
                screen.say(f"{job.run.name}: started, log in {job.log} ({counted(len(pending), 'run')} waiting)")
            ended = [job for job in active if job.advance()]
            for job in ended:
                active.remove(job)
                if job.failure:
                    screen.warn(f"{job.run.name} failed: {job.failure}")
                on_end(job)
            if started or ended:
                running = ", ".join(job.run.name for job in active)
                screen.begin(f"running {running}")
                bar.advance(sum(not job.failure for job in ended), f"running {running}" if running else "")
            else:
                if not active and (locked := next((run for run in pending if run.busy()), None)) is not None:
                    bar.advance(0, f"waiting for another process to leave '{locked.folder}'")
                time.sleep(POLL_SECONDS)


def start_ready(pending: list[PlannedRun], active: list[ActiveRun], jobs: int) -> list[ActiveRun]:
    """Start runs that need not wait, up to `jobs` at a time, and move them from `pending` to `active`."""
    under_way = {job.run.folder for job in active} | {run.folder for run in pending if run.record.begun}
    before = len(active)
    for run in list(pending):
        if len(active) >= jobs:
            break
        if not run.busy() and not run.waits(under_way):
            pending.remove(run)
            active.append(ActiveRun(run, jobs))
            under_way.add(run.folder)
    return active[before:]


@contextmanager
def stopped_at_end(active: list[ActiveRun]) -> Iterator[None]:
    """At the end, stop every process: each saves its state and ends, and is killed if that is interrupted."""
    try:
        yield
    finally:
        working = [job for job in active if not job.failure]  # a failed one may have no process
        for job in working:
            job.process.terminate()
        try:
            for job in working:
                job.process.join()
                job.note_time()
        except KeyboardInterrupt:
            for job in working:
                job.process.kill()
            raise


def _last_line(log: Path) -> str:
    if not log.exists():  # the process ended before it could open it
        return "no output"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


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


class Study(ABC):
    """A planned study, in a folder of its own."""

    kind: ClassVar[str]
    out: Path
    by_class: bool = False  # whether scores are means over the classes

    @property
    @abstractmethod
    def table(self) -> str:
        """The file to read first."""

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """The settings that all runs share."""

    @abstractmethod
    def runs(self) -> tuple[PlannedRun, ...]:
        """The runs, in the order in which they start."""

    @abstractmethod
    def write(self, results: FinishedRuns) -> dict[str, Any]:
        """Write the tables from all finished runs, also those of earlier calls. Returns the numbers for --json."""

    def save(self, contents: Mapping[str, str]) -> None:
        """Write files into the study's folder, by their names there."""
        for name, content in contents.items():
            with atomic(self.out / name) as file:
                file.write(content.encode("utf-8", "backslashreplace"))  # paths may contain undecodable bytes

    def prepare(self) -> None:  # noqa: B027 - few studies need any
        """Write files that the runs need."""

    def carry_out(self, jobs: int, screen: Screen) -> BenchResult:
        """Run everything unfinished, `jobs` at a time. A run that fails is named, and the others continue."""
        results = FinishedRuns(self.out, screen, by_class=self.by_class)
        runs = self.runs()

        def ended(job: ActiveRun) -> None:
            if job.failure:
                results.failed.add(job.run.folder)
            self.write(results)
            if not job.failure and (result := results.get(job.run.folder)):
                scores = ", ".join(f"{SCORE_TITLES[kind]} {100 * score:.1f}" for kind, score in result.scores.items())
                screen.say(f"{job.run.name}: {scores} ({result.seconds / 60:.1f} min)")

        with owned(self.out, self.kind, self.recipe()):
            self.prepare()
            self.write(results)
            run_jobs(self.kind, runs, jobs, screen, ended)
            numbers = self.write(results)
        asked = {run.folder: run.name for run in runs}
        others = sorted(folder.relative_to(self.out).as_posix() for folder in results.failed - asked.keys())
        wrong = [name for folder, name in asked.items() if folder in results.failed]
        finished = sum(results.get(folder) is not None for folder in asked)
        return BenchResult(self.out, self.table, len(runs), finished, (*wrong, *others), numbers)


@contextmanager
def owned(out: Path, kind: str, recipe: dict[str, Any]) -> Iterator[None]:
    """Lock a study's folder for this process and save its recipe there. Refuse a folder with other contents."""
    if launched_world() > 1:
        raise SettingsError(
            "study-under-torchrun",
            f"The runs of the {kind} are processes of their own; start the command in one process, with --jobs N for "
            "several runs in parallel.",
        )
    check_study_folder(out, kind, recipe)
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
        check_study_folder(out, kind, recipe)
        with atomic(out / RECIPE_FILES[kind]) as file:
            file.write((json.dumps(recipe, indent=2, sort_keys=True) + "\n").encode())
        yield


def check_study_folder(out: Path, kind: str, recipe: dict[str, Any]) -> None:
    """Refuse a folder with other contents. Writes nothing."""
    file = out / RECIPE_FILES[kind]
    if file.exists():
        with intact(file, "restore it, or choose another --out"):
            before: dict[str, Any] = check_value(json.loads(file.read_text(encoding="utf-8")), dict[str, Any], "")
        if changed := [key for key in recipe if before.get(key) != json.loads(json.dumps(recipe[key]))]:
            differences = first_of([f"{key}: {before.get(key)} there, {recipe[key]} now" for key in changed])
            raise RunError("other-study", f"'{out}' holds another {kind}'s runs ({differences}); choose another --out.")
    elif out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {".lock", f".{file.name}.draft"}):
        raise RunError("not-a-study", f"'{out}' exists and holds no {kind}; choose another --out.")
