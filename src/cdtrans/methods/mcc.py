"""MCC (Jin et al. 2020): a prediction on the target should not hesitate between classes.

    min  CE(source) + w / K sum_j sum_{k != j} C_jk / sum_k C_jk        C = P^T W P, [K, K]

P = softmax(logits / T), [B, K], of a batch of target images, and W is diagonal with W_ii = 1 + exp(-H(p_i)), without
gradient as in the authors' code. sum_k C_jk = sum_i W_ii P_ij, so that only the diagonal of C is needed."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method
from cdtrans.methods.minent import entropy
from cdtrans.schema import option

ABSENT = 1e-12  # a class with less probability in the whole batch counts as one without


class MCC(Method):
    """Minimum class confusion on the target."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(1.0, "Weight w of the class confusion.", minimum=0)
        temperature: float = option(2.5, "What the target's logits are divided by.", minimum=0.01)

    options: Options
    paper = "Jin et al. 2020"
    title = "Minimum Class Confusion for Versatile Domain Adaptation, ECCV"

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_confusion": self.options.trade_off * confusion(target.logits, self.options.temperature),
        }


def confusion(logits: Tensor, temperature: float) -> Tensor:
    """[B, K] -> scalar: 0 if every class is predicted, and with certainty; 1 - 1 / K if all predictions are uniform."""
    z = logits.float() / temperature
    p, weight = z.softmax(dim=1), 1 + torch.exp(-entropy(z.detach()))
    own = (weight[:, None] * p.square()).sum(dim=0)  # [K] C_jj
    all_of_row = (weight[:, None] * p).sum(dim=0)  # [K]
    return 1 - (own / all_of_row.clamp(min=ABSENT)).mean()
