"""The record of every epoch without labels, and the choice of the epoch to keep."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdtrans.inputs.batches import LabelledImages
from cdtrans.network.encoding import Encoded, Encoder
from cdtrans.pairing.narrowing import Numbering
from cdtrans.record.layout import PREDICTED
from cdtrans.record.run import RunWriter
from cdtrans.runtime.ranks import from_main
from cdtrans.trust.scores import score
from cdtrans.trust.support import Impression

DIGITS = 5  # decimal places of a score in the log
CONSENSUS = ("information", "nuclear_norm", "clusters", "centers")


def consensus(scores: dict[str, float]) -> float:
    """The geometric mean of four scores that measure different things: certain and varied predictions (information,
    nuclear norm), features that cluster by predicted class (clusters), and images nearest to the centre of their own
    class (centers). A model that has collapsed into one class has no information, so its consensus is 0, however high
    the others are. Every score has the same scale for every model of a run, so an epoch's consensus does not depend on
    the other epochs."""
    return math.prod(max(0.0, scores[name]) for name in CONSENSUS) ** (1 / len(CONSENSUS))


class BestEpoch(NamedTuple):
    """The best epoch so far."""

    epoch: int
    value: float  # the rule's score
    weights: dict[str, Tensor]  # the served network's


class Watch:
    """Owns the scores of all epochs, the impression of the source-only model, the evidence about both domains and the
    best epoch."""

    def __init__(
        self, run: RunWriter, encode: Encoder, holdout: LabelledImages | None, rule: str, numbering: Numbering
    ) -> None:
        self.run, self.encode, self.holdout = run, encode, holdout
        self.numbering = numbering
        self.before: Impression | None = None  # the source-only model's, once the first round has begun
        self.scores: dict[int, dict[str, float]] = {}  # epoch -> scores
        self.rule = rule
        self.best: BestEpoch | None = None

    def epoch(self, epoch: int, target: Encoded, encode: Encoder | None = None) -> None:
        """Record an epoch's pass over the target. Epoch 0 is the source-only model, which has its own `encode` and
        cannot be chosen here."""
        save_predictions(self.run, epoch, target, self.numbering)
        with self.run.timed("scores", epoch=epoch):
            scores: dict[str, Any] = score(target)._asdict()
            if self.holdout is not None:
                held_out = (encode or self.encode)(self.holdout.images, "held-out source")
                scores["holdout"] = float((held_out.logits.argmax(dim=1) == self.holdout.labels).double().mean())
            scores["consensus"] = consensus(scores)
            scores = from_main({name: round(value, DIGITS) for name, value in scores.items()})
            self.run.log("scores", epoch=epoch, **scores)
            self.scores[epoch] = scores
            if epoch > 0:
                self.consider(epoch, scores, self.encode.model)

    def consider(self, epoch: int, scores: dict[str, float], network: nn.Module) -> None:
        """Keep a copy of the network if its epoch is the best. A later epoch wins a tie: it was trained longer."""
        value = float(epoch) if self.rule == "last" else scores[self.rule]
        if self.best is None or value >= self.best.value:
            weights = {name: x.detach().clone() for name, x in network.state_dict().items()}
            self.best = BestEpoch(epoch, value, weights)

    def state_dict(self) -> dict[str, Any]:
        before = None if self.before is None else vars(self.before)
        best = None if self.best is None else self.best._asdict()
        return {"before": before, "scores": self.scores, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = None if state["before"] is None else Impression(**state["before"])
        self.scores = state["scores"]
        self.best = None if state["best"] is None else BestEpoch(**state["best"])


def save_predictions(run: RunWriter, epoch: int, encoded: Encoded, numbering: Numbering) -> None:
    """The predicted class of every target image after an epoch (0: the source-only model). Target labels can then score
    every epoch later, and training never sees them."""
    confidence, predicted = encoded.logits.softmax(dim=1).max(dim=1)
    labels = numbering.labels(predicted.to(torch.int32).cpu().numpy())
    arrays = {"predicted": labels, "confidence": confidence.half().cpu().numpy()}
    run.write(PREDICTED.numbered(epoch), arrays)
