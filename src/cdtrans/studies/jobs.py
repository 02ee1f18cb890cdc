"""Runs of a benchmark or an ablation as processes: `cdtrans adapt`, then `cdtrans eval`, each in its own process.

Runs with the same stage 1 share it: the first trains it, the others wait for its `source/` and start from it. If the
first fails before that, the next one trains it. The folders decide each time which run is which: a run that has begun
resumes as it began and never waits, so there is always a run that can proceed.
"""

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cdtrans.config import read_yaml
from cdtrans.errors import VERDICT_AGAINST, Interrupted
from cdtrans.record.files import atomic, try_lock
from cdtrans.record.layout import SOURCE
from cdtrans.record.run_folder import CONFIG, RESULT
from cdtrans.runtime import processes
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.studies.results import SCORED, read_sessions, sessions_file

POLL_SECONDS = 0.05  # between checks of the processes


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the arguments of the commands that make it and score it."""

    name: str
    folder: Path
    adapt: tuple[str, ...]
    score: tuple[str, ...]
    peers: tuple[Path, ...] = ()  # the folders of all runs that share its stage 1

    @property
    def log(self) -> Path:
        """Beside the folder, because `adapt` needs an empty one."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def finished(self) -> bool:
        return (self.folder / SCORED).exists()

    @property
    def begun(self) -> bool:
        return (self.folder / CONFIG).exists()

    def source_model(self) -> str | None:
        """The run that stage 1 is taken from; None if this run trains it."""
        if self.begun and self.peers:
            recorded: str | None = read_yaml(self.folder / CONFIG).get("source_model")  # older runs lack it
            return recorded
        return next((str(peer) for peer in self.peers if (peer / SOURCE).exists()), None)

    def waits(self, under_way: Collection[Path]) -> bool:
        """Whether a running peer is training the stage 1 that this run could start from."""
        return not self.begun and self.source_model() is None and any(peer in under_way for peer in self.peers)

    def command(self) -> tuple[str, ...]:
        source_model = self.source_model()
        return self.adapt if source_model is None else (*self.adapt, "--source-model", source_model)

    def busy(self) -> bool:
        """Whether a process has the folder locked: a run of a killed benchmark may still be saving its state."""
        file = self.folder / ".lock"
        if not file.exists():
            return False
        lock = try_lock(file)
        if lock is not None:
            lock.close()
        return lock is None


class Job:
    """A run in progress. Call `advance` regularly; it returns True once the run has ended. `failure` then says what
    went wrong, or is empty."""

    def __init__(self, run: PlannedRun, side_by_side: int) -> None:
        self.run, self.side_by_side, self.failure = run, side_by_side, ""
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        self._begin(scoring=(run.folder / RESULT).exists())

    def _begin(self, *, scoring: bool) -> None:
        self.scoring, self.started, self.share = scoring, time.monotonic(), 0.0  # of the device's seconds
        self.scratch = tempfile.TemporaryDirectory() if scoring else None
        out = Path(self.scratch.name) / "answer.json" if self.scratch else self.run.log
        arguments = self.run.score if scoring else self.run.command()
        self.run.log.touch()
        self.process = processes.start(arguments, out, self.run.log, side_by_side=self.side_by_side)

    def advance(self) -> bool:
        code = self.process.exitcode
        if code is None:
            return False
        self.note_time()
        harm = code == VERDICT_AGAINST and not self.scoring  # the guard's verdict is a result, not a failure
        if code and not harm:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self.failure = f"{how}, {_last_line(self.run.log)}"
        elif not self.scoring:
            self._begin(scoring=True)
            return False
        else:
            self._keep_answer()
        return True

    def _keep_answer(self) -> None:
        assert self.scratch is not None
        with self.scratch as scratch, atomic(self.run.folder / SCORED) as file:
            answer = json.loads((Path(scratch) / "answer.json").read_bytes())
            file.write((json.dumps(answer) + "\n").encode())

    def note_time(self) -> None:
        """Save how long this session of `adapt` took, and how many runs were active on average. A resumed run has
        several sessions."""
        if not self.scoring:
            seconds = time.monotonic() - self.started
            jobs = max(1.0, seconds / self.share) if self.share else 1.0
            session = {"seconds": round(seconds, 3), "jobs": round(jobs, 3)}
            sessions = [*read_sessions(self.run.folder), session]
            with atomic(sessions_file(self.run.folder)) as file:
                file.write((json.dumps(sessions) + "\n").encode())


def run_jobs(
    title: str, runs: Sequence[PlannedRun], jobs: int, screen: Screen, on_end: Callable[[Job], None]
) -> list[str]:
    """Run everything unfinished, `jobs` at a time; `on_end` is called with each run that has ended, failed or not.
    Returns the names of the runs that failed, after a warning for each."""
    pending = [run for run in runs if not run.finished]
    active: list[Job] = []
    failed: list[str] = []
    finished = len(runs) - len(pending)
    screen.say(f"{len(runs)} runs, {finished} of them finished already")
    checked_at = time.monotonic()
    side_by_side = min(jobs, max(1, len(pending)))
    with StopSignals.caught(), screen.track(title, len(runs), finished) as bar, stop(active):
        while pending or active:
            if StopSignals.received is not None:
                raise Interrupted(StopSignals.received)
            since, checked_at = checked_at, time.monotonic()
            for job in active:
                job.share += (checked_at - since) / len(active)
            started = start_ready(pending, active, side_by_side)
            ended = [job for job in active if job.advance()]
            for job in ended:
                active.remove(job)
                if job.failure:
                    failed.append(job.run.name)
                    screen.warn(f"{job.run.name} failed: {job.failure} ({job.run.log})")
                on_end(job)
            if started or ended:
                running = ", ".join(job.run.name for job in active)
                bar.advance(sum(not job.failure for job in ended), f"running {running}" if running else "")
            else:
                if not active and (locked := next((run for run in pending if run.busy()), None)) is not None:
                    bar.advance(0, f"waiting for another process to leave '{locked.folder}'")
                time.sleep(POLL_SECONDS)
    return failed


def start_ready(pending: list[PlannedRun], active: list[Job], side_by_side: int) -> bool:
    """Start runs that need not wait, up to `side_by_side` at a time, and remove them from `pending`."""
    under_way = {job.run.folder for job in active} | {run.folder for run in pending if run.begun}
    before = len(active)
    for run in list(pending):
        if len(active) >= side_by_side:
            break
        if not run.busy() and not run.waits(under_way):
            pending.remove(run)
            active.append(Job(run, side_by_side))
            under_way.add(run.folder)
    return len(active) > before


@contextmanager
def stop(active: list[Job]) -> Iterator[None]:
    """At the end, stop every process: each saves its state and ends, and is killed if that is interrupted."""
    try:
        yield
    finally:
        for job in active:
            job.process.terminate()
        try:
            for job in active:
                job.process.join()
                job.note_time()
        except KeyboardInterrupt:
            for job in active:
                job.process.kill()
            raise


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
