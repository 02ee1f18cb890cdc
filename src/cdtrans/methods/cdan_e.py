"""CDAN+E (Long et al. 2018): DANN whose critic also sees the prediction, and counts certain images more.

    min over network and critic of  CE(source) + w / 2 [sum_s w_i BCE(D(R(h_i)), 1) + sum_t w_i BCE(D(R(h_i)), 0)]
    h_i = f_i (x) p_i        the multilinear map, d K numbers: each feature times each class probability
    w_i = e_i / sum e        over the images of its domain, e_i = 1 + exp(-H(p_i))

R and lambda are DANN's. As in the authors' code p gets no gradient through h, while the entropies H keep theirs, which
is reversed too; the sums of e are constants. A long h (d K > `largest_map`) is replaced by its randomised form
(R_f f) * (R_g p) / sqrt(m) with fixed Gaussian matrices, as in the paper. d is the length of the backbone's feature."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdtrans.methods.base import Sizes
from cdtrans.methods.dann import DANN, Critic, domain_loss, reversed_gradient
from cdtrans.methods.minent import entropy
from cdtrans.network.network import Network, Output
from cdtrans.schema import option


class CDANE(DANN):
    """Adversarial critic of features and predictions."""

    @dataclass(frozen=True)
    class Options(DANN.Options):
        entropy: bool = option(True, "Certain images count more (+E); without it this is CDAN.")
        largest_map: int = option(65536, "Longest f (x) p, features times classes, that is not randomised.", minimum=1)
        projection: int = option(1024, "Length m of the randomised map.", minimum=1)

    options: Options
    paper = "Long et al. 2018"
    title = "Conditional Adversarial Domain Adaptation, NeurIPS"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.map = MultilinearMap(network.dim, sizes.classes, options.largest_map, options.projection)
        self.critic = Critic(self.map.length, options.hidden)

    def domain(self, source: Output, target: Output, strength: Tensor) -> Tensor:
        h_s, h_t = (self.map(out.feature, out.logits.softmax(dim=1).detach()) for out in (source, target))
        if not self.options.entropy:
            return domain_loss(self.critic, h_s, h_t, strength)
        weights = certainty(source.logits, strength), certainty(target.logits, strength)
        return domain_loss(self.critic, h_s, h_t, strength, weights)


class MultilinearMap(nn.Module):
    """f and p, [B, d] and [B, K] -> [B, length]: every product of a feature and a probability, or a random projection
    of them."""

    r_f: Tensor
    r_g: Tensor

    def __init__(self, features: int, classes: int, largest: int, projection: int) -> None:
        super().__init__()
        self.randomised = features * classes > largest
        self.length = projection if self.randomised else features * classes
        if self.randomised:
            self.register_buffer("r_f", torch.randn(features, projection))
            self.register_buffer("r_g", torch.randn(classes, projection))

    def forward(self, f: Tensor, p: Tensor) -> Tensor:
        if self.randomised:
            return (f @ self.r_f) * (p @ self.r_g) / math.sqrt(self.length)
        return (p[:, :, None] * f[:, None, :]).flatten(1)


def certainty(logits: Tensor, strength: Tensor) -> Tensor:
    """[B, K] -> [B] e_i / mean(e): from 1, all alike, to 2, certain, before the division. Its gradient is reversed."""
    e = 1 + torch.exp(-reversed_gradient(entropy(logits), strength))
    return e / e.mean().detach()
