"""MIC (Hoyer et al. 2023): SDAT, and masked target images get the label that a teacher gives to the whole ones.

The teacher is a moving average of the network, with the decay min(1 - 1/(t + 1), 0.9) after t steps. With its
prediction y of a target image, its confidence q, and the logits z of the image with 70 percent of its squares masked
(64 of 224 pixels wide, so 4 x 4 of them), L_masked = mean_i q_i CE(z_i, y_i) is added to SDAT's task loss.

As in the authors' code mask and teacher are the same in both passes of SAM, the masked images pass the network by
themselves, the teacher's bottleneck norm takes the batch's own statistics, and the network is served. As in the paper q
counts in both passes; their code forgets it in the second one (`weighted=false`), and loses several points after
training on little source data. Not taken: colour jitter and blur of masked images."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.inputs.batches import masked
from cdtrans.methods.base import Batch, Sizes, Update, follow
from cdtrans.methods.sdat import SDAT
from cdtrans.network.network import Network
from cdtrans.schema import option

SQUARES = 4  # in a row


class MIC(SDAT):
    """SDAT, and masked target images labelled by a teacher."""

    @dataclass(frozen=True)
    class Options(SDAT.Options):
        mask: float = option(0.7, "Share of a target image's squares that are masked.", minimum=0, maximum=1)
        masked: float = option(1.0, "Weight of the loss on masked images.", minimum=0)
        decay: float = option(0.9, "Decay of the teacher.", minimum=0, maximum=1)
        weighted: bool = option(True, "The teacher's confidence counts in both of SAM's passes.")

    options: Options
    paper = "Hoyer et al. 2023"
    title = "MIC: Masked Image Consistency for Context-Enhanced Domain Adaptation, CVPR"
    steps: Tensor

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.teacher = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))  # so far

    def train(self, mode: bool = True) -> "MIC":
        super().train(mode)
        self.teacher.eval()  # without stochastic depth
        self.teacher.head.train(mode)  # with the batch's statistics
        return self

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        confidence, labels = self.teach(batch.x_t)
        hidden = masked(batch.x_t, self.options.mask, SQUARES)

        def consistency(weights: Tensor) -> Tensor:
            errors = F.cross_entropy(self.network.encode(hidden).logits, labels, reduction="none")  # [B]
            return self.options.masked * (weights * errors).mean()

        source, target = self.network.encode_together(batch.x_s, batch.x_t)
        task = F.cross_entropy(source.logits, batch.y_s) + self.confusion(target) + consistency(confidence)
        with self.perturbed(task):
            losses = self.losses(batch, progress)
            again = confidence if self.options.weighted else torch.ones_like(confidence)
            losses["loss_masked"] = consistency(again)
            update(torch.stack(list(losses.values())).sum())
        return losses

    @torch.no_grad()
    def teach(self, x_t: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's confidences and labels, [B] each."""
        confidence, labels = self.teacher.encode(x_t).logits.float().softmax(dim=1).max(dim=1)
        return confidence, labels

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        self.steps += 1
        decay = (1 - 1 / (self.steps + 1)).clamp(max=self.options.decay)
        follow(self.teacher, self.network, 1 - decay)
