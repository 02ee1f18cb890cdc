"""Writing run folders: a run while it is at work, the changes that later commands make, and what may be written where.
One process owns a folder at a time, and every file is written completely or not at all."""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cdtrans.config import DECIDED_LATE, RESUME_MAY_CHANGE, Config, Resolved, flat
from cdtrans.errors import Interrupted, RunError, SettingsError, first_of
from cdtrans.record import layout
from cdtrans.record.files import Lock, atomic, csv_lines, named_if_full, try_lock
from cdtrans.record.layout import ADAPTED, SOURCE, DataRecord, Environment, File
from cdtrans.record.model import write_card
from cdtrans.record.outcome import NO_CLASS, NoClassCurve
from cdtrans.record.probabilities import no_class, no_class_cut, probabilities
from cdtrans.record.record import RunRecord
from cdtrans.runtime import package_version
from cdtrans.runtime.ranks import barrier, is_main

PACKAGES = ("cdtrans", "torch", "torchvision", "timm", "numpy", "pillow")
OTHER = "choose another --out"


class RunWriter(ExitStack[None]):
    """A run at work. `RunWriter.open` creates a folder or resumes an unfinished run; `close` calls what was added with
    `callback`, and releases the folder."""

    def __init__(self, folder: Path, lock: Lock | None) -> None:
        super().__init__()
        self.folder = folder
        self.writes = lock is not None  # only rank 0 has the lock
        if lock is not None:
            self.enter_context(lock)

    @classmethod
    def open(cls, folder: Path, config: Config, data: DataRecord) -> "RunWriter":
        """Lock the folder for these settings and data, or raise an error that says why not. A finished run is left as
        it is."""
        require_resumable(folder, config)
        if not is_main():
            barrier()
            return cls(folder, None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = cls(folder, lock_folder(folder))
        except OSError as error:
            cause = f"The run folder '{folder}' cannot be written: {error.strerror}"
            raise RunError("run-unwritable", f"{cause}; {OTHER}.") from error
        try:
            run._begin(config, data)
        except BaseException:
            run.close()
            raise
        barrier()
        return run

    def _begin(self, config: Config, data: DataRecord) -> None:
        require_resumable(self.folder, config)  # again: another process may have begun or finished a run here
        before = self.record
        if before.finished:
            return
        if before.has(layout.DATA) and before.data != data:
            raise RunError(
                "data-changed",
                f"The images, the answers of --answers or the file of the method have changed since the run in "
                f"'{self.folder}' began; {OTHER}, or put them back.",
            )
        if before.has(layout.TIMINGS) and self.writes:  # a kill may have torn the last line
            timings = (self.folder / layout.TIMINGS.name).read_bytes()
            os.truncate(self.folder / layout.TIMINGS.name, timings.rfind(b"\n") + 1)
        # The settings first: they mark the folder as a run, even if the process is killed right after.
        self.write(layout.CONFIG, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        self.write(layout.DATA, data)
        self.write(layout.ENVIRONMENT, environment(config))

    @property
    def record(self) -> RunRecord:
        """The folder as it is now."""
        return RunRecord(self.folder)

    def write(self, file: File[Any], content: Any) -> None:
        if self.writes:
            rewrite(self.folder, file, content)

    def log(self, event: str, **fields: Any) -> None:
        """Append a line to the log."""
        self._append(layout.LOG, {"event": event, **fields})

    def log_timing(self, **fields: Any) -> None:
        """Append a line to the timings, with the time (seconds since 1970)."""
        self._append(layout.TIMINGS, {**fields, "at": round(time.time(), 3)})

    @contextmanager
    def timed(self, stage: str, **fields: Any) -> Iterator[None]:
        """Append the time that the body takes to the timings."""
        started = time.monotonic()
        yield
        self.log_timing(stage=stage, **fields, seconds=round(time.monotonic() - started, 3))

    @contextmanager
    def session(self, started: float) -> Iterator[None]:
        """Log how long a session took that is now finished or interrupted, with all that no other line covers: imports,
        decoding, saving. On a GPU also the peak memory of its tensors."""
        import torch

        interrupted = None
        try:
            yield
        except Interrupted as error:
            interrupted = error
        memory = {"peak_memory": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}
        self.log_timing(stage="session", seconds=round(time.monotonic() - started, 3), **memory)
        if interrupted:
            raise interrupted

    def _append(self, file: File[Any], fields: dict[str, Any]) -> None:
        if not self.writes:
            return
        path, line = self.folder / file.name, json.dumps(fields) + "\n"  # ASCII: names may hold undecodable bytes
        with named_if_full(path), open(path, "ab") as lines:
            lines.write(line.encode())

    def log_size(self) -> int:
        file = self.folder / layout.LOG.name
        return file.stat().st_size if file.exists() else 0

    def cut_log(self, size: int) -> None:
        """Remove lines that were logged after the state from which the run resumes; they will be logged again."""
        if self.writes and self.log_size() > size:
            os.truncate(self.folder / layout.LOG.name, size)


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


# Files


def rewrite(folder: Path, file: File[Any], content: Any) -> None:
    """Write or replace a file of a run: bytes, arrays, or a dataclass of either."""
    with atomic(folder / file.name) as out:
        if isinstance(content, bytes):
            out.write(content)
        elif file.name.endswith(".npz"):
            arrays = content if isinstance(content, dict) else vars(content)
            np.savez(out, **{name: x for name, x in arrays.items() if x is not None})
        else:
            out.write((json.dumps(asdict(content), indent=2, sort_keys=True) + "\n").encode())


def predictions_csv(
    paths: Sequence[str], classes: Sequence[str], logits: np.ndarray, scores: np.ndarray, curve: NoClassCurve | None
) -> bytes:
    """A model's label for every target image, by path, from calibrated logits; with a curve, NO_CLASS above its cut.
    `scores` [N] are those of no class."""
    p, cut = probabilities(logits), 1.0 if curve is None else no_class_cut(curve)
    columns = zip(paths, p.argmax(axis=1), p.max(axis=1), no_class(scores, curve), strict=True)
    rows = []
    for path, k, sure, none in columns:
        label, probability = (NO_CLASS, none) if none > cut else (classes[k], sure)
        rows.append((path, label, f"{probability:.6f}", f"{none:.6f}"))
    return csv_lines([("path", "label", "probability", "no_class"), *sorted(rows)])


def confidence_views(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """Both models' confidence in each target image, and how far its probabilities moved, from calibrated logits."""
    p, q = probabilities(before), probabilities(after)
    changed = np.abs(p - q).sum(axis=1) / 2
    arrays = {"confidence_before": p.max(axis=1), "confidence_after": q.max(axis=1), "changed": changed}
    return {name: x.astype(np.float16) for name, x in arrays.items()}


# Changes of a finished run


def remove_state(folder: Path) -> None:
    """A finished run needs no state to resume from; it is several times the size of the model."""
    shutil.rmtree((folder / layout.STATE.name).parent, ignore_errors=True)


def predictions_of(record: RunRecord, model: str = "chosen") -> bytes:
    """The table of predictions by a model of a finished run."""
    logits, curve = record.calibrated_logits(model), record.outcome.class_set.curve
    return predictions_csv(record.images.paths["target"], record.classes, logits, record.views.no_class, curve)


def recalibrate(record: RunRecord, temperature: float) -> None:
    """Change the temperature of a finished run's chosen model, and all that was recorded with the old one."""
    record.calibrated_logits()  # an error before anything is changed
    name = record.model_name()
    write_card(record.model_folder(name), replace(record.card(name), temperature=temperature))
    source = record.calibrated_logits(SOURCE)
    sure = confidence_views(source, record.calibrated_logits(ADAPTED) if record.has_model(ADAPTED) else source)
    rewrite(record.folder, layout.VIEWS, vars(record.views) | sure)
    rewrite(record.folder, layout.PREDICTIONS, predictions_of(record))


# What may be written where


def lock_folder(folder: Path) -> Lock:
    """The folder is this process's until the lock is closed."""
    lock = try_lock(folder / layout.LOCK_FILE)
    if lock is None:
        raise RunError(
            "run-locked",
            f"Another process is working on the run folder '{folder}'; wait until it ends, or use another folder.",
        )
    return lock


def require_resumable(folder: Path, config: Config) -> None:
    """Refuse a folder that holds something else, or a run of other settings. Writes nothing. Before the settings are
    resolved, which needs torch, 'auto' may mean anything."""
    record = RunRecord(folder)
    if record.begun:
        before, now = flat(record.settings), flat(config.to_dict())
        free = set(RESUME_MAY_CHANGE)
        if not isinstance(config, Resolved):
            free |= {"backbone", *(name for name in DECIDED_LATE if now[name] == "auto")}
            free |= {name for name in now if name.startswith("method.")}
        if record.finished:
            free.remove("guard")  # it has judged
        changed = [name for name in now if name not in free and before.get(name) != now[name]]
        if changed:
            what = first_of([f"{name}: {before.get(name)} there, {now[name]} now" for name in changed])
            raise RunError("run-differs", f"'{folder}' holds another run ({what}); {OTHER} to start a new one.")
    elif folder.exists() and (not folder.is_dir() or any(file.name not in layout.FIRST for file in folder.iterdir())):
        if record.begun:  # meanwhile, by the main rank or another process
            return require_resumable(folder, config)
        raise RunError("not-a-run", f"'{folder}' exists and is not a run folder; {OTHER}.")


def require_output(file: Path, what: str, flag: str, *inputs: Path | None) -> None:
    """Fail before the work and not after it: a file must be writable, and must not replace an input of the verb, a file
    inside an input folder, or a part of any run."""
    if problem := _output_problem(file, what, filter(None, inputs)):
        raise SettingsError("output-refused", f"'{file}' {problem}; choose another {flag}.")


def _output_problem(file: Path, what: str, inputs: Iterable[Path]) -> str:
    if file.exists() and not file.is_file():
        return f"is not a file that the {what} could replace"
    folder = next(above for above in file.absolute().parents if above.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot be written: '{folder}' is not a writable folder"
    real = Path(os.path.realpath(file))
    if file.exists() and any(Path(os.path.realpath(place)) in (real, *real.parents) for place in inputs):
        return "is an input of this command and would be overwritten"
    if (real.parent / layout.CARD).exists():
        return "is in the folder of a model, which must not be changed"
    for run in real.parents:
        if RunRecord(run).begun and real.relative_to(run).parts[0] in layout.RESERVED:
            return f"is a part of the run in '{run}' and must not be changed"
    return ""
