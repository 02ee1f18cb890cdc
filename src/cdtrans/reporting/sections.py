"""The sections of the page that show numbers. Each is made from a run's record, or is a Missing with the reason."""

from dataclasses import dataclass
from math import isfinite
from shlex import quote

import numpy as np

from cdtrans.methods import method_class
from cdtrans.record import wording
from cdtrans.record.layout import Line
from cdtrans.record.outcome import Crowd, Measured, Scores
from cdtrans.record.probabilities import Kept, accuracy_by_share
from cdtrans.record.record import RunRecord

SHOWN_CLASSES = 40  # with more classes, only those that stand out are shown
SHOWN_CONFUSIONS = 12  # the most frequent ones, by name
MINUTE = 60  # seconds

# The scores of log.jsonl -> name and meaning, in the order of the page.
SCORES = {
    "consensus": ("Consensus", "the geometric mean of four scores; by default it selects the epoch"),
    "information": ("Information", "predictions are certain and varied"),
    "nuclear_norm": ("Nuclear norm", "predictions are certain and varied, measured differently"),
    "clusters": ("Clusters", "clusters of the features match the predicted classes"),
    "centers": ("Centres", "each image lies nearest to the centre of its own predicted class"),
    "confidence": ("Confidence", "predictions are certain; also high after a collapse into one class"),
    "diversity": ("Diversity", "all classes get equal probability on average; predictions may still be of one class"),
    "density": ("Neighbourhood density", "images agree with their neighbours; also high after a collapse"),
    "holdout": ("Held-out source", "accuracy on held-out source images"),
}
LOSSES = {
    "loss_source": ("Loss, source branch", "cross-entropy on the source's labels"),
    "loss_target": ("Loss, target branch", "cross-entropy on the target's pseudo-labels"),
    "loss_distillation": ("Loss, distillation", "the target branch learns from the source-target branch"),
    "loss_divergence": ("Loss, model regularisation", "the penalty of MRKLD+LRENT for certain predictions"),
    "loss_source_target": ("Loss, source-target branch", "cross-entropy on the source's labels"),
}
NOT_LOSSES = ("event", "stage", "epoch", "lr", "pairs")  # other keys of an epoch's line in the log
AGREEMENTS = {  # agreements of nearest neighbours in a round's line of the log -> their columns
    "source_agreement": "source agreement",
    "target_agreement": "target agreement",
    "source_accuracy": "accuracy on source",
}
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
class Missing:
    """A section without content, and why."""

    why: str


@dataclass(frozen=True)
class Facts:
    """The size of the run."""

    source: int  # images
    held_out: int
    target: int
    classes: tuple[str, ...]
    epochs: int


def facts(record: RunRecord) -> Facts:
    images, data = record.images.paths, record.data.source
    return Facts(data.images, data.held_out, len(images["target"]), record.classes, record.config.epochs)


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
    return (SCORES | LOSSES).get(name, (name.replace("_", " ").capitalize(), ""))


# Label-free scores


@dataclass(frozen=True)
class Score:
    """One label-free score before and, if there is an adapted model, after adaptation."""

    name: str
    meaning: str
    before: float
    after: float | None


def scores(record: RunRecord) -> tuple[Score, ...] | Missing:
    by_epoch, adapted = scores_by_epoch(record), record.outcome.adapted_epoch
    before, after = by_epoch.get(0), by_epoch.get(adapted)
    if before is None or after is None:
        return Missing("This run has no label-free scores.")
    return tuple(
        Score(*heading_of(name), before[name], after[name] if adapted else None)
        for name in SCORES
        if name in before and name in after
    )


def scores_by_epoch(record: RunRecord) -> dict[int, dict[str, float]]:
    lines = record.events("scores")
    return {int(line["epoch"]): {name: float(line[name]) for name in SCORES if name in line} for line in lines}


def trade_off(record: RunRecord) -> tuple[Kept, ...] | Missing:
    """The expected accuracy of the most confident part of the labels."""
    if record.outcome.estimate is None and record.calibrated_with() != "labels":
        return Missing("The accuracy is unknown without labels, and so is what the probabilities mean.")
    return accuracy_by_share(record.confidences())


# Classes


@dataclass(frozen=True)
class ClassShare:
    """The share of a class among the images: labelled in the source, predicted in the target. Without an adapted model
    `after` equals `before`."""

    name: str
    source: float
    before: float
    after: float


@dataclass(frozen=True)
class Histogram:
    FIRST = 12  # classes that are not folded

    rows: tuple[ClassShare, ...]  # the class that differs most from the source first
    classes: int  # in all
    crowds: dict[str, Crowd]  # by model, 'source' and 'adapted', if it puts most images into one class

    @property
    def largest(self) -> float:
        return max(max(r.source, r.before, r.after) for r in self.rows)

    def crowded(self, model: str, name: str) -> bool:
        return model in self.crowds and self.crowds[model].label == name


def histogram(record: RunRecord) -> Histogram | Missing:

    classes, counts = record.classes, record.data.source.classes
    source = np.array([counts.get(name, 0) for name in classes])
    if not source.any():
        return Missing("There are no source images to compare the predictions' class shares with.")
    predicted = {"source": np.bincount(record.views.target_before, minlength=len(classes))}
    if record.outcome.adapted_epoch:
        predicted["adapted"] = np.bincount(record.views.target_after, minlength=len(classes))
    shares = [x / max(x.sum(), 1) for x in (source, predicted["source"], predicted.get("adapted", predicted["source"]))]
    distance = np.abs(shares[1:] - shares[0]).max(axis=0)
    order = np.argsort(-distance, kind="stable")[:SHOWN_CLASSES].tolist()
    rows = tuple(ClassShare(classes[k], *(float(s[k]) for s in shares)) for k in order)
    crowded = {model: Crowd.of(count.tolist(), source.tolist(), classes) for model, count in predicted.items()}
    return Histogram(rows, len(classes), {model: crowd for model, crowd in crowded.items() if crowd})


# Pairs


@dataclass(frozen=True)
class RoundCount:
    number: int
    epoch: int  # epoch before which the pairs were searched
    proposed: int
    kept: int
    used: tuple[int, ...]  # source images, target images and classes of the pairs
    agreements: tuple[float, ...]


@dataclass(frozen=True)
class ClassCount:
    """A class's pairs in every round, by the source image's class."""

    name: str
    kept: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class PairCounts:
    rounds: tuple[RoundCount, ...]
    agreements: tuple[str, ...]  # their columns; none without source images
    by_class: tuple[ClassCount, ...]
    classes: int  # in all; by_class has those that lose most

    @property
    def largest(self) -> int:
        return max((k + r for row in self.by_class for k, r in zip(row.kept, row.rejected, strict=True)), default=1)


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
    counts = tuple(
        RoundCount(
            number=number,
            epoch=int(lines[number]["epoch"]),
            proposed=int(lines[number]["proposed"]),
            kept=int(r.kept.sum()),
            used=tuple(int(lines[number][name]) for name in ("sources_used", "targets_used", "classes_used")),
            agreements=tuple(float(lines[number][name]) for name in agreements),
        )
        for number, r in rounds.items()
    )
    kept, rejected = (
        np.stack([np.bincount(r.source_labels[r.kept == state], minlength=len(names)) for r in rounds.values()], axis=1)
        for state in (True, False)
    )  # [K, rounds]
    loss = rejected[:, -1] / np.maximum(kept[:, -1] + rejected[:, -1], 1)
    most = sorted(np.argsort(-loss, kind="stable")[:SHOWN_CLASSES].tolist())
    by_class = tuple(ClassCount(names[k], tuple(kept[k].tolist()), tuple(rejected[k].tolist())) for k in most)
    return PairCounts(counts, tuple(AGREEMENTS[name] for name in agreements), by_class, len(names))


# Target labels


@dataclass(frozen=True)
class Labelled:
    """The results with target labels, of the chosen model."""

    MATRIX_CLASSES = 40  # a confusion matrix of more classes is too large to read

    measured: Measured
    scores: Scores
    compared: str  # both models beside each other, in a sentence; empty without both
    command: str  # the command that chooses the better model, if it is not chosen
    curve: Curve | None
    confusions: tuple[tuple[str, str, int], ...]  # true class, predicted class, images: the most frequent
    calibration: bool  # whether the calibration is the chosen model's

    @property
    def classes(self) -> list[tuple[str, int, float | None]]:
        """Name, images and accuracy of every class."""
        scores = self.scores
        return list(zip(self.measured.classes, scores.images, scores.per_class, strict=True))


def labelled(record: RunRecord) -> Labelled | Missing:
    measured, outcome = record.measured, record.outcome
    chosen = outcome.choice.model
    if measured is None or chosen not in measured.models:
        run = quote(str(record.folder))
        return Missing(f"No target labels were given. To measure the accuracy: cdtrans eval {run} LABELLED")
    scores, compared = measured.models[chosen], measured.comparison
    confusion = np.array(scores.confusion)  # [K, K]
    wrong = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    order = [np.unravel_index(i, wrong.shape) for i in np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]]
    names = measured.classes
    use = "which training used" if outcome.trained_with_labels else "which neither training nor selection used"
    drawn = curve(
        {epoch: s.accuracy for epoch, s in enumerate(measured.epochs)}, ("True accuracy", f"by labels, {use}"), record
    )
    mistaken = compared is not None and compared.better in ("source", "adapted") and compared.better != chosen
    return Labelled(
        measured=measured,
        scores=scores,
        compared=wording.comparison(measured, outcome, record.folder),
        command=wording.choose_command(record.folder, compared.better) if compared and mistaken else "",
        curve=drawn if len(drawn.epochs) > 1 else None,
        confusions=tuple((names[i], names[j], int(wrong[i, j])) for i, j in order if wrong[i, j]),
        calibration=bool(measured.calibration) and measured.model == chosen,
    )


# Costs


@dataclass(frozen=True)
class Cost:
    """A row of the table of costs."""

    stage: str
    seconds: float
    epochs: int = 0
    rate: float | None = None  # images per second

    @property
    def time(self) -> str:
        minutes, seconds = divmod(round(self.seconds), MINUTE)
        return f"{minutes}:{seconds:02}" if minutes else f"{self.seconds:.1f} s"


@dataclass(frozen=True)
class Costs:
    stages: tuple[Cost, ...]
    rest: Cost  # the time between the stages
    total: Cost
    page: bool  # whether the time to write the page is included


def costs(record: RunRecord) -> Costs | Missing:
    """Seconds by stage, between the stages, and in total."""
    stages: dict[str, list[Line]] = {}
    for line in record.timings:
        stages.setdefault(line["stage"], []).append(line)
    sessions = stages.pop("session", [])
    if not stages or not sessions:
        return Missing("The run folder holds no timings.")
    rows = tuple(cost(stage, lines) for stage, lines in stages.items())
    spans = [(line["at"] - line["seconds"], line["at"]) for line in sessions]
    # The report is written after its session's line, and a killed session has no line.
    outside = [line for line in record.timings if not any(start <= line["at"] <= end for start, end in spans)]
    total = sum(float(line["seconds"]) for line in [*sessions, *outside])
    rest = max(total - sum(row.seconds for row in rows), 0.0)
    return Costs(rows, Cost("Between the stages", rest), Cost("Total", total), "report" in stages)


def cost(stage: str, lines: list[Line]) -> Cost:
    """The rate is over all epochs together, so that each epoch is weighted by its time."""
    rated = [line for line in lines if "images_per_second" in line]
    images = sum(line["images_per_second"] * line["seconds"] for line in rated)
    rate = images / max(sum(line["seconds"] for line in rated), 1e-9) if rated else None
    seconds = sum(float(line["seconds"]) for line in lines)
    return Cost(STAGES.get(stage, stage.capitalize()), seconds, sum("epoch" in line for line in lines), rate)
