"""The outcome of a run: decided once, from numbers, and kept in result.json. Its sentences are in `wording`.

    verdict     whether the adapted model is better than the source-only one, by measures that need no target label
    estimates   a range for each model's accuracy on the target, without labels; None if there can be none
    choice      the model that the run uses, by the run itself or by a person (`cdtrans choose`)

What target labels show of the models is `measured.Measured`; it is known later, in another file, and replaces the
estimate wherever both are shown. A statement about the classes that occur in the target would be one more field."""

from dataclasses import dataclass, field, replace
from typing import Literal

ModelName = Literal["source", "adapted"]  # the models that a run can choose: their folders


@dataclass(frozen=True)
class Measure:
    """One measure of the guard."""

    code: str  # the problem that it detects, a key of `wording.MEASURES`
    value: float
    limit: float  # a healthy run is not below it
    decisive: bool = False  # whether it is harm by itself
    numbers: dict[str, float] = field(default_factory=dict)  # further numbers that its sentence names
    cause: str = ""  # what broke training off, in words

    @property
    def harm(self) -> bool:
        return self.value < self.limit


@dataclass(frozen=True)
class Setback:
    """Training that went wrong after the chosen epoch."""

    consensus: float  # of the label-free scores in the chosen epoch
    lowest: float  # in a later one


@dataclass(frozen=True)
class Crowd:
    """A class into which a model puts most target images."""

    label: str
    share: float


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
class Estimate:
    """A range for a model's accuracy on the target, without labels."""

    low: float
    high: float


@dataclass(frozen=True)
class Choice:
    """The model that the run uses."""

    model: ModelName
    epoch: int  # of adaptation; 0 for the source-only model
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
    agreement: float  # of the reference labels with the probe that they began with
    steady: float  # share of an image's neighbours with the same reference label
    support: dict[str, Support]
    stayed: dict[str, float]  # predictions that are still the source-only model's against the reference


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    verdict: Verdict
    guard: bool  # whether the run keeps the source-only model if adaptation did harm (--guard)
    choice: Choice
    adapted_epoch: int  # of the adapted model, chosen or not; 0 if there is none
    estimates: dict[str, Estimate | None]  # of all models that could be chosen
    labels: int  # target images to label until the question of the better model would be settled
    selection: str  # the rule that chose the epoch (--select)
    setback: Setback | None = None
    crowd: Crowd | None = None  # in the source-only model's predictions
    basis: Basis | None = None  # None without source images
    target_labels: int = 0  # target images that the run was trained with the labels of (--target-labels)
    trained_with_labels: bool = False  # a run of an ablation whose pairs were made with target labels

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of the chosen model."""
        return self.estimates[self.choice.model]

    @property
    def harm(self) -> bool:
        """Whether the run keeps the source-only model because adaptation did harm."""
        return self.own_choice == "source" and self.choice.by == "run"

    @property
    def own_choice(self) -> ModelName:
        """The run's own choice, whatever a person has chosen since."""
        return "source" if (self.verdict.kind == "harm" and self.guard) or not self.adapted_epoch else "adapted"

    def choose(self, model: ModelName) -> "Outcome":
        """The same outcome with this model in use."""
        epoch = self.adapted_epoch if model == "adapted" else 0
        return replace(self, choice=Choice(model, epoch, "run" if model == self.own_choice else "person"))
