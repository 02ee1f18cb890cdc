"""Exact two-way nearest neighbours (Eq. 3, 4) without the similarity matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.ranks import gather, share

BLOCK_ELEMENTS = 1 << 24  # similarities held at once: 64 MiB in float32
ROUNDING = 2e-7  # of a float32 sum, times the square root of its terms: 25 times the largest of 40 million seen
CANDIDATES_PER_IMAGE = 32  # more near-ties than this in a block, as of a collapsed model, are left to float32


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
    block. Over several ranks each sweeps a share of the rows.

    Which of two nearly equal products is larger depends on the order of summation, so on the device and the size of the
    block. So whatever comes within rounding of a maximum is computed again in float64: the answer is the same on every
    device, and a tie, as of duplicate images, goes to the lowest index."""
    mine = share(len(source))
    slack = rounding(source, target)
    target_of_source = torch.empty(mine.stop - mine.start, dtype=torch.long, device=source.device)
    source_of_target = torch.zeros(len(target), dtype=torch.long, device=source.device)
    best = torch.full((len(target),), -torch.inf, dtype=source.dtype, device=source.device)  # as swept
    exact = torch.full((len(target),), -torch.inf, dtype=torch.float64, device=source.device)
    rows = max(1, block_elements // max(1, len(target)))
    for start in range(mine.start, mine.stop, rows):
        block = source[start : min(start + rows, mine.stop)]
        similarity = block @ target.T  # [rows, Nt]
        found, _ = settle(similarity, similarity.amax(dim=1) - slack, block, target)
        target_of_source[start - mine.start : start - mine.start + rows] = found
        value = similarity.amax(dim=0)
        best = torch.maximum(best, value)
        near = (value >= best - slack).nonzero().squeeze(1)  # fewer with every block: only these can change
        found, precise = settle(similarity[:, near].T, best[near] - slack, target[near], block)
        better = precise > exact[near]
        exact[near[better]] = precise[better]
        source_of_target[near[better]] = found[better] + start
    winner = gather(exact[None]).argmax(dim=0, keepdim=True)  # [1, Nt] the first rank that found the best
    return Neighbours(gather(target_of_source), gather(source_of_target[None]).gather(0, winner).squeeze(0))


def rounding(source: Tensor, target: Tensor) -> float:
    """By how much two sums of the same products may differ."""
    longest = [float(torch.linalg.vector_norm(x, dim=1).max()) if len(x) else 0.0 for x in (source, target)]
    return float(ROUNDING * source.shape[1] ** 0.5 * longest[0] * longest[1])


def settle(similarity: Tensor, threshold: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of [Q, K] similarities, the lowest of its most similar keys and that similarity in float64, among
    those that reach the row's threshold."""
    query, key = (similarity >= threshold[:, None]).nonzero(as_tuple=True)
    if len(query) > CANDIDATES_PER_IMAGE * (len(queries) + len(keys)):
        value, found = similarity.max(dim=1)
        return found, value.double()
    precise = (queries[query].double() * keys[key].double()).sum(dim=1)
    value = precise.new_full((len(queries),), -torch.inf).scatter_reduce(0, query, precise, "amax")
    first = precise == value[query]
    found = key.new_full((len(queries),), len(keys)).scatter_reduce(0, query[first], key[first], "amin")
    return found, value
