"""Which epoch to keep, without labels."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

CONSENSUS = ("information", "nuclear_norm", "clusters", "centers")


def consensus(scores: dict[str, float]) -> float:
    """The geometric mean of four scores that each want something else: certain and varied predictions (information,
    nuclear norm), that the features fall into the predicted groups by themselves (clusters), and that each image lies
    nearest to its own group (centers). A model that has collapsed into one class has no information, so no consensus,
    however high the others are. Every score has the same scale for every model of a run, so an epoch's consensus does
    not depend on the other epochs."""
    return math.prod(max(0.0, scores[name]) for name in CONSENSUS) ** (1 / len(CONSENSUS))


RULES: dict[str, Callable[[int, dict[str, float]], float]] = {
    "consensus": lambda epoch, scores: scores["consensus"],
    "last": lambda epoch, scores: float(epoch),
} | {
    name: (lambda epoch, scores, name=name: scores[name])  # type: ignore[misc]
    for name in ("confidence", "information", "nuclear_norm", "clusters", "density", "centers", "holdout")
}


class Selection:
    """The best epoch so far by a rule, with a copy of its weights. It lives in `kept`, which is saved with the state of
    the run and so survives a kill."""

    def __init__(self, rule: str, kept: dict[str, Any]) -> None:
        self.value = RULES[rule]
        self.kept = kept  # epoch, value, model; empty before the first epoch

    @property
    def epoch(self) -> int:
        epoch: int = self.kept["epoch"]
        return epoch

    def consider(self, epoch: int, scores: dict[str, float], model: nn.Module) -> None:
        """A later epoch wins a tie: it has seen more."""
        value = self.value(epoch, scores)
        if not self.kept or value >= self.kept["value"]:
            weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
            self.kept.update(epoch=epoch, value=value, model=weights)

    def restore(self, model: nn.Module) -> None:
        """Put the chosen epoch's weights back into the model."""
        model.load_state_dict(self.kept["model"])
