"""DCAN (Li et al. 2020): each domain has channels of its own, and the target's features and logits are corrected.

The backbone has gates that weigh channels (squeeze and excitation). The first layer of each gate is separate for the
domains. The target's feature f and logits z are corrected by small networks D and D',

    f^ = f + D(f),   z^ = z(f^) + D'(z(f^)),   p^ = softmax(z^)

    L = CE(source) + 0.1 H(p^_t) + 1.5 [ M(f_s, f^_t) + M(p_s, p^_t) + 1/K sum_k R_k ]

M is the maximum mean discrepancy with Gaussian kernels exp(-|a - b|^2 / h), summed over h = m/4, m/2, m, 2m, 4m for the
mean squared distance m of features, and h = 1.68 for probabilities, estimated in linear time from neighbours in the
batch. R_k compares source images of the class k with corrected ones of a random subset of the source, each image with
the chance 0.8 / K, by features and by logits: a correction must not matter for the source.

Served are the target's gates and both corrections. BatchNorm layers are frozen. Changed: R_k is the plain discrepancy
of two sets; the authors' code offsets the second one by a wrong number when its size differs. The backbone has gates in
timm's seresnet50 and the like, or any of its ResNets with `backbone_args: {block_args: {attn_layer: se}}`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from timm.layers.squeeze_excite import SqueezeExcite
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.methods.minent import entropy
from cdtrans.network.network import CorrectedHead, Head, Network, PerDomain, with_layers
from cdtrans.schema import option

KERNELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # bandwidths for features, relative to their mean squared distance
FIXED = 1.68  # bandwidth for probabilities and logits


class DCAN(Method):
    """Channel gates for each domain, corrected features."""

    @dataclass(frozen=True)
    class Options:
        discrepancy: float = option(1.5, "Weight of the discrepancies.", minimum=0)
        entropy: float = option(0.1, "Weight of the target's entropy.", minimum=0)
        sampled: float = option(0.8, "Images of the random subset for each class of the source's.", minimum=0)
        correction: int = option(128, "Width of the feature's correction.", minimum=1)
        correction_rate: float = option(0.01, "Learning rate of both corrections, relative to --lr.", minimum=0)

    options: Options
    paper = "Li et al. 2020"
    title = "Domain Conditioned Adaptation Network, AAAI"
    backbones = "SE gates"
    least_batch = 2

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(with_layers(network, SqueezeExcite, gate_for_each), options, sizes)
        assert isinstance(network.head, Head), "stage 1 leaves a plain one"
        self.head = CorrectedHead(network.dim, sizes.classes, "none", correction=options.correction)
        self.head.plain = network.head
        self.plain = network.backbone
        for layer in self.frozen():
            layer.requires_grad_(False)

    @classmethod
    def check(cls, network: Network, name: str) -> None:
        if not any(isinstance(layer, SqueezeExcite) for layer in network.backbone.modules()):
            raise cls.misfit(name, "with squeeze-and-excitation gates, such as seresnet50")

    def served(self) -> Network:
        return Network(self.plain, self.head, self.network.taps)

    def rates(self) -> Mapping[str, float]:
        return dict.fromkeys(("head.of_feature", "head.of_logits"), self.options.correction_rate)

    def frozen(self) -> list[nn.Module]:
        return [x for x in self.network.backbone.modules() if isinstance(x, nn.modules.batchnorm._BatchNorm)]

    def train(self, mode: bool = True) -> "DCAN":
        super().train(mode)
        for layer in self.frozen():
            layer.eval()
        return self

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_together(batch.x_s, batch.x_t)
        corrected_source, corrected = self.head.correct(source), self.head.correct(target)
        p_s, p_t = source.logits.softmax(dim=1), corrected.logits.softmax(dim=1)
        f_s, f_t = source.feature, corrected.feature
        discrepancy = neighbour_mmd(f_s, f_t, bandwidths(f_s, f_t)) + neighbour_mmd(p_s, p_t, [FIXED])
        members = F.one_hot(batch.y_s, self.sizes.classes).T  # [K, B]
        subsets = torch.rand(members.shape, device=members.device) < self.options.sampled / self.sizes.classes
        f_c, z_c = corrected_source
        changed = set_mmd(f_s, f_c, members, subsets, bandwidths(f_s, f_c))
        changed = changed + set_mmd(source.logits, z_c, members, subsets, [FIXED])
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_entropy": self.options.entropy * entropy(corrected.logits).mean(),
            "loss_discrepancy": self.options.discrepancy * discrepancy,
            "loss_correction": self.options.discrepancy * changed,
        }


def gate_for_each(gate: nn.Module) -> nn.Module:
    """A gate for each domain that share their second layer."""
    shared: dict[int, object] = {id(x): x for x in gate.fc2.parameters()}  # type: ignore[union-attr]
    return PerDomain(copy.deepcopy(gate, shared), gate)


def bandwidths(x: Tensor, y: Tensor) -> list[Tensor]:
    """Kernel bandwidths: multiples of the mean squared distance between distinct features, [B, D] twice."""
    both = torch.cat([x, y]).detach().float()
    n = len(both)
    mean = 2 * (n * both.square().sum() - both.sum(dim=0).square().sum()) / (n * n - n)
    return [factor * mean for factor in KERNELS]


def kernel(squared: Tensor, widths: Sequence[Tensor | float]) -> Tensor:
    return torch.stack([torch.exp(-squared / width) for width in widths]).sum(dim=0)


def neighbour_mmd(x: Tensor, y: Tensor, widths: Sequence[Tensor | float]) -> Tensor:
    """The discrepancy of two sets, [B, D] each, from pairs of neighbours: k(x, x') + k(y, y') - k(x, y') - k(x', y)."""
    next_x, next_y = x.roll(-1, dims=0), y.roll(-1, dims=0)
    pairs = ((x, next_x), (y, next_y), (x, next_y), (next_x, y))
    xx, yy, xy, yx = (kernel((a - b).float().square().sum(dim=1), widths) for a, b in pairs)  # [B]
    return (xx + yy - xy - yx).mean()


def set_mmd(x: Tensor, y: Tensor, members: Tensor, subsets: Tensor, widths: Sequence[Tensor | float]) -> Tensor:
    """The discrepancy between a part of x and a part of y, [B, D] each, on average over K parts, which are rows of
    `members` and `subsets`, [K, B]. Where one is empty it is 0. In float32: differences are small."""
    with torch.autocast(x.device.type, enabled=False):
        x, y = x.float(), y.float()
        a, b = (part / part.sum(dim=1, keepdim=True).clamp(min=1) for part in (members.float(), subsets.float()))
        xx, yy, xy = (kernel(torch.cdist(*pair).square(), widths) for pair in ((x, x), (y, y), (x, y)))  # [B, B]
        discrepancy = ((a @ xx) * a + (b @ yy) * b - 2 * (a @ xy) * b).sum(dim=1)  # [K]
    return torch.where(members.any(dim=1) & subsets.any(dim=1), discrepancy, 0.0).mean()
