"""The outcome of a run: decided once, from numbers, and kept in result.json. Its sentences are in `wording`.

    verdict     whether the adapted model is better than the source-only one, by measures that need no target label
    estimates   a range for each model's accuracy on the target, without labels; None if there can be none
    choice      the model that the run uses, by the run itself or by a person (`cdtrans choose`)

What target labels show of the models is `Measured`; it is known later, in other files, and replaces the estimate
wherever both are shown."""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Literal

from cdtrans.errors import counted
from cdtrans.runtime.screen import html_table

ModelName = Literal["source", "adapted"]  # the models that a run can choose: their folders
NO_CLASS = "none of these classes"  # the label of an image that belongs to no class of the run


@dataclass(frozen=True)
class Measure:
    """One measure of the guard."""

    code: str  # the problem that it detects, a key of `wording.MEASURES`
    value: float
    limit: float  # a healthy run is not below it
    decisive: bool = False  # whether it is harm by itself
    numbers: dict[str, float] = field(default_factory=dict)  # further numbers that its sentence names
    cause: str = ""  # the reason why training broke off, in words

    @property
    def harm(self) -> bool:
        return self.value < self.limit


@dataclass(frozen=True)
class Setback:
    """Training that went wrong after the chosen epoch."""

    consensus: float  # consensus of the label-free scores in the chosen epoch
    lowest: float  # in a later one


MOST = 0.5  # share of the images in one class, above which most of a target of several classes must be wrong
TIMES_FAIR = 3.0  # ... and so many times the class's fair share: two or three classes may well be this uneven


@dataclass(frozen=True)
class Crowd:
    """A class into which a model puts most target images, so that most of them must be wrong."""

    label: str
    share: float

    @classmethod
    def of(cls, predicted: Sequence[int], source: Sequence[int], classes: Sequence[str]) -> "Crowd | None":
        """[K] images predicted as each class, and [K] source images of each class."""
        k = max(range(len(predicted)), key=lambda k: predicted[k])
        share, fair = predicted[k] / max(sum(predicted), 1), max(1 / len(predicted), source[k] / max(sum(source), 1))
        return cls(classes[k], share) if share > MOST and share > TIMES_FAIR * fair else None


@dataclass(frozen=True)
class Verdict:
    """The guard's conclusion from its measures."""

    kind: Literal["better", "unknown", "harm"]
    measures: tuple[Measure, ...]

    @property
    def findings(self) -> tuple[Measure, ...]:
        """The measures that speak against the adapted model."""
        return tuple(measure for measure in self.measures if measure.harm)


@dataclass(frozen=True)
class Interval:
    """A range for an accuracy: an estimate without labels, or the 95% interval of a measured one."""

    low: float
    high: float

    def around(self, accuracy: float) -> str:
        """81.0% (60.0 to 92.3)"""
        return f"{accuracy:.1%} ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True)
class Choice:
    """The model that the run uses."""

    model: ModelName
    epoch: int  # epoch of adaptation; 0 for the source-only model
    by: Literal["run", "person"] = "run"


@dataclass(frozen=True)
class Support:
    """Agreement of one model's predictions with the labels of the nearest source images, see `trust.support`."""

    first: float  # with the nearest image alone
    mean: float  # with the nearest ten
    shift: float  # total variation between the class shares of the predictions and those of the source


@dataclass(frozen=True)
class Basis:
    """The numbers behind verdict and estimates."""

    features: Literal["pretrained", "source-only"]  # origin of the fixed features
    agreement: float  # agreement of the reference labels with their first probe
    steady: float  # share of an image's neighbours with the same reference label
    support: dict[str, Support]
    stayed: dict[str, float]  # predictions that are still the source-only model's against the reference
    strange: float = 0.0  # how much less like a class the least fitting quarter of the target is than the source


@dataclass(frozen=True)
class NoClassCurve:
    """The probability that a target image belongs to no class, 1 / (1 + exp(-(intercept + slope * score))), as a
    person's answers say."""

    intercept: float
    slope: float
    cut: float  # score above which an image is taken for one of no class
    share: float  # expected share of such images in the target


@dataclass(frozen=True)
class ClassSet:
    """The source's classes that occur in the target, and whether it shows anything else."""

    absent: tuple[str, ...] = ()  # classes that do not occur; no model of the run predicts them
    by: Literal["assumed", "noticed", "asked", "told"] = "assumed"  # where that is known from
    others: bool | None = None  # whether the target shows images of no class; None if nobody has said
    curve: NoClassCurve | None = None  # None without answers about single images
    total: int = 0  # classes of the source

    @property
    def strangers(self) -> float | None:
        """The share of images of no class that a claim must account for: 0 if it is small, denied, or only a premise of
        the claim; None if there are some and nobody knows how many."""
        if self.curve is None:
            return None if self.others else 0.0
        return self.curve.share if self.curve.share > FEW_STRANGERS else 0.0

    def question(self, basis: Basis | None) -> Literal["", "share", "images", "classes"]:
        """A question to a person, without whose answer ranges were wrong (docs/results/estimate.md): how many images
        show no class, whether they all show one, or which classes occur."""
        if self.strangers is None:
            return "share"
        strange = basis is not None and basis.features == "pretrained" and basis.strange > STRANGE
        if strange and self.others is None and self.curve is None:
            return "images"
        return "classes" if self.by == "noticed" else ""


CLEARLY = 0.12  # fall of support that none of 543 runs whose accuracy rose had (docs/results/guard.md)
STRANGE = 0.275  # Basis.strange of targets with images of no class
FEW_STRANGERS = 0.05  # share of images of no class that a range of 26 points bears
CERTAIN = 1.96  # standard deviations: a share that is not chance, in 95% of cases


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    verdict: Verdict
    guard: bool  # whether the run keeps the source-only model if adaptation did harm (--guard)
    choice: Choice
    adapted_epoch: int  # epoch of the adapted model, chosen or not; 0 if there is none
    estimates: dict[str, Interval | None]  # for every model that could be chosen
    labels: int  # target images to label until it is clear which model is better; 0 if too many
    selection: str  # the rule that chose the epoch (--select)
    setback: Setback | None = None
    crowd: Crowd | None = None  # in the source-only model's predictions
    basis: Basis | None = None  # None without source images
    class_set: ClassSet = field(default_factory=ClassSet)
    target_labels: int = 0  # target images that the run was trained with the labels of (--answers)
    trained_with_labels: bool = False  # a run of an ablation whose pairs were made with target labels

    @property
    def estimate(self) -> Interval | None:
        """The estimate of the chosen model."""
        return self.estimates[self.choice.model]

    @property
    def harm(self) -> bool:
        """Whether the run keeps the source-only model because adaptation did harm."""
        return self.verdict.kind == "harm" and self.own_choice == "source" and self.choice.by == "run"

    @property
    def own_choice(self) -> ModelName:
        """The run's own choice, whatever a person has chosen since."""
        refused = self.guard and (self.verdict.kind == "harm" or self.falls_back)
        return "source" if refused or not self.adapted_epoch else "adapted"

    @property
    def question(self) -> str:
        """A question to the user, see `ClassSet.question`, or empty."""
        return self.class_set.question(self.basis)

    @property
    def doubtful_classes(self) -> bool:
        """Whether the guard cannot tell because the class shares shift, and nobody has said which classes occur."""
        against = {finding.code for finding in self.verdict.findings}
        return (
            self.verdict.kind == "unknown"
            and against <= {"not-supported", "support-fell"}
            and "not-supported" in against
            and self.class_set.by in ("assumed", "noticed")
        )

    @property
    def falls_back(self) -> bool:
        """Whether, with the classes in doubt, the source supports the source-only model clearly more than the adapted
        one. Its own features would favour it, so that only pretrained ones count."""
        assumed = self.class_set.by == "assumed" and self.doubtful_classes
        if not assumed or self.basis is None or self.basis.features != "pretrained":
            return False
        return self.basis.support["source"].mean - self.basis.support["adapted"].mean > CLEARLY

    def contradicted_by(self, measured: "Measured | None") -> bool:
        """Whether target labels refute the range that the run gave for the chosen model, or its premise."""
        claimed = self.estimate
        if claimed is None or measured is None or self.choice.model not in measured.models:
            return False
        found, n = measured.models[self.choice.model], measured.images
        low, high = (found.accuracy, found.accuracy) if measured.whole_target else astuple(found.interval)
        deviation = (FEW_STRANGERS * (1 - FEW_STRANGERS) / n) ** 0.5
        strangers = not self.class_set.strangers and measured.no_class / n - FEW_STRANGERS > CERTAIN * deviation
        return bool(high < claimed.low or low > claimed.high or strangers)

    def choose(self, model: ModelName) -> "Outcome":
        """The same outcome with this model in use."""
        epoch = self.adapted_epoch if model == "adapted" else 0
        return replace(self, choice=Choice(model, epoch, "run" if model == self.own_choice else "person"))


# By target labels

SIGNIFICANT = 0.05  # largest p-value of a difference that chance does not explain
Better = Literal["adapted", "source", "neither", "open"]
Part = Literal["random", "informative", "other"]  # other: labelled without having been asked for


@dataclass(frozen=True)
class Scores:
    """One model's predictions against labels."""

    accuracy: float  # mean over all images: Office-31, Office-Home, DomainNet
    interval: Interval
    class_mean_accuracy: float  # mean over the classes that have images: VisDA-2017
    class_mean_interval: Interval
    right: tuple[int, ...]  # correct predictions by true class
    images: tuple[int, ...]  # labelled images by true class
    confusion: tuple[tuple[int, ...], ...] = ()  # [true class][predicted class]; not stored for every epoch

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """The accuracy of each true class, None for a class without images."""
        return tuple(right / n if n else None for right, n in zip(self.right, self.images, strict=True))

    def with_intervals(self) -> tuple[str, str]:
        """The accuracy and the class-mean accuracy for a table."""
        return self.interval.around(self.accuracy), self.class_mean_interval.around(self.class_mean_accuracy)


@dataclass(frozen=True)
class Comparison:
    """The adapted model against the source-only one, on the same labelled images."""

    adapted_alone: int  # images on which only the adapted model is right
    source_alone: int
    p: float  # McNemar's test, exact and two-sided
    better: Better  # neither: equally many are right, and every image is labelled; open: too few labels to decide
    disagree: int  # images of the whole target on which the models' predictions differ
    more_labels: int | None = None  # random labels that would probably decide an open comparison


@dataclass(frozen=True)
class CalibrationBin:
    """Images of similar confidence."""

    confidence: float  # mean
    accuracy: float
    images: int


def calibration_error(bins: tuple[CalibrationBin, ...]) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy, weighted by images."""
    return sum(b.images * abs(b.confidence - b.accuracy) for b in bins) / max(sum(b.images for b in bins), 1)


@dataclass(frozen=True)
class Measured:
    """Accuracy of a run's models by target labels.

    Accuracies are exact if every target image is labelled, and the intervals then hold for new images like these.
    Otherwise the intervals are for the whole target if the labelled images are a random sample of it."""

    model: str  # the measured model: adapted, source or last
    classes: tuple[str, ...]
    images: int  # labelled images, without those that the run was trained with
    target: int | None  # images of the run's target; None if other images were labelled
    whole_target: bool  # whether every target image has a label
    models: dict[str, Scores]  # by name; source and adapted only with labels of the run's target
    epochs: tuple[Scores, ...] = ()  # after every epoch of adaptation; the first is the source-only model's
    adapted_epoch: int = 0  # epoch of the adapted model; 0 without one
    comparison: Comparison | None = None
    calibration: tuple[CalibrationBin, ...] = ()  # bins of `model`, the lowest confidence first
    random: bool = False  # whether the labelled images were drawn at random from the target
    no_class: int = 0  # images that belong to none of the classes and got one all the same: they count as wrong
    absent: int = 0  # images of classes that the run takes for absent; they count as wrong too
    unsure: int = 0  # images that were left out because their label is 'unsure'
    skipped: int = 0  # unreadable files
    trained_with: int = 0  # labelled images that were left out because the run was trained with their labels
    recalibrated: bool = False  # whether these labels have calibrated the adapted model

    @property
    def scores(self) -> Scores:
        return self.models[self.model]

    @property
    def accuracy(self) -> float:
        return self.scores.accuracy

    @property
    def best_epoch(self) -> int:
        """The best epoch by labels, an upper bound of any choice without labels; 0 without an adapted model."""
        return max(range(1, len(self.epochs)), key=lambda epoch: self.epochs[epoch].accuracy, default=0)

    @property
    def calibration_error(self) -> float:
        return calibration_error(self.calibration)

    def named_epochs(self) -> dict[str, int]:
        """The epochs that people ask for."""
        if not self.epochs:
            return {}
        adapted = {"adapted": self.adapted_epoch} if self.adapted_epoch else {}
        return {"source_only": 0} | adapted | {"last_epoch": len(self.epochs) - 1, "best_by_labels": self.best_epoch}

    def rows(self) -> list[tuple[str, Scores]]:
        """The same epochs for a table. A single epoch of adaptation is listed once."""
        titles = {"adapted": f"adapted, epoch {self.adapted_epoch}", "last_epoch": "last epoch"}
        titles |= {"source_only": "source-only", "best_by_labels": f"best by labels, epoch {self.best_epoch}"}
        epochs = self.named_epochs() if len(self.epochs) > 1 else {}
        shown = ("source_only", "adapted") if len(self.epochs) == 2 else titles.keys()
        return [(titles[name], self.epochs[epoch]) for name, epoch in epochs.items() if name in shown]

    def _repr_html_(self) -> str:
        rows = [(self.model, *self.scores.with_intervals()), *((name, *s.with_intervals()) for name, s in self.rows())]
        columns = ("model", "accuracy (95% interval)", "class-mean accuracy")
        return html_table(counted(self.images, "labelled image"), columns, rows)

    def summary(self) -> dict[str, Any]:
        """The object that --json prints: what a run stores, and numbers that follow from it."""
        named = {f"{name}_": self.epochs[epoch] for name, epoch in self.named_epochs().items()} | {"": self.scores}
        return {
            **{f"{name}accuracy": scores.accuracy for name, scores in named.items()},
            **{f"{name}accuracy_interval": [*astuple(scores.interval)] for name, scores in named.items()},
            "class_mean_accuracy": self.scores.class_mean_accuracy,
            "best_by_labels_epoch": self.best_epoch,
            "accuracy_by_epoch": [scores.accuracy for scores in self.epochs],
            "per_class": dict(zip(self.classes, self.scores.per_class, strict=True)),
            "confusion": self.scores.confusion,
            "calibration_error": self.calibration_error,
            **asdict(self),
        }


@dataclass(frozen=True)
class Question:
    """A target image to label."""

    path: str
    digest: str
    part: Part


@dataclass(frozen=True)
class Questions:
    """questions.json: all images that `ask` has chosen so far."""

    images: tuple[Question, ...]


@dataclass(frozen=True)
class StoredLabel:
    """The label of a target image, and the part that the image belongs to."""

    path: str
    digest: str
    label: str  # a class, or one of the other answers of a labels file
    part: Part = "other"


@dataclass(frozen=True)
class Answers:
    """answers.json: all answers that `answer` has read so far, and what they show."""

    date: str
    calibrated: bool  # whether these labels, or earlier ones, have calibrated the adapted model
    measured: Measured | None  # None without a label of the random part
    labels: tuple[StoredLabel, ...]
    occurs: dict[str, bool] = field(default_factory=dict)  # classes that somebody was sure of
    belongs: tuple[StoredLabel, ...] = ()  # whether these images show one of the classes
    groups: tuple[StoredLabel, ...] = ()  # names of groups of images of no class
    curve: NoClassCurve | None = None  # None unless an image of `belongs` shows none of the classes

    @property
    def absent(self) -> tuple[str, ...]:
        return tuple(name for name, there in self.occurs.items() if not there)
