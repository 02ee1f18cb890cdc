"""Exact two-way nearest neighbours (Eq. 3, 4) without the similarity matrix."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.runtime.ranks import gather, share

TILE_SIDE = {"cuda": 1 << 14, "cpu": 1 << 12}  # images of each side in a tile of similarities: 1 GiB, 64 MiB
LARGE = 1 << 36  # similarities in all from which on a GPU's tile is twice as wide: 4 GiB, beside features of GiBs
SEGMENT = 64  # neighbours whose maximum is tested before each of them is
ROUNDING = 2e-7  # error of a float32 sum over the square root of its terms: 25 times the largest of 40 million sums
SPLIT_ERROR = 3 * 2.0**-16  # error of a product of two bfloat16 parts: each side's rest, and small times small
CANDIDATES_PER_IMAGE = 8  # with more near-ties in a tile, as a collapsed model has, float32 decides
SETTLED_AT_ONCE = 1 << 14  # near-ties that are computed in float64 together


class Neighbours(NamedTuple):
    """The most similar image of the other domain, by index; ties go to the lowest index."""

    target_of_source: Tensor  # [Ns]
    source_of_target: Tensor  # [Nt]


def unit_rows(features: Tensor) -> Tensor:
    """Rows over their length, as the authors guard it: the cosine is then a plain product."""
    length: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / (length + 1e-8)


def two_way(source: Tensor, target: Tensor, tile: int | None = None) -> Neighbours:
    """Row and column argmax of `source @ target.T` in one sweep over tiles: memory O(Ns + Nt) plus one tile. Over
    several ranks each sweeps a share of the rows.

    Which of two nearly equal products is larger depends on the order of summation, so on the device and the tile. So
    whatever comes within the sweep's error of a maximum is computed again in float64: the answer is the same on every
    device, and a tie, as of duplicate images, goes to the lowest index. That also lets a GPU sweep in bfloat16."""
    mine = share(len(source))
    large = source.device.type == "cuda" and len(source) * len(target) >= LARGE
    tile = tile or TILE_SIDE[source.device.type] << large
    slack = 2 * sweep_error(source, target)  # the largest may be swept too low and another too high
    rows, columns = Best(mine.stop - mine.start, source.device), Best(len(target), source.device)
    for i in range(mine.start, mine.stop, tile):
        queries = source[i : min(i + tile, mine.stop)]
        for j in range(0, len(target), tile):
            keys = target[j : j + tile]
            search_tile(rows, columns, i - mine.start, i, j, queries, keys, slack)
    winner = gather(columns.exact[None]).argmax(dim=0, keepdim=True)  # [1, Nt] the first rank with the best one
    return Neighbours(gather(rows.index), gather(columns.index[None]).gather(0, winner).squeeze(0))


def search_tile(
    rows: "Best", columns: "Best", start: int, i: int, j: int, queries: Tensor, keys: Tensor, slack: float
) -> None:
    """Both sides of one tile; its similarities are gone when this returns, before the next ones are computed."""
    similarity = sweep(queries, keys)  # [tile, tile]
    rows.update(start, j, segments(similarity, 1), queries, keys, slack)
    columns.update(j, i, segments(similarity, 0), keys, queries, slack)


class Best:
    """Each image's best neighbour so far."""

    def __init__(self, images: int, device: torch.device) -> None:
        self.swept = torch.full((images,), -torch.inf, device=device)  # the similarity as swept
        self.exact = torch.full((images,), -torch.inf, dtype=torch.float64, device=device)
        self.index = torch.zeros(images, dtype=torch.long, device=device)

    def update(
        self, start: int, first: int, tile: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor, slack: float
    ) -> None:
        """Take in a tile: the images from `start` on with the keys from `first` on. Only similarities near to the best
        so far are computed exactly, and only the segments that hold such a one are searched."""
        here = slice(start, start + len(queries))
        similarity, highest = (x[: len(queries)] for x in tile)  # [Q, SEGMENT, segments], [Q, segments]
        self.swept[here] = torch.maximum(self.swept[here], highest.amax(dim=1))
        threshold = self.swept[here] - slack
        query, segment = (highest >= threshold[:, None]).nonzero(as_tuple=True)
        few = CANDIDATES_PER_IMAGE * (len(queries) + len(keys))
        if len(query) <= few:
            hit, place = (similarity[query, :, segment] >= threshold[query, None]).nonzero(as_tuple=True)
        if len(query) <= few and len(hit) <= few:
            value, key = settle_ties(queries, keys, query[hit], place * highest.shape[1] + segment[hit])
        else:
            value, key = (queries @ keys.T).max(dim=1)
            value = value.double()
        better = value > self.exact[here]
        self.exact[here] = torch.where(better, value, self.exact[here])
        self.index[here] = torch.where(better, key + first, self.index[here])


def segments(similarity: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """A tile cut into segments along `dim`, and the highest of each: [Q, SEGMENT, segments], [Q, segments]. A segment
    is strided and not a row of neighbours, because a GPU reduces over the last dimension slowly."""
    cut = similarity.unflatten(dim, (SEGMENT, -1))
    highest = cut.amax(dim=dim)
    return (cut, highest) if dim == 1 else (cut.permute(2, 0, 1), highest.T)


def settle_ties(queries: Tensor, keys: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Each query's largest product among the candidates (query, key), in float64, and the lowest such key."""
    pairs = zip(query.split(SETTLED_AT_ONCE), key.split(SETTLED_AT_ONCE), strict=True)
    precise = torch.cat([(queries[q].double() * keys[k].double()).sum(dim=1) for q, k in pairs])
    value = precise.new_full((len(queries),), -torch.inf).scatter_reduce(0, query, precise, "amax")
    first = precise == value[query]
    return value, key.new_full((len(queries),), len(keys)).scatter_reduce(0, query[first], key[first], "amin")


def sweep(queries: Tensor, keys: Tensor) -> Tensor:
    """Similarities to within `sweep_error`, [Q, K], filled up to whole segments with -inf."""
    q, k = (F.pad(x, (0, 0, 0, -len(x) % SEGMENT)) for x in (queries, keys))
    if q.device.type == "cuda":
        (high, low), (key_high, key_low) = bfloat16_parts(q), bfloat16_parts(k)
        left, right = torch.cat([high, high, low], dim=1), torch.cat([key_high, key_low, key_high], dim=1)
        similarity = torch.mm(left, right.T, out_dtype=torch.float32)
    else:
        similarity = q @ k.T
    similarity[len(queries) :] = -torch.inf
    similarity[:, len(keys) :] = -torch.inf
    return similarity


def bfloat16_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two bfloat16 tensors, to within 2^-16 of each element: three products of such parts run several
    times faster on a GPU's matrix units than one in float32."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def sweep_error(source: Tensor, target: Tensor) -> float:
    """The largest possible error of a swept similarity."""
    longest = [float(torch.linalg.vector_norm(x, dim=1).max()) if len(x) else 0.0 for x in (source, target)]
    terms, left_out = (3 * source.shape[1], SPLIT_ERROR) if source.device.type == "cuda" else (source.shape[1], 0.0)
    return float((ROUNDING * terms**0.5 + left_out) * longest[0] * longest[1])
