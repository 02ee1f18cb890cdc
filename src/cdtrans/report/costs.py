"""What a run took: its stages, what lies between them, and a total."""

from dataclasses import dataclass
from typing import Any

from cdtrans.report.record import Record
from cdtrans.report.sections import Missing
from cdtrans.training.reporting import clock

MINUTE = 60  # seconds
STAGES = {  # what the stages of timings.jsonl are called on the page
    "source": "Stage 1, source",
    "adaptation": "Stage 2, adaptation",
    "check": "Check of the data",
    "scores": "Label-free scores",
    "report": "This page",
}


@dataclass(frozen=True)
class Cost:
    """A row of the table of costs."""

    stage: str
    seconds: float
    epochs: int = 0
    rate: float | None = None  # images per second of its epochs

    @property
    def time(self) -> str:
        return clock(self.seconds) if self.seconds >= MINUTE else f"{self.seconds:.1f} s"


@dataclass(frozen=True)
class Costs:
    stages: tuple[Cost, ...]
    rest: Cost | None  # what lies between the stages
    total: Cost | None  # of all of them; an older run may not know
    page: bool  # whether writing the page is among them


def costs(record: Record) -> Costs | Missing:
    """Seconds by stage, what lies between them, and their sum."""
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
    return Costs(rows, Cost("All between them", max(total - timed, 0.0)), Cost("Together", total), "report" in stages)


def _outside(timings: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that no session's time includes: the report, which is written after its session's line, and what a
    session timed that was killed, and so has no line of its own."""
    spans = [(float(line.get("at", 0)) - float(line.get("seconds", 0)), float(line.get("at", 0))) for line in sessions]
    return [line for line in timings if not any(a <= float(line.get("at", 0)) <= b for a, b in spans)]


def _cost(stage: str, lines: list[dict[str, Any]]) -> Cost:
    """The rate is that of all its epochs together, so that a slow one counts for as long as it took."""
    rated = [line for line in lines if "images_per_second" in line]
    images = sum(float(line["images_per_second"]) * float(line.get("seconds", 0)) for line in rated)
    rate = images / max(_seconds(rated), 1e-9) if rated else None
    epochs = sum("epoch" in line for line in lines)
    return Cost(STAGES.get(stage, stage.capitalize()), _seconds(lines), epochs, rate)


def _seconds(lines: list[dict[str, Any]]) -> float:
    return sum(float(line.get("seconds", 0)) for line in lines)
