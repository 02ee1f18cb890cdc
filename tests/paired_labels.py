"""A small target with known labels, and a method of known pairs on it."""

from typing import Any

import torch
from torch import Tensor, nn

from cdtrans.methods.base import Round, Sizes
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains, Proposals
from cdtrans.paper.known_pairs import KnownPairs
from cdtrans.paper.pair_labels import UNKNOWN

LABELS = torch.tensor([2, 0, 1, 1, 2, 0, 2, 2])  # the source's; class 3 has no image there
TRUE = torch.tensor([0, 1, 2, 2, 1, 0, 3, UNKNOWN, 2, 1])
KNOWN = [0, 1, 2, 3, 4, 5, 8, 9]


def domains_of(labels: Tensor = LABELS, targets: int = len(TRUE), seed: int = 0) -> Domains:
    g = torch.Generator().manual_seed(seed)
    source, target = (Encoded(*torch.randn(2, n, 4, generator=g)) for n in (len(labels), targets))
    return Domains(source, labels, target)


def planned(kind: type[KnownPairs], domains: Domains, true: Tensor, **options: Any) -> Proposals:
    """As in a run: the method reads the labels when it plans."""
    sizes = Sizes(4, len(domains.source_labels), len(true))
    method = kind.with_labels(lambda: true)(nn.Identity(), kind.Options(**options), sizes)  # type: ignore[arg-type]
    return method.plan(domains, Round(1, 1, 1), torch.Generator())
