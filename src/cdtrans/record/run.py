"""The run folder. One process owns it at a time, and every file in it is written completely or not at all."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from cdtrans.config import Config
from cdtrans.errors import RunError
from cdtrans.record.files import Lock, atomic, csv_line, disk_full, is_disk_full, try_lock
from cdtrans.record.layout import (
    ADAPTED,
    CONFIG,
    DATA,
    ENVIRONMENT,
    LOG,
    PREDICTIONS,
    RESULT,
    SOURCE,
    TIMINGS,
    VIEWS,
    Data,
    Environment,
    File,
)
from cdtrans.record.model import set_temperature
from cdtrans.record.outcome import Outcome
from cdtrans.record.probabilities import no_class, probabilities
from cdtrans.record.record import RunRecord
from cdtrans.record.run_folder import check_folder
from cdtrans.runtime.environment import package_version
from cdtrans.runtime.ranks import barrier, is_main

T = TypeVar("T")
PACKAGES = ("cdtrans", "torch", "torchvision", "timm", "numpy", "pillow")


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
        return RunRecord(self.folder).finished

    @classmethod
    def open(cls, folder: Path, config: Config, data: Data) -> "Run":
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
            raise RunError(
                "run-unwritable",
                f"The run folder '{folder}' cannot be written: {error.strerror}; choose another --out.",
            ) from error
        run = cls(folder, lock)
        check_folder(folder, config)
        if run.finished:  # by another process, after this one looked
            barrier()
            return run
        before = RunRecord(folder)
        if before.has(DATA) and before.data != data:
            run.close()
            raise RunError(
                "data-changed",
                f"The images, the labels of --target-labels or the file of the method have changed since the run in "
                f"'{folder}' began; choose another --out, or put them back.",
            )
        # config.yaml first: it marks the folder as a run, even if the process is killed right after
        run.write(CONFIG.name, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        run.write_json(DATA.name, asdict(data))
        run.write_json(ENVIRONMENT.name, asdict(environment(config)))
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
        self.write(name, json_bytes(content))

    def write_result(self, outcome: Outcome) -> None:
        if self.writes:
            rewrite(self.folder, RESULT, outcome)

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        if not self.writes:
            return
        with atomic(self.folder / name) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def log(self, event: str, **fields: Any) -> None:
        """Append a line to log.jsonl: what happened. Without times, so that equal runs have equal logs."""
        self._append(LOG.name, {"event": event, **fields})

    def log_timing(self, **fields: Any) -> None:
        """Append a line to timings.jsonl: how long a stage took, and when it ended (seconds since 1970)."""
        self._append(TIMINGS.name, {**fields, "at": round(time.time(), 3)})

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
        file = self.folder / LOG.name
        return file.stat().st_size if file.exists() else 0

    def cut_log(self, size: int) -> None:
        """Remove lines that were logged after the state from which the run resumes; they will be logged again."""
        if self.writes and self.log_size() > size:
            os.truncate(self.folder / LOG.name, size)


def environment(config: Config) -> Environment:
    """The versions and the device of this run."""
    import torch

    device = torch.device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return Environment(
        python=platform.python_version(),
        system=platform.system(),
        device=f"{device.type}: {name}",
        threads=torch.get_num_threads(),
        packages={package: package_version(package) for package in PACKAGES},
    )


def lock_folder(folder: Path) -> Lock:
    """The folder is this process's until the lock is closed."""
    lock = try_lock(folder / ".lock")
    if lock is None:
        raise RunError(
            "run-locked",
            f"Another process is working on the run folder '{folder}'; wait until it ends, or use another folder.",
        )
    return lock


def rewrite(folder: Path, file: File[T], content: T) -> None:
    """Replace a file of a finished run: bytes, or a dataclass as JSON."""
    with atomic(folder / file.name) as draft:
        draft.write(content if isinstance(content, bytes) else json_bytes(asdict(content)))  # type: ignore[call-overload]


def json_bytes(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def predictions_csv(paths: Sequence[str], classes: Sequence[str], logits: np.ndarray, source_only: np.ndarray) -> bytes:
    """predictions.csv: the chosen model's label for every target image, by path, from calibrated logits."""
    p = probabilities(logits)
    columns = zip(paths, p.argmax(axis=1), p.max(axis=1), no_class(source_only), strict=True)
    rows = sorted((path, classes[k], f"{sure:.6f}", f"{score:.6f}") for path, k, sure, score in columns)
    return b"".join(map(csv_line, [("path", "label", "probability", "no_class"), *rows]))


def predictions_of(record: RunRecord, model: str = "chosen") -> bytes:
    """predictions.csv by a model of a finished run."""
    logits, source_only = record.calibrated_logits(model), record.calibrated_logits(SOURCE)
    return predictions_csv(record.images.paths["target"], record.classes, logits, source_only)


def confidence_views(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """Both models' confidence in each target image, and how far its probabilities moved, from calibrated logits."""
    p, q = probabilities(before), probabilities(after)
    changed = np.abs(p - q).sum(axis=1) / 2
    arrays = {"confidence_before": p.max(axis=1), "confidence_after": q.max(axis=1), "changed": changed}
    return {name: x.astype(np.float16) for name, x in arrays.items()}


def recalibrate(record: RunRecord, temperature: float) -> RunRecord:
    """Change the temperature of a finished run's chosen model, and all that was recorded with the old one. Returns the
    record of the changed run."""
    record.calibrated_logits()  # an error before anything is changed
    set_temperature(record.model_folder(record.model_name()), temperature)
    return refresh(record.folder)


def refresh(folder: Path) -> RunRecord:
    """Write predictions.csv and the confidences of views.npz anew, after another temperature."""
    record = RunRecord(folder)
    source = record.calibrated_logits(SOURCE)
    sure = confidence_views(source, record.calibrated_logits(ADAPTED) if record.has_model(ADAPTED) else source)
    views = vars(record.views) | sure
    rewrite(folder, PREDICTIONS, predictions_of(record))
    with atomic(folder / VIEWS.name) as file:
        np.savez(file, **views)
    return RunRecord(folder)
