"""Shared parts of the benchmarks: warm up, repeat, median and spread; a table, and JSON with machine and versions."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

CEILING_SIZE = {"cuda": 8192, "cpu": 1024}  # rows of the square matrices whose product sets the ceiling


def parser(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, help="timed repetitions [20 on a GPU, 3 on CPU]")
    return parser


def timed(work: Callable[[], Any], device: str, repeats: int | None, warm_up: int = 3) -> dict[str, float]:
    """Seconds of `work`: the median and the smallest and largest of the repetitions."""
    repeats = repeats or (20 if device == "cuda" else 3)
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    return {"median": seconds[len(seconds) // 2], "least": seconds[0], "most": seconds[-1], "repeats": repeats}


def profile(work: Callable[[], Any], device: str, repeats: int = 5) -> None:
    """Print where the time of `work` goes: kernels on a GPU, operations on a CPU, the longest first."""
    activities = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(repeats):
            work()
        synchronise(device)
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    print(f"{repeats} times:", found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_ceiling(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product on random data: what the share of a benchmark is measured against."""
    n = CEILING_SIZE[device]
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    return float(2 * n**3 / timed(lambda: a @ b, device, None)["median"])


def machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
    }


def report(title: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the rows as a table and, if asked for, write them with the machine they were measured on."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*(_shown(row.get(name, "")) for name in names))
    Console(width=160).print(table)
    if arguments.json:
        settings = {k: str(v) for k, v in vars(arguments).items() if k != "json"}
        content = {"benchmark": title, "machine": machine(arguments.device), "arguments": settings, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
