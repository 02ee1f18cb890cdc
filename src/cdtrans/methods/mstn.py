"""MSTN (Xie et al. 2018): the centres of a class in both domains should meet, and a critic should not tell the domains
apart.

    L = CE(source) + lambda (0.1 L_critic + mean (C_s - C_t)^2)

C_s and C_t [K, D] are moving averages of the class means of the features f of both domains,

    C_k <- 0.3 (mean of the batch's features of class k) + 0.7 C_k        if the batch has the class

Gradient flows through the batch's means. L_critic is DANN's, and lambda rises as in DANN. As in the code of DSBN's
authors (Chang et al. 2019), who use MSTN, f are the logits, and the classes of target images are the network's
predictions in a pass of their own in eval mode. Not taken: two optimisers for network and critic."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.methods.dann import Critic, domain_loss, rising
from cdtrans.network.network import Network, Output
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option


class MSTN(Method):
    """Moving class centres of both domains meet."""

    @dataclass(frozen=True)
    class Options:
        semantic: float = option(1.0, "Weight of the distance between the centres.", minimum=0)
        critic: float = option(0.1, "Weight of the critic's loss.", minimum=0)
        renewal: float = option(0.3, "Share of the batch in a centre.", minimum=0, maximum=1)
        ramp: float = option(10.0, "Steepness of the rise of lambda.", minimum=0)
        hidden: int = option(1024, "Width of the critic's two hidden layers.", minimum=1)
        critic_rate: float = option(1.0, "Learning rate of the critic, relative to --lr.", minimum=0)

    options: Options
    paper = "Xie et al. 2018"
    title = "Learning Semantic Representations for Unsupervised Domain Adaptation, ICML"
    source_centers: Tensor
    target_centers: Tensor

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.critic = Critic(sizes.classes, options.hidden)
        for name in ("source_centers", "target_centers"):
            self.register_buffer(name, torch.zeros(sizes.classes, sizes.classes))

    def rates(self) -> Mapping[str, float]:
        return {"critic": self.options.critic_rate}

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = (out.logits.float() for out in self.encode(batch))
        labels = gather(self.network.encode_in_eval_mode(batch.x_t).logits).argmax(dim=1)
        centers = (self.moved(self.source_centers, source, batch.y_s), self.moved(self.target_centers, target, labels))
        strength = rising(progress, self.options.ramp)
        domain = domain_loss(self.critic, source, target, torch.ones_like(progress))
        return {
            "loss_source": F.cross_entropy(source, batch.y_s),
            "loss_domain": self.options.critic * strength * domain,
            "loss_semantic": self.options.semantic * strength * F.mse_loss(*centers),
        }

    def encode(self, batch: Batch) -> tuple[Output, ...]:
        return self.network.encode_together(batch.x_s, batch.x_t)

    def moved(self, centers: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The centres after this batch, with gradient; they are also remembered."""
        means, present = class_means(features, labels, len(centers))
        current = torch.where(present, self.options.renewal * means + (1 - self.options.renewal) * centers, centers)
        with torch.no_grad():
            centers.copy_(current)
        return current


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """[B, D] and [B] -> [K, D], 0 for a class without images, and whether there are any, [K, 1]."""
    members = F.one_hot(labels, classes).to(features)  # [B, K]
    counts = members.sum(dim=0)[:, None]  # [K, 1]
    return members.T @ features / counts.clamp(min=1), counts > 0
