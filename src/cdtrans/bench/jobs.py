"""Runs of a benchmark or an ablation as processes: `cdtrans adapt`, then `cdtrans eval`, each in its own process.

Runs that would train the same stage 1 share it: the first that starts trains it, the others wait until its `source/` is
there and start from it. Should it fail before, the next one trains it. Who is who, the folders tell each time anew: a
run that has begun goes on as it began, and never waits, so there is always one that can go on.
"""

import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cdtrans.bench.results import SCORED, read_sessions, sessions_file
from cdtrans.config import read_yaml
from cdtrans.errors import HARM, Interrupted
from cdtrans.run.stage_1 import SOURCE
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals, die_with_parent
from cdtrans.storage.files import atomic
from cdtrans.storage.run_folder import CONFIG, RESULT

COMMAND = (sys.executable, "-m", "cdtrans")
POLL_SECONDS = 0.05  # between two looks at the processes


@dataclass(frozen=True)
class PlannedRun:
    """A run and the arguments of the two commands that make it and score it."""

    name: str
    folder: Path
    adapt: tuple[str, ...]
    score: tuple[str, ...]
    peers: tuple[Path, ...] = ()  # the folders of all runs with the same stage 1, where it is shared

    @property
    def log(self) -> Path:
        """Beside the folder, which `adapt` wants for itself."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def finished(self) -> bool:
        return (self.folder / SCORED).exists()

    @property
    def begun(self) -> bool:
        return (self.folder / CONFIG).exists()

    def source_model(self) -> str | None:
        """The run that stage 1 is taken from, if it is not this one that trains it."""
        if self.begun and self.peers:
            taken: str | None = read_yaml(self.folder / CONFIG).get("source_model")  # an older run's has no such line
            return taken
        return next((str(peer) for peer in self.peers if (peer / SOURCE).exists()), None)

    def waits(self, under_way: Collection[Path]) -> bool:
        """Whether one of these is about to have the stage 1 that this run could start from."""
        return not self.begun and self.source_model() is None and any(peer in under_way for peer in self.peers)

    def command(self) -> tuple[str, ...]:
        taken = self.source_model()
        return self.adapt if taken is None else (*self.adapt, "--source-model", taken)

    def busy(self) -> bool:
        """Whether some process has the folder: one of a benchmark that was killed may still be saving its state."""
        lock = self.folder / ".lock"
        if not lock.exists():
            return False
        with open(lock, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class Job:
    """A run under way. `advance` is to be called now and then; it is true once the run is at its end, and `failure`
    then says what went wrong, if anything did."""

    def __init__(self, run: PlannedRun) -> None:
        self.run, self.failure = run, ""
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        self._begin(scoring=(run.folder / RESULT).exists())

    def _begin(self, *, scoring: bool) -> None:
        self.scoring, self.started, self.share = scoring, time.monotonic(), 0.0  # of the device's seconds
        self.answer = tempfile.TemporaryFile() if scoring else None  # noqa: SIM115 (open until the process ends)
        with open(self.run.log, "ab") as log:
            self.process = start_process(self.run.score if scoring else self.run.command(), self.answer or log, log)

    def advance(self) -> bool:
        code = self.process.poll()
        if code is None:
            return False
        self.note_time()
        harm = code == HARM and not self.scoring  # the guard has spoken: a result like any other
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
        assert self.answer is not None
        with self.answer as answer, atomic(self.run.folder / SCORED) as file:
            answer.seek(0)
            file.write((json.dumps(json.load(answer)) + "\n").encode())

    def note_time(self) -> None:
        """Keep how long this session of `adapt` took, and with how many side by side, on average: some of those asked
        for may have had to wait. A continued run has had several."""
        if not self.scoring:
            seconds = time.monotonic() - self.started
            jobs = max(1.0, seconds / self.share) if self.share else 1.0
            session = {"seconds": round(seconds, 3), "jobs": round(jobs, 3)}
            sessions = [*read_sessions(self.run.folder), session]
            with atomic(sessions_file(self.run.folder)) as file:
                file.write((json.dumps(sessions) + "\n").encode())


def run_jobs(
    title: str, runs: Sequence[PlannedRun], jobs: int, screen: Screen, tell: Callable[[Job], None]
) -> list[str]:
    """Run whatever is not finished, `jobs` side by side; `tell` is called with each that comes to its end. Returns the
    names of the runs that failed, which the screen has been told."""
    pending = [run for run in runs if not run.finished]
    active: list[Job] = []
    failed: list[str] = []
    screen.say(f"{len(runs)} runs, {len(runs) - len(pending)} of them finished already")
    looked = time.monotonic()
    with StopSignals.caught(), screen.track(title, len(runs), len(runs) - len(pending)) as bar, stop(active):
        while pending or active:
            if StopSignals.received is not None:
                raise Interrupted(StopSignals.received)
            since, looked = looked, time.monotonic()
            for job in active:
                job.share += (looked - since) / len(active)
            started = start_ready(pending, active, jobs)
            ended = [job for job in active if job.advance()]
            for job in ended:
                active.remove(job)
                if job.failure:
                    failed.append(job.run.name)
                    screen.warn(f"{job.run.name} failed: {job.failure} ({job.run.log})")
                else:
                    tell(job)
            if started or ended:
                running = ", ".join(job.run.name for job in active)
                bar.advance(sum(not job.failure for job in ended), f"running {running}" if running else "")
            else:
                if not active and (held := next((run for run in pending if run.busy()), None)) is not None:
                    bar.advance(0, f"waiting for another process to leave '{held.folder}'")
                time.sleep(POLL_SECONDS)
    return failed


def start_ready(pending: list[PlannedRun], active: list[Job], jobs: int) -> bool:
    """Start what need not wait, up to `jobs` side by side, and take it off `pending`."""
    under_way = {job.run.folder for job in active} | {run.folder for run in pending if run.begun}
    before = len(active)
    for run in list(pending):
        if len(active) >= jobs:
            break
        if not run.busy() and not run.waits(under_way):
            pending.remove(run)
            active.append(Job(run))
            under_way.add(run.folder)
    return len(active) > before


def start_process(arguments: tuple[str, ...], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen:
    """`cdtrans` with these arguments. Ctrl-C reaches only us, in a session of its own; it ends when we end."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


@contextmanager
def stop(active: list[Job]) -> Iterator[None]:
    """At the end no process is left: each is asked to save its state and end, and killed if that is interrupted."""
    try:
        yield
    finally:
        for job in active:
            job.process.terminate()
        try:
            for job in active:
                job.process.wait()
                job.note_time()
        except KeyboardInterrupt:
            for job in active:
                job.process.kill()
            raise


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no word")
