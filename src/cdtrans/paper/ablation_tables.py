"""The rows of an ablation beside the paper's, as NAME.json and NAME.md."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cdtrans.errors import counted
from cdtrans.paper.pair_quality import PairQuality
from cdtrans.paper.printed_tables import AVERAGE, PaperRow
from cdtrans.studies.results import KINDS, shared_stage_1

NOTHING = "–"
PAPER_PAIRS = ("Rec_s", "Rec_t", "Prec")  # Table 5's columns about the pairs


@dataclass(frozen=True)
class Scored:
    """The scores of a finished run, by target labels."""

    scores: dict[str, dict[str, float]]  # kind -> accuracy and class-mean accuracy, from 0 to 1
    per_class: dict[str, float | None]  # of the label-free choice
    epochs: dict[str, int]  # kind -> the epoch it is
    images: int  # that are labelled, and
    target_images: int  # all that the run had
    device: str
    seconds: float  # of `adapt`
    stage_1: str  # the run that trained it, and has it in its seconds


@dataclass(frozen=True)
class Row:
    """A row of the paper's table, and the run that stands for it."""

    paper: PaperRow
    run: str
    settings: dict[str, Any]
    scored: Scored | None  # None: not finished
    pairs: tuple[PairQuality, ...] = ()  # of every round, where the pairs are what it is about
    with_key: bool = False  # whether it was trained with target labels

    def record(self) -> dict[str, Any]:
        return {
            "row": self.paper.method,
            "run": self.run,
            "settings": self.settings,
            "trained_with_key": self.with_key,
            **(asdict(self.scored) if self.scored else {}),
            **({"pairs": [asdict(quality) for quality in self.pairs]} if self.pairs else {}),
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
    about_pairs: bool
    rows: tuple[Row, ...]

    @property
    def unfinished(self) -> list[str]:
        return [row.run for row in self.rows if row.scored is None]

    def record(self) -> dict[str, Any]:
        """NAME.json."""
        return {
            "ablation": self.name,
            **{name: getattr(self, name) for name in ("source", "target", "key", "backbone", "seed", "unfinished")},
            "rows": [row.record() for row in self.rows],
        }


def markdown(table: AblationTable) -> str:
    pairs = PAPER_PAIRS if table.about_pairs else ()
    head = (*table.named_by, *pairs, *KINDS.values(), *(f"paper's {name}" for name in pairs), "paper (VisDA-2017)")
    rows = [head, ("---",) * len(head), *(_cells(row, table) for row in table.rows)]
    text = [f"# {table.title}", *_before(table), "\n".join(f"| {' | '.join(row)} |" for row in rows), *table.notes]
    return "\n\n".join([*text, *_cost(table)]) + "\n"


def _before(table: AblationTable) -> list[str]:
    labelled = [row.paper.method for row in table.rows if row.with_key]
    trained = (
        f"{' and '.join(labelled)} was also trained with them, no other row was."
        if labelled
        else "No row was trained with them."
    )
    lines = [
        f"{table.source} to {table.target}; {table.backbone}, seed {table.seed}, one run for each row. Percent:"
        " accuracy (class-mean accuracy); the paper's are class means.",
        f"Target labels: {table.key}. Every number of ours was scored with them, after training; the best epoch by"
        f" target labels was also chosen with them. {trained}",
    ]
    lines += scored_images([row.scored for row in table.rows if row.scored])
    if table.unfinished:
        lines.append(
            f"UNFINISHED: {len(table.unfinished)} of {len(table.rows)} runs are missing: {', '.join(table.unfinished)}."
        )
    return lines


def scored_images(scored: Sequence[Scored]) -> list[str]:
    """A key may name a part of the target: then the scores are that part's."""
    counts = dict.fromkeys((run.images, run.target_images) for run in scored)
    return [f"Scored on {images} of the target's {of} images." for images, of in counts]


def _cells(row: Row, table: AblationTable) -> tuple[str, ...]:
    names = row.paper.method.split(" ") if len(table.named_by) > 1 else [row.paper.method]
    ours = [_score(row.scored.scores.get(kind)) if row.scored else NOTHING for kind in KINDS]
    if not table.about_pairs:
        return (*names, *ours, row.paper.cells[AVERAGE])
    last = row.pairs[-1] if row.pairs else None
    shares = (last.recall_source, last.recall_target, last.precision) if last else (None,) * len(PAPER_PAIRS)
    pairs = [NOTHING if share is None else f"{100 * share:.1f}" for share in shares]
    return (*names, *pairs, *ours, *(row.paper.cells[name] for name in (*PAPER_PAIRS, AVERAGE)))


def _score(score: dict[str, float] | None) -> str:
    if score is None:  # the guard ended the run before stage 2
        return NOTHING
    return f"{100 * score['accuracy']:.1f} ({100 * score['class_mean_accuracy']:.1f})"


def _cost(table: AblationTable) -> list[str]:
    scored = [row.scored for row in table.rows if row.scored]
    if not scored:
        return []
    devices = " and ".join(sorted({run.device for run in scored}))
    minutes = sum(run.seconds for run in scored) / 60
    cost = f"Cost: {counted(len(scored), 'run')}, {minutes:.1f} minutes in all, on {devices}."
    return [cost, shared_stage_1({row.run: row.scored.stage_1 for row in table.rows if row.scored})]
