"""The time a run took: its stages, the time between them, and the total."""

from dataclasses import dataclass
from typing import Any

from cdtrans.reporting.record import Record
from cdtrans.reporting.sections import Missing
from cdtrans.runtime.screen import clock

MINUTE = 60  # seconds
STAGES = {  # stages of timings.jsonl -> their names on the page
    "source": "Stage 1, source",
    "adaptation": "Stage 2, adaptation",
    "probe": "Stage 1, probe on frozen features",
    "check": "Check of the data",
    "evidence": "Evidence for the guard",
    "scores": "Label-free scores",
    "verdict": "Verdict",
    "report": "This page",
}


@dataclass(frozen=True)
class Cost:
    """A row of the table of costs."""

    stage: str
    seconds: float
    epochs: int = 0
    rate: float | None = None  # images per second

    @property
    def time(self) -> str:
        return clock(self.seconds) if self.seconds >= MINUTE else f"{self.seconds:.1f} s"


@dataclass(frozen=True)
class Costs:
    stages: tuple[Cost, ...]
    rest: Cost | None  # the time between the stages
    total: Cost | None  # None for an older run
    page: bool  # whether the time to write the page is included


def costs(record: Record) -> Costs | Missing:
    """Seconds by stage, between the stages, and in total."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for line in record.timings:
        stages.setdefault(str(line.get("stage", "other")), []).append(line)
    sessions = stages.pop("session", [])
    if not stages:
        return Missing("The run folder holds no timings.")
    rows = tuple(_cost(stage, lines) for stage, lines in stages.items())
    if not sessions:
        return Costs(rows, None, None, "report" in stages)
    timed = sum(row.seconds for row in rows)
    total = _seconds(sessions) + _seconds(_outside(record.timings, sessions))
    return Costs(rows, Cost("Between the stages", max(total - timed, 0.0)), Cost("Total", total), "report" in stages)


def _outside(timings: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines outside every session's time: the report, which is written after its session's line, and the stages of
    a killed session, which has no line of its own."""
    spans = [(float(line.get("at", 0)) - float(line.get("seconds", 0)), float(line.get("at", 0))) for line in sessions]
    return [line for line in timings if not any(a <= float(line.get("at", 0)) <= b for a, b in spans)]


def _cost(stage: str, lines: list[dict[str, Any]]) -> Cost:
    """The rate is over all epochs together, so that each epoch is weighted by its time."""
    rated = [line for line in lines if "images_per_second" in line]
    images = sum(float(line["images_per_second"]) * float(line.get("seconds", 0)) for line in rated)
    rate = images / max(_seconds(rated), 1e-9) if rated else None
    epochs = sum("epoch" in line for line in lines)
    return Cost(STAGES.get(stage, stage.capitalize()), _seconds(lines), epochs, rate)


def _seconds(lines: list[dict[str, Any]]) -> float:
    return sum(float(line.get("seconds", 0)) for line in lines)
