"""`cdtrans adapt` from files to predictions with a cold cache, in a process of its own; and how busy the GPU was.

usage: python benchmarks/pipeline.py [--source DIR --target DIR] [--json FILE] [-- flags of cdtrans adapt]
Without folders: two epochs of the built-in task."""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import measure
from cdtrans.inputs.digits import write_digits
from cdtrans.record.record import RunRecord


@contextmanager
def watched_gpu(busy: list[tuple[float, int]]) -> Iterator[None]:
    """The first GPU by nvidia-smi's own measure, the share of its sample period in which a kernel ran, a few times a
    second; started once, because every start of nvidia-smi holds up other programs' calls to the GPU."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200", "--id=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        lines = watcher.stdout
        reader = threading.Thread(target=lambda: busy.extend((time.time(), int(line)) for line in lines))
        reader.start()
        try:
            yield
        finally:
            watcher.terminate()
            reader.join()


def adapt(program: list[str], source: Path, target: Path, out: Path, flags: list[str]) -> float:
    """Seconds of a whole process."""
    start = time.time()
    command = [sys.executable, *program, "adapt", str(source), str(target), "--out", str(out), "--quiet", *flags]
    subprocess.run(command, check=True)
    return time.time() - start


def run(source: Path, target: Path, flags: list[str], arguments: Any, place: Path) -> dict[str, Any]:
    out = place / "run"
    flags = ["--cache", str(place / "cache"), "--device", arguments.device, *flags]
    busy: list[tuple[float, int]] = []
    with watched_gpu(busy) if arguments.device == "cuda" else nullcontext():
        seconds = adapt(["-m", "cdtrans"], source, target, out, flags)
    timings = read_timings(out)
    row: dict[str, Any] = {"s": seconds, "s in the process": seconds_of(timings, "session", "report")}
    for stage in ("source", "adaptation"):
        epochs = sum(t["stage"] == stage for t in timings)
        row |= {f"{stage} epochs": epochs, f"{stage} s": seconds_of(timings, stage)}
    row |= trust_seconds(timings)
    ends = [t["at"] for t in timings if t["stage"] == "adaptation"]
    if busy and ends:
        warm, end = ends[int(0.4 * len(ends))], ends[-1]  # the first epochs build kernels and capture
        shares = [share for when, share in busy if warm < when <= end]
        row["% busy, last 60 % of stage 2"] = sum(shares) / len(shares) if shares else float("nan")  # a short run
    return row


def read_timings(run: Path) -> list[dict[str, Any]]:
    return list(RunRecord(run).timings)


def trust_seconds(timings: list[dict[str, Any]]) -> dict[str, float]:
    stages = ("check", "evidence", "scores", "verdict", "report")
    return {f"{stage} s": seconds_of(timings, stage) for stage in stages}


def seconds_of(timings: list[dict[str, Any]], *stages: str) -> float:
    """The report is no part of its session's time."""
    return sum(float(t["seconds"]) for t in timings if t["stage"] in stages)


def task_parser(about: str) -> argparse.ArgumentParser:
    parser = measure.parser(about)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("flags", nargs="*")
    return parser


def task(arguments: Any, place: Path) -> tuple[Path, Path, list[str]]:
    """Source, target and flags: those given, or two epochs of the built-in task."""
    if arguments.source is not None:
        return arguments.source, arguments.target, arguments.flags
    digits = write_digits(place / "digits", seed=0, images=500)
    few = ["--recipe", "digits", "--source-epochs", "2", "--epochs", "2", "--no-guard"]
    return digits.source, digits.target, [*few, *arguments.flags]


def main() -> None:
    arguments = task_parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as place:
        source, target, flags = task(arguments, Path(place))
        row = run(source, target, flags, arguments, Path(place))
    measure.report("pipeline, cold cache", [row], arguments)


if __name__ == "__main__":
    main()
