"""MSTN+DSBN (Chang et al. 2019): MSTN with BatchNorm layers of their own for each domain.

Every BatchNorm layer of the backbone, and the bottleneck norm, has statistics, scale and shift for the source and for
the target; all other weights are shared. Served are the target's layers, which makes an ordinary network; both sets
start from the source-only model's. Not taken: the authors' second stage, which trains a new network on the
pseudo-labels of this one, and their weights."""

import copy

from torch import nn

from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.mstn import MSTN
from cdtrans.network.network import Head, Network, Output, PerDomain, with_layers
from cdtrans.runtime.ranks import gather


class MSTNDSBN(MSTN):
    """MSTN with BatchNorm for each domain."""

    paper = "Chang et al. 2019"
    title = "Domain-Specific Batch Normalization for Unsupervised Domain Adaptation, CVPR"
    backbones = "BatchNorm"

    def __init__(self, network: Network, options: MSTN.Options, sizes: Sizes) -> None:
        assert isinstance(network.head, Head), "stage 1 leaves a plain one"
        layers = with_layers(network, nn.modules.batchnorm._BatchNorm, lambda x: PerDomain(copy.deepcopy(x), x))
        super().__init__(layers, options, sizes)
        self.plain = network
        self.source_neck = copy.deepcopy(network.head.neck)

    def served(self) -> Network:
        return self.plain

    def encode(self, batch: Batch) -> tuple[Output, ...]:
        head = self.plain.head
        assert isinstance(head, Head), "see above"
        source, target = (gather(x) for x in self.network.features_each(batch.x_s, batch.x_t))
        source = self.source_neck(source)
        return Output(source, head.classifier(source)), head.classify(target)
