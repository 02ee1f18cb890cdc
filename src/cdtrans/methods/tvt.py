"""TVT (Yang et al. 2023): a ViT whose class token takes more from patches that a critic cannot assign to a domain.

In the last block a patch critic D_p tells source from target by the key k_n of a patch, in each head. The attention
a_n that the class token gives to the patch is multiplied by its transferability, the entropy of D_p in bits,

    tau_n = -d log2 d - (1 - d) log2 (1 - d),   d = D_p(R(k_n)),       the class token's output is sum_n a_n tau_n v_n

and not normalised again, also in predictions and exports. A second critic D sees the class token's feature f. With
DANN's reversal R, whose lambda rises as there, and p the predictions on the target,

    min  CE(source) + beta L_domain(D) + gamma L_domain(D_p) + theta [mean H(p) - H(mean p)], H in bits

As in the authors' code gradient flows through tau, to D_p and, reversed, to the keys. Changed: D_p has no Dropout, so
that the result does not depend on the number of ranks, and D is DANN's critic. Not taken: the decoder of target
patches, whose loss their code leaves out of the total; images of 256 pixels."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.methods.dann import Critic, critic_error, domain_loss, reversed_gradient, rising
from cdtrans.methods.minent import entropy
from cdtrans.network.blocks import Transferability, rows_read, self_attention
from cdtrans.network.network import Network
from cdtrans.network.operations import Residual, Stream
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option


class TVT(Method):
    """Attention to patches that look alike in both domains."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(0.1, "Weight beta of the critic's loss (VisDA, webcam: 1).", minimum=0)
        patches: float = option(0.01, "Weight gamma of the patch critic's loss (A>D: 0.1).", minimum=0)
        information: float = option(0.1, "Weight theta of information maximisation (VisDA: 1).", minimum=0)
        ramp: float = option(10.0, "Steepness of the rise of lambda.", minimum=0)
        hidden: int | Literal["auto"] = option("auto", "Width of the critic (auto: D / 4).", minimum=1)

    options: Options
    paper = "Yang et al. 2023"
    title = "TVT: Transferable Vision Transformer for Unsupervised Domain Adaptation, WACV"
    backbones = "ViT"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.critic = Critic(network.dim, network.dim // 4 if options.hidden == "auto" else options.hidden)
        self.transferability = Transferability(network.backbone)

    @classmethod
    def check(cls, network: Network, name: str) -> None:
        super().check(network, name)
        if rows_read(network.backbone) != 1:
            raise cls.misfit(name, "that classifies by its class token, such as deit_small or dinov2_small")

    def served(self) -> Network:
        return Network(self.network.backbone, self.network.head, self.network.taps, self.transferability)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        options, strength = self.options, rising(progress, self.options.ramp)
        logits: list[Tensor] = []  # the patch critic's, [B, patches, heads], for each part of the batch

        def factors(keys: Tensor) -> Tensor:
            logits.append(self.transferability.logits(reversed_gradient(keys, strength)))
            return self.transferability.factors(logits[-1])

        def attention(block: Any, stream: Stream, rope: Tensor | None, rows: int | None) -> tuple[Tensor, Residual]:
            last = block is self.network.backbone.blocks[-1]
            return self_attention(block, stream, rope, rows, factors if last else None)

        source, target = self.network.encode_together(batch.x_s, batch.x_t, attention=attention)
        of_source, of_target = (gather(x) for x in torch.cat(logits).chunk(2))
        domain = domain_loss(self.critic, source.feature, target.feature, strength)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_domain": options.trade_off * domain,
            "loss_patches": options.patches * critic_error(of_source, of_target),
            "loss_information": -options.information * information(target.logits),
        }


def information(logits: Tensor) -> Tensor:
    """The information of predictions about their images, [B, K] -> bits: large if they are certain and varied."""
    mean = logits.float().log_softmax(dim=1).exp().mean(dim=0)
    return (entropy(mean.clamp(min=1e-10).log()[None]).sum() - entropy(logits).mean()) / math.log(2)
