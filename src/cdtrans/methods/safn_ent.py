"""SAFN+ENT (Xu et al. 2019): features grow longer, step by step, and predictions on the target become certain.

    min  CE(source) + w [n(f_s) + n(f_t)] + v mean_i H(p_i)        p_i: prediction for target image i
    n(f) = mean_i (|f_i| - sg|f_i| - delta)^2                       sg: without gradient

The value of n is always delta^2, and its gradient is that of -2 delta mean_i |f_i|, which is minimised and logged here,
so that the log tells how long the features are. f is made by a block of the authors' code: Linear, BatchNorm, ReLU and
Dropout, which keeps the mean of |f|^2; after the bottleneck norm of other methods f could only grow by the norm's
scale. So the method has its own head, which is served. Not taken: the second block of their VisDA model."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.methods.minent import entropy
from cdtrans.network.network import BottleneckHead, Network
from cdtrans.schema import option


class SAFNENT(Method):
    """Longer features and certain predictions."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(0.05, "Weight w of the feature norms.", minimum=0)
        delta: float = option(1.0, "How much longer a feature should be (the authors: 0.3 for VisDA).", minimum=0)
        entropy: float = option(0.1, "Weight v of the entropy (the authors: 0 for VisDA).", minimum=0)
        hidden: int = option(1000, "Length of the features.", minimum=1)
        dropout: float = option(0.5, "Dropout of the features.", minimum=0, maximum=0.99)

    options: Options
    paper = "Xu et al. 2019"
    title = "Larger Norm More Transferable: An Adaptive Feature Norm Approach for Unsupervised Domain Adaptation, ICCV"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.head = BottleneckHead(network.dim, sizes.classes, bottleneck=options.hidden, dropout=options.dropout)

    def served(self) -> Network:
        return Network(self.network.backbone, self.head, self.network.taps)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = (self.head(feature) for feature in self.network.features_each(batch.x_s, batch.x_t))
        options, length = self.options, mean_length(source.feature) + mean_length(target.feature)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_norm": -2 * options.delta * options.trade_off * length,
            "loss_entropy": options.entropy * entropy(target.logits).mean(),
        }


def mean_length(feature: Tensor) -> Tensor:
    """[B, d] -> scalar in float32."""
    length: Tensor = torch.linalg.vector_norm(feature.float(), dim=1)
    return length.mean()
