"""Which epoch to keep, without labels."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

CONSENSUS = ("information", "nuclear_norm", "clusters", "centers")


def consensus(scores: dict[str, float]) -> float:
    """The geometric mean of four scores that measure different things: certain and varied predictions (information,
    nuclear norm), features that cluster by predicted class (clusters), and images nearest to the centre of their own
    class (centers). A model that has collapsed into one class has no information, so its consensus is 0, however high
    the others are. Every score has the same scale for every model of a run, so an epoch's consensus does not depend on
    the other epochs."""
    return math.prod(max(0.0, scores[name]) for name in CONSENSUS) ** (1 / len(CONSENSUS))


RULES: dict[str, Callable[[int, dict[str, float]], float]] = {
    "consensus": lambda epoch, scores: scores["consensus"],
    "last": lambda epoch, scores: float(epoch),
} | {
    name: (lambda epoch, scores, name=name: scores[name])  # type: ignore[misc]
    for name in ("confidence", "information", "nuclear_norm", "clusters", "density", "centers", "holdout")
}


class Best(NamedTuple):
    """The best epoch so far."""

    epoch: int
    value: float  # by the rule
    weights: dict[str, Tensor]  # of the served network


class Selection:
    """The best epoch by a rule, with a copy of its weights."""

    def __init__(self, rule: str) -> None:
        self.value = RULES[rule]
        self.best: Best | None = None

    def consider(self, epoch: int, scores: dict[str, float], network: nn.Module) -> None:
        """A later epoch wins a tie: it was trained longer."""
        value = self.value(epoch, scores)
        if self.best is None or value >= self.best.value:
            weights = {name: x.detach().clone() for name, x in network.state_dict().items()}
            self.best = Best(epoch, value, weights)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else self.best._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = Best(**state) if state else None
