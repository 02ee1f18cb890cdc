"""A network in which some layers of the backbone treat source and target differently while it is trained. The first
half of a batch is the source. In eval mode such a layer is the target's, which belongs to the plain network: that one
predicts, is saved and is exported, and knows nothing of the rest."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cdtrans.errors import CdtransError
from cdtrans.network.network import Network, has_batchnorm


class PerDomain(nn.Module):
    """Two layers, one for each domain."""

    def __init__(self, source: nn.Module, target: nn.Module) -> None:
        super().__init__()
        self.source, self.target = source, target

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.target(x)  # type: ignore[no-any-return]
        source, target = x.chunk(2)
        return torch.cat([self.source(source), self.target(target)])


def with_layers(network: Network, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> Network:
    """The network with what `make` makes of each layer of a kind in its backbone. All other weights, and the head, are
    the same tensors in both."""
    backbone = network.backbone
    shared = [*backbone.parameters(), *backbone.buffers()]
    copied = {id(x): x for x in shared} | {id(x): make(x) for x in backbone.modules() if isinstance(x, kind)}
    return Network(copy.deepcopy(backbone, copied), network.head, network.taps)


def require_batchnorm(network: Network, name: str, method: str) -> None:
    """Refuse a backbone (called `name`) without BatchNorm layers."""
    if not has_batchnorm(network.backbone):
        raise CdtransError(
            f"{method} needs a backbone with BatchNorm layers, such as resnet50, and '{name}' has none; choose another "
            "--backbone or --method."
        )
