"""The run folder. One process owns it at a time, and every file in it is written completely or not at all."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cdtrans.config import Config
from cdtrans.errors import CdtransError
from cdtrans.record.files import atomic, disk_full, intact, is_disk_full
from cdtrans.record.run_folder import CONFIG, RESULT, TIMINGS, check_folder
from cdtrans.runtime.environment import environment
from cdtrans.runtime.locks import Lock, try_lock
from cdtrans.runtime.ranks import barrier, is_main

LATER = ("found", "pixels")  # what data.json of the first runs lacks


class Run:
    """`Run.open` creates a folder or resumes an unfinished one; `close` releases it."""

    def __init__(self, folder: Path, lock: Lock | None) -> None:
        self.folder = folder
        self._lock = lock  # None for a rank that only reads
        self._closing = ExitStack()

    @property
    def writes(self) -> bool:
        """Whether this process writes: only rank 0 does."""
        return self._lock is not None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / RESULT).exists()

    @classmethod
    def open(cls, folder: Path, config: Config, data: dict[str, Any]) -> "Run":
        """Lock the folder for this configuration and data, or raise an error that says why not. A finished run is left
        as it is."""
        check_folder(folder, config)
        if not is_main():
            barrier()
            return cls(folder, None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder)
        except OSError as error:
            raise CdtransError(
                f"The run folder '{folder}' cannot be written: {error.strerror}; choose another --out."
            ) from error
        run = cls(folder, lock)
        check_folder(folder, config)
        if run.finished:  # by another process, after this one looked
            barrier()
            return run
        recorded = run.folder / "data.json"
        if recorded.exists() and not same_data(recorded, data):
            run.close()
            raise CdtransError(
                f"The images, the labels of --target-labels or the file of the method have changed since the run in "
                f"'{folder}' began; choose another --out, or put them back."
            )
        # config.yaml first: it marks the folder as a run, even if the process is killed right after
        run.write(CONFIG, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        run.write_json("data.json", data)
        run.write_json("environment.json", environment(config))
        barrier()
        return run

    def at_close(self, action: Callable[[], object]) -> None:
        """Do this when the run ends or is interrupted."""
        self._closing.callback(action)

    def close(self) -> None:
        try:
            self._closing.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def write(self, name: str, content: bytes) -> None:
        if not self.writes:
            return
        with atomic(self.folder / name) as file:
            file.write(content)

    def write_json(self, name: str, content: Any) -> None:
        self.write(
            name,
            (json.dumps(content, indent=2, sort_keys=True) + "\n").encode(),
        )

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        if not self.writes:
            return
        with atomic(self.folder / name) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def log(self, event: str, **fields: Any) -> None:
        """Append a line to log.jsonl: what happened. Without times, so that equal runs have equal logs."""
        self._append("log.jsonl", {"event": event, **fields})

    def log_timing(self, **fields: Any) -> None:
        """Append a line to timings.jsonl: how long a stage took, and when it ended (seconds since 1970)."""
        self._append(TIMINGS, {**fields, "at": round(time.time(), 3)})

    @contextmanager
    def timed(self, stage: str, **fields: Any) -> Iterator[None]:
        """Append the time that the body takes to timings.jsonl."""
        started = time.monotonic()
        yield
        self.log_timing(stage=stage, **fields, seconds=round(time.monotonic() - started, 3))

    def _append(self, name: str, fields: dict[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(fields) + "\n"  # ASCII: file names may contain undecodable bytes
        try:
            with open(self.folder / name, "ab") as file:
                file.write(line.encode())
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self.folder / name) from error
            raise

    def log_size(self) -> int:
        file = self.folder / "log.jsonl"
        return file.stat().st_size if file.exists() else 0

    def cut_log(self, size: int) -> None:
        """Remove lines that were logged after the state from which the run resumes; they will be logged again."""
        if self.writes and self.log_size() > size:
            os.truncate(self.folder / "log.jsonl", size)


def lock_folder(folder: Path) -> Lock:
    """The folder is this process's until the lock is closed."""
    lock = try_lock(folder / ".lock")
    if lock is None:
        raise CdtransError(
            f"Another process is working on the run folder '{folder}'; wait until it ends, or use another folder."
        )
    return lock


def same_data(recorded: Path, data: dict[str, Any]) -> bool:
    """Whether data.json says this; what an older run did not record cannot have changed."""
    with intact(recorded, "start again in another --out"):
        before = json.loads(recorded.read_text(encoding="utf-8"))
        domains = {name: data[name] for name in ("source", "target") if name in data}
        for name, domain in domains.items():
            data = data | {name: {k: v for k, v in domain.items() if k in before[name] or k not in LATER}}
        return bool(before == {k: v for k, v in data.items() if k in before or k not in LATER})
