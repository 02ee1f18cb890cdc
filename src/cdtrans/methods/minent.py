"""MinEnt (Grandvalet & Bengio 2004): the network is to be sure of its predictions on the target.

    min  CE(source) + w p mean_i H(p_i) / ln K        H(p_i) = -sum_k p_ik log p_ik

p_i is the prediction for target image i, of K classes, and p the progress of training, as in the code of ATDOC. Nothing
keeps the classes in balance: small ones may vanish."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method
from cdtrans.schema import option


class MinEnt(Method):
    """Entropy minimisation on the target."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(1.0, "Weight w of the entropy at the end of training.", minimum=0)

    options: Options
    paper = "Grandvalet & Bengio 2004"
    title = "Semi-supervised Learning by Entropy Minimization, NIPS"

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        relative = entropy(target.logits).mean() / math.log(self.sizes.classes)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_entropy": self.options.trade_off * progress * relative,
        }


def entropy(logits: Tensor) -> Tensor:
    """[B, K] -> [B] in float32, finite for predictions that are certain too."""
    log_p = logits.float().log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)
