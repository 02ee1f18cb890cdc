"""The rows of an ablation beside the paper's, as NAME.json and NAME.md."""

from dataclasses import asdict, dataclass
from typing import Any

from cdtrans.evaluation.paper_tables import AVERAGE, PaperRow
from cdtrans.evaluation.results import KINDS

NOTHING = "–"


@dataclass(frozen=True)
class Scored:
    """What a finished run came to, by the answer key."""

    scores: dict[str, dict[str, float]]  # kind -> accuracy and class-mean accuracy, from 0 to 1
    per_class: dict[str, float | None]  # of the label-free choice
    epochs: dict[str, int]  # kind -> the epoch it is
    images: int
    device: str
    seconds: float  # of `adapt`


@dataclass(frozen=True)
class Row:
    """A row of the paper's table, and the run that stands for it."""

    paper: PaperRow
    run: str | None  # None: nobody can run it yet
    settings: dict[str, Any]
    scored: Scored | None  # None: not finished

    def record(self) -> dict[str, Any]:
        return {
            "row": self.paper.method,
            "run": self.run,
            "settings": self.settings,
            **(asdict(self.scored) if self.scored else {}),
            "paper": self.paper.cells,
        }


@dataclass(frozen=True)
class AblationTable:
    """Everything that the page says."""

    name: str
    title: str
    named_by: tuple[str, ...]
    notes: tuple[str, ...]
    source: str
    target: str
    key: str
    backbone: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def unfinished(self) -> list[str]:
        return [row.run for row in self.rows if row.run is not None and row.scored is None]

    def record(self) -> dict[str, Any]:
        """NAME.json."""
        return {
            "ablation": self.name,
            **{name: getattr(self, name) for name in ("source", "target", "key", "backbone", "seed", "unfinished")},
            "rows": [row.record() for row in self.rows],
        }


def markdown(table: AblationTable) -> str:
    head = (*table.named_by, *KINDS.values(), "the paper (VisDA-2017)")
    rows = [head, ("---",) * len(head), *(_cells(row) for row in table.rows)]
    text = [f"# {table.title}", *_before(table), "\n".join(f"| {' | '.join(row)} |" for row in rows), *table.notes]
    return "\n\n".join([*text, *_cost(table)]) + "\n"


def _before(table: AblationTable) -> list[str]:
    lines = [
        f"{table.source} to {table.target}; {table.backbone}, seed {table.seed}, one run for each row. Percent:"
        " accuracy (class-mean accuracy); the paper's are class means.",
        f"Answer key: {table.key}. Every number of ours was scored with it, after training; the best epoch by target"
        " labels was also chosen with it. No row was trained with it.",
    ]
    if table.unfinished:
        runs = sum(row.run is not None for row in table.rows)
        lines.append(f"UNFINISHED: {len(table.unfinished)} of {runs} runs are missing: {', '.join(table.unfinished)}.")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    names = row.paper.method.split(" ")
    ours = [_score(row.scored.scores.get(kind)) if row.scored else NOTHING for kind in KINDS]
    return (*names, *ours, row.paper.cells[AVERAGE])


def _score(score: dict[str, float] | None) -> str:
    if score is None:  # the answer key is of other images than the run's target
        return NOTHING
    return f"{100 * score['accuracy']:.1f} ({100 * score['class_mean_accuracy']:.1f})"


def _cost(table: AblationTable) -> list[str]:
    scored = [row.scored for row in table.rows if row.scored]
    if not scored:
        return []
    devices = " and ".join(sorted({run.device for run in scored}))
    minutes = sum(run.seconds for run in scored) / 60
    return [f"Cost: {len(scored)} runs, {minutes:.1f} minutes in all, on {devices}."]
