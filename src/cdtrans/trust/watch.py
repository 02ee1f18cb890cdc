"""Every epoch's pass over the target, looked at: predictions for a later answer key, scores, and the best so far."""

from typing import Any

import torch
from torch import nn

from cdtrans.data.batches import LabelledImages
from cdtrans.model.encoding import Encoded, Encoder
from cdtrans.runtime.ranks import from_main
from cdtrans.storage.run import Run
from cdtrans.trust.impression import Impression
from cdtrans.trust.scores import score
from cdtrans.trust.selection import Selection, consensus

DIGITS = 5  # of a score in the log


class Watch:
    """What it knows lives in `memory`, which is saved with the state of the run and so survives a kill."""

    def __init__(
        self, run: Run, model: nn.Module, encode: Encoder, holdout: LabelledImages | None, rule: str, memory: dict
    ) -> None:
        self.run, self.model, self.encode, self.holdout, self.memory = run, model, encode, holdout, memory
        self.selection = Selection(rule, memory.setdefault("best", {}))

    @property
    def before(self) -> Impression | None:
        """What the source-only model made of both domains, once that is known."""
        return Impression(**self.memory["before"]) if "before" in self.memory else None

    def remember(self, before: Impression) -> None:
        self.memory["before"] = vars(before)

    def scores(self, epoch: int) -> dict[str, float]:
        found: dict[str, float] = self.memory["scores"][epoch]
        return found

    def epoch(self, epoch: int, target: Encoded) -> None:
        """Take in the pass after an epoch; epoch 0 is the source-only model, which cannot be chosen here."""
        save_predictions(self.run, epoch, target)
        with self.run.timed("scores", epoch=epoch):
            scores: dict[str, Any] = score(target)._asdict()
            if self.holdout is not None:
                predicted = self.encode(self.holdout.images, "held-out source").logits.argmax(dim=1)
                scores["holdout"] = float((predicted == self.holdout.labels).double().mean())
            scores["consensus"] = consensus(scores)
            scores = from_main({name: round(value, DIGITS) for name, value in scores.items()})
            self.run.log("scores", epoch=epoch, **scores)
            self.memory.setdefault("scores", {})[epoch] = scores
            if epoch > 0:
                self.selection.consider(epoch, scores, self.model)


def save_predictions(run: Run, epoch: int, encoded: Encoded) -> None:
    """The predicted class of every target image after an epoch (0: the source-only model). An answer key, if there ever
    is one, can then score every epoch afterwards, and training never has to see it."""
    confidence, predicted = encoded.logits.softmax(dim=1).max(dim=1)
    arrays = {"predicted": predicted.to(torch.int32).cpu().numpy(), "confidence": confidence.half().cpu().numpy()}
    run.write_arrays(f"predictions/epoch-{epoch:03}.npz", arrays)
