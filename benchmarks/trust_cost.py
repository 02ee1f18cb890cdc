"""The time that trust adds to `cdtrans adapt`: whole processes with it and without it (without_trust.py), in turn,
after one that fills the caches; or with `--cold`, each with caches of its own. Evidence and verdict cannot be left out,
so their time is taken off afterwards.

usage: python benchmarks/trust_cost.py [--source DIR --target DIR] [--repeats 3] [--cold] [--json FILE] [-- flags]
Without folders: two epochs of the built-in task."""

import os
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline import adapt, read_timings, task, task_parser, trust_seconds

import measure

REPEATS = 3
HERE = Path(__file__).parent
PROGRAMS = {"with": ["-m", "cdtrans"], "without": [str(HERE / "without_trust.py")]}
EXTRA: dict[str, list[str]] = {"with": [], "without": ["--no-report", "--no-guard", "--select", "last"]}


def compare(source: Path, target: Path, flags: list[str], arguments: Any, place: Path) -> list[dict[str, Any]]:
    rows = []
    order = [("with", -1)]
    order += [(kind, n) for n in range(arguments.repeats or REPEATS) for kind in PROGRAMS]
    for kind, n in order:
        caches = place / (f"caches-{kind}-{n}" if arguments.cold else "caches")
        os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")
        all_flags = ["--cache", str(caches / "pixels"), "--device", arguments.device, *flags, *EXTRA[kind]]
        out = place / f"{kind}-{n}"
        seconds = adapt(PROGRAMS[kind], source, target, out, all_flags)
        print(f"{kind} trust: {seconds:.2f} s" + (", not counted" if n < 0 else ""), flush=True)
        if n >= 0:
            rows.append({"trust": kind, "s": seconds, **trust_seconds(read_timings(out))})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean of each kind, and the difference as a share of the time without."""
    times = {
        "with": [row["s"] for row in rows if row["trust"] == "with"],
        "without": [row["s"] - row["evidence s"] - row["verdict s"] for row in rows if row["trust"] == "without"],
    }
    added = mean(times["with"]) - mean(times["without"])
    spread = {kind: stdev(found) if len(found) > 1 else float("nan") for kind, found in times.items()}
    means = [{"trust": f"{kind}, mean", "s": mean(times[kind]), "± s": spread[kind]} for kind in PROGRAMS]
    return [*means, {"trust": "added", "s": added, "± s": "", "%": 100 * added / mean(times["without"])}]


def main() -> None:
    parser = task_parser(__doc__ or "")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = compare(*task(arguments, Path(place)), arguments, Path(place))
    measure.report("what trust adds", rows + summary(rows), arguments)


if __name__ == "__main__":
    main()
