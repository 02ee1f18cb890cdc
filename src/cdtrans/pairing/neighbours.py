"""Exact two-way nearest neighbours (Eq. 3, 4) without the similarity matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.ranks import gather, share

BLOCK_ELEMENTS = 1 << 24  # similarities held at once: 64 MiB in float32


class Neighbours(NamedTuple):
    """The most similar image of the other domain, by index; ties go to the lowest index."""

    target_of_source: Tensor  # [Ns]
    source_of_target: Tensor  # [Nt]


def normalised(features: Tensor) -> Tensor:
    """Rows over their length, as the authors guard it: the cosine is then a plain product."""
    length: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / (length + 1e-8)


def two_way(source: Tensor, target: Tensor, block_elements: int = BLOCK_ELEMENTS) -> Neighbours:
    """Row and column argmax of `source @ target.T` in one sweep over blocks of source rows: memory O(Ns + Nt) plus one
    block. A later block replaces a target's neighbour only if it is strictly more similar: the lowest index wins.
    Over several ranks each sweeps a share of the rows."""
    mine = share(len(source))
    target_of_source = torch.empty(mine.stop - mine.start, dtype=torch.long, device=source.device)
    source_of_target = torch.zeros(len(target), dtype=torch.long, device=source.device)
    best = torch.full((len(target),), -torch.inf, dtype=source.dtype, device=source.device)
    rows = max(1, block_elements // max(1, len(target)))
    for start in range(mine.start, mine.stop, rows):
        similarity = source[start : min(start + rows, mine.stop)] @ target.T  # [rows, Nt]
        target_of_source[start - mine.start : start - mine.start + rows] = similarity.argmax(dim=1)
        value = similarity.amax(dim=0)
        better = (value > best).nonzero().squeeze(1)  # fewer with every block: only these need an index
        best[better] = value[better]
        source_of_target[better] = similarity[:, better].argmax(dim=0) + start
    everyones = gather(best[None]).argmax(dim=0)  # [Nt] the first rank that found the best
    source_of_target = gather(source_of_target[None]).gather(0, everyones[None]).squeeze(0)
    return Neighbours(gather(target_of_source), source_of_target)
