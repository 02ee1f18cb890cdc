"""The sections of the page that show numbers. Each is made from a run's record, or is a Missing with the reason."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import yaml

from cdtrans.methods import method_class
from cdtrans.record import wording
from cdtrans.record.layout import Line
from cdtrans.record.outcome import Crowd
from cdtrans.record.record import RunRecord

SHOWN_CLASSES = 40  # with more classes, only those that stand out are shown
SHOWN_CONFUSIONS = 12  # the most frequent ones, by name
MATRIX_CLASSES = 40  # a confusion matrix of more classes is too large to read

NOT_LOSSES = ("event", "stage", "epoch", "lr", "pairs")  # other keys of an epoch's line in the log
# Names and meanings of what a run logs, in the order of the page.
LOGGED = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
SCORES, LOSSES, USED, AGREEMENTS, STAGES = (
    LOGGED[kind] for kind in ("scores", "losses", "used", "agreements", "stages")
)


@dataclass(frozen=True)
class Missing:
    """A section without content, and why."""

    why: str


class TextTable(NamedTuple):
    """A table of the page; the first cell of a row is its heading."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def run_size(record: RunRecord) -> dict[str, Any]:
    """Images of each domain, classes and epochs."""
    images, data = record.images.paths, record.data.source
    counts = {"source": data.images, "held_out": data.held_out, "target": len(images["target"])}
    return counts | {"classes": record.classes, "epochs": record.config.epochs}


# Curves


@dataclass(frozen=True)
class Curve:
    """A number over the epochs, drawn in a box of WIDTH by HEIGHT."""

    WIDTH, HEIGHT = 300, 96

    name: str
    meaning: str
    epochs: tuple[int, ...]
    values: tuple[float, ...]
    chosen: int | None  # the epoch to mark

    def x(self, epoch: int) -> float:
        first, last = self.epochs[0], self.epochs[-1]
        return round(self.WIDTH * (epoch - first) / max(last - first, 1), 1)

    def y(self, value: float) -> float:
        low, high = min(self.values), max(self.values)
        return round(self.HEIGHT * (1 - (value - low) / (high - low)) if high > low else self.HEIGHT / 2, 1)

    @property
    def points(self) -> str:
        return " ".join(f"{self.x(e)},{self.y(v)}" for e, v in zip(self.epochs, self.values, strict=True))

    @property
    def mark(self) -> tuple[float, float, float] | None:
        """Position and value of the chosen epoch."""
        if self.chosen not in self.epochs:
            return None
        value = self.values[self.epochs.index(self.chosen)]
        return self.x(self.chosen), self.y(value), value


def curve(values: dict[int, float], heading: tuple[str, str], record: RunRecord) -> Curve:
    """A number by epoch."""
    finite = {epoch: values[epoch] for epoch in sorted(values) if isfinite(values[epoch])}  # a run may have diverged
    return Curve(*heading, tuple(finite), tuple(finite.values()), record.outcome.choice.epoch)


def selection_curve(record: RunRecord) -> Curve | Missing:
    """The score that chose the epoch; the other scores are in log.jsonl."""
    if not record.outcome.adapted_epoch:
        return Missing("The run ended before the first epoch of adaptation, so there are no curves.")
    rule = record.outcome.selection
    name = rule if rule in SCORES else "consensus"
    values = {epoch: scored[name] for epoch, scored in scores_by_epoch(record).items() if name in scored}
    drawn = curve(values, heading_of(name), record)
    return drawn if len(drawn.epochs) > 1 else Missing("Only one epoch has scores, too few for a curve.")


def loss_curves(record: RunRecord) -> tuple[Curve, ...] | Missing:
    lines = {int(line["epoch"]): line for line in record.events("epoch") if line["stage"] == "adaptation"}
    if not lines:
        return Missing("The log has no epoch of adaptation.")
    logged = dict.fromkeys(name for line in lines.values() for name in line if name not in NOT_LOSSES)
    names = [name for name in LOSSES if name in logged] + [name for name in logged if name not in LOSSES]
    curves = [
        curve({e: float(line[name]) for e, line in lines.items() if name in line}, heading_of(name), record)
        for name in names
    ]
    return tuple(c for c in curves if len(c.epochs) > 1) or Missing(
        "Only one epoch has losses, too few for a curve; they are in log.jsonl."
    )


def heading_of(name: str) -> tuple[str, str]:
    """Name and meaning of a score or a loss."""
    heading, meaning = (SCORES | LOSSES).get(name, (name.replace("_", " ").capitalize(), ""))
    return heading, meaning


# Label-free scores


def scores(record: RunRecord) -> tuple[tuple[str, str, float, float | None], ...] | Missing:
    """Name, meaning and value of each score before and, if there is an adapted model, after adaptation."""
    by_epoch, adapted = scores_by_epoch(record), record.outcome.adapted_epoch
    before, after = by_epoch.get(0), by_epoch.get(adapted)
    if before is None or after is None:
        return Missing("This run has no label-free scores.")
    shared = [name for name in SCORES if name in before and name in after]
    return tuple((*SCORES[name], before[name], after[name] if adapted else None) for name in shared)


def scores_by_epoch(record: RunRecord) -> dict[int, dict[str, float]]:
    lines = record.events("scores")
    return {int(line["epoch"]): {name: float(line[name]) for name in SCORES if name in line} for line in lines}


def confident_labels(record: RunRecord) -> TextTable | Missing:
    """The expected accuracy of the most confident part of the labels."""
    if record.outcome.estimate is None and record.calibrated_with() != "labels":
        return Missing("The accuracy is unknown without labels, and so is what the probabilities mean.")
    rows = (
        (f"the most confident {k.share:.0%}", f"{k.accuracy:.0%}", f"{k.threshold:.3f} and more")
        if k.threshold
        else ("all", f"{k.accuracy:.0%}", "")
        for k in record.accuracy_by_share()
    )
    return TextTable(("Labels kept", "expected right", "probability"), tuple(rows))


# Classes


class Histogram(NamedTuple):
    """The shares of the classes: labelled in the source, predicted in the target."""

    rows: tuple[tuple[str, tuple[float, ...]], ...]  # the class that differs most from the source first
    classes: int  # in all
    crowds: dict[str, Crowd]  # by model, 'source' and 'adapted', if it puts most images into one class


def histogram(record: RunRecord) -> Histogram | Missing:
    """The shares in the source, by the source-only model and, if there is one, by the adapted model."""
    classes, counts = record.classes, record.data.source.classes
    source = np.array([counts.get(name, 0) for name in classes])
    if not source.any():
        return Missing("There are no source images to compare the predictions' class shares with.")
    predicted = {"source": np.bincount(record.views.target_before, minlength=len(classes))}
    if record.outcome.adapted_epoch:
        predicted["adapted"] = np.bincount(record.views.target_after, minlength=len(classes))
    shares = np.stack([x / max(x.sum(), 1) for x in (source, *predicted.values())])
    order = np.argsort(-np.abs(shares[1:] - shares[0]).max(axis=0), kind="stable")[:SHOWN_CLASSES]
    rows = tuple((classes[k], tuple(shares[:, k].tolist())) for k in order)
    crowded = {model: Crowd.of(count.tolist(), source.tolist(), classes) for model, count in predicted.items()}
    return Histogram(rows, len(classes), {model: crowd for model, crowd in crowded.items() if crowd})


# Pairs


class PairCounts(NamedTuple):
    rounds: TextTable
    agreements: bool  # whether the table has agreements; not without source images
    by_class: tuple[tuple[str, list[int], list[int]], ...]  # kept and rejected in every round, by source class
    most: int  # the largest number of pairs of a class in a round
    classes: int  # in all; by_class has those that lose most


def pairs_meaning(record: RunRecord) -> str:
    """Why the two images of a pair belong together; empty if they need not."""
    if record.outcome.trained_with_labels:
        return "The pairs were made with target labels."
    return method_class(record.config.method).pairs_mean


def about_pairs(record: RunRecord) -> str:
    """The meaning of a pair in this run."""
    name = record.config.method
    if meaning := pairs_meaning(record):
        return meaning
    if not method_class(name).needs_source:
        return f"The method '{name}' trains on every target image; no source image takes part."
    return (
        f"The table counts the images of each domain that a round uses. The method '{name}' trains on source and "
        "target images side by side; the two of a pair need not belong together."
    )


def pair_counts(record: RunRecord) -> PairCounts | Missing:
    rounds, names = record.rounds, record.classes
    if not rounds:
        return Missing("The run folder has no pairs.")
    lines = {line["round"]: line for line in record.events("pairs")}
    agreements = [name for name in AGREEMENTS if name in lines[max(rounds)]]
    rows = []
    for number, r in rounds.items():
        line, kept = lines[number], int(r.kept.sum())
        proposed = int(line["proposed"])
        counts = (f"{count:,}" for count in (line["epoch"], proposed, kept, proposed - kept))
        used = (f"{line[name]:,}" for name in USED)
        agreed = (f"{line[name]:.0%}" for name in agreements)
        rows.append((str(number), *counts, f"{kept / max(proposed, 1):.1%}", *used, *agreed))
    held, lost = (
        np.stack([np.bincount(r.source_labels[r.kept == state], minlength=len(names)) for r in rounds.values()], axis=1)
        for state in (True, False)
    )  # [K, rounds]
    loss = lost[:, -1] / np.maximum(held[:, -1] + lost[:, -1], 1)
    losing = sorted(np.argsort(-loss, kind="stable")[:SHOWN_CLASSES].tolist())
    by_class = tuple((names[k], held[k].tolist(), lost[k].tolist()) for k in losing)
    columns = ("Round", "from epoch", "proposed", "kept", "rejected", "share kept", *USED.values())
    table = TextTable((*columns, *(AGREEMENTS[name] for name in agreements)), tuple(rows))
    return PairCounts(table, bool(agreements), by_class, max(int((held + lost)[losing].max()), 1), len(names))


# Target labels


def label_results(record: RunRecord) -> dict[str, Any] | Missing:
    """The results with target labels, of the chosen model."""
    measured, outcome = record.measured, record.outcome
    chosen = outcome.choice.model
    if measured is None or chosen not in measured.models:
        run = quote(str(record.folder))
        return Missing(f"No target labels were given. To measure the accuracy: cdtrans eval {run} LABELLED")
    scores, compared, names = measured.models[chosen], measured.comparison, measured.classes
    wrong = np.array(scores.confusion)  # [K, K]
    np.fill_diagonal(wrong, 0)
    order = [np.unravel_index(i, wrong.shape) for i in np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]]
    use = "which training used" if outcome.trained_with_labels else "which neither training nor selection used"
    by_epoch = {epoch: s.accuracy for epoch, s in enumerate(measured.epochs)}
    mistaken = compared is not None and compared.better in ("source", "adapted") and compared.better != chosen
    return {
        "measured": measured,
        "scores": scores,
        "compared": wording.comparison(measured, outcome, record.folder),
        "command": wording.choose_command(record.folder, compared.better) if compared and mistaken else "",
        "curve": curve(by_epoch, ("True accuracy", f"by labels, {use}"), record) if len(by_epoch) > 1 else None,
        "classes": list(zip(names, scores.images, scores.per_class, strict=True)),
        "matrix": len(names) <= MATRIX_CLASSES,
        "confusions": [(names[i], names[j], int(wrong[i, j])) for i, j in order if wrong[i, j]],
        "calibration": bool(measured.calibration) and measured.model == chosen,
    }


# Costs


def stage_times(record: RunRecord) -> TextTable | Missing:
    """Time by stage, between the stages, and in total."""
    stages: dict[str, list[Line]] = {}
    for line in record.timings:
        stages.setdefault(line["stage"], []).append(line)
    sessions = stages.pop("session", [])
    if not stages or not sessions:
        return Missing("The run folder holds no timings.")
    spans = [(line["at"] - line["seconds"], line["at"]) for line in sessions]
    # The report is written after its session's line, and a killed session has no line.
    outside = [line for line in record.timings if not any(start <= line["at"] <= end for start, end in spans)]
    total, rows = seconds([*sessions, *outside]), []
    for stage, lines in stages.items():
        epochs = sum("epoch" in line for line in lines)
        rows.append((STAGES.get(stage, stage.capitalize()), str(epochs or ""), speed(lines), duration(seconds(lines))))
    rest = max(total - sum(map(seconds, stages.values())), 0.0)
    rows += [("Between the stages", "", "", duration(rest)), ("Total", "", "", duration(total))]
    return TextTable(("Stage", "epochs", "images per second", "time"), tuple(rows))


def seconds(lines: list[Line]) -> float:
    return sum(float(line["seconds"]) for line in lines)


def speed(lines: list[Line]) -> str:
    """Images per second over all epochs together, so that each epoch is weighted by its time."""
    rated = [line for line in lines if "images_per_second" in line]
    images = sum(line["images_per_second"] * line["seconds"] for line in rated)
    return f"{images / max(seconds(rated), 1e-9):,.0f}" if rated else ""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes else f"{seconds:.1f} s"
