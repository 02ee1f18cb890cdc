"""Which images are the same picture: to the last pixel, or but for compression, size, brightness and contrast.

Near duplicates are told by their thumbnails, not by a hash of signs: in the white background of a product photo such
bits are noise, so that copies differ and strangers agree. A thumbnail becomes a unit vector, freed of its brightness
and contrast and of what all pictures share (a background, a round mask), and two vectors that correlate by LIKENESS are
the same picture. Crops, mirror images and other views of one thing are not.

The search compares all with all and yet never builds the matrix. A distance can only shrink when vectors are projected,
so pairs that are too far apart along the first principal axis, then in AXES of them, need not be looked at; those that
are left are compared in full. The work grows with the square of the images: 4,000 take 0.1 s, 200,000 a minute of one
core, and memory is a kilobyte an image.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np

LIKENESS = 0.99  # in Office-31 copies at JPEG quality 30 or half the size have 0.995, two classes less than 0.985
PLAIN = 4.0  # grey levels of spread, below which a thumbnail's rounding alone takes up most of what LIKENESS allows
ENOUGH_TO_SHARE = 100  # images whose mean shows what all share and no longer any one of them
AXES = 32  # hold three quarters of the variance of photographs
AXES_FROM = 200  # images the axes are found from; worse axes cost time, never a pair
ROWS, COLUMNS = 512, 8192  # a tile of the comparison: 16 MB
LOOKALIKES = 256  # compared in full for one image and tile; only a film of a thing that does not move has more
SLACK = 1e-4  # of float32 in a squared distance


def exact_groups(digests: Sequence[str]) -> np.ndarray:
    """[N] -> [N]: equal numbers for equal pixels; a group is numbered after its first image."""
    first: dict[str, int] = {}
    return np.array([first.setdefault(digest, n) for n, digest in enumerate(digests)], dtype=np.int64)


def near_groups(digests: Sequence[str], thumbnails: np.ndarray) -> np.ndarray:
    """[N] -> [N]: equal numbers for pictures that are equal or near duplicates, directly or through others."""
    group = exact_groups(digests)
    distinct = np.unique(group)
    pairs = distinct[near_pairs(thumbnails[distinct])]  # [P, 2]
    leader = np.arange(len(group))

    def find(n: int) -> int:
        while leader[n] != n:
            leader[n] = leader[leader[n]]
            n = int(leader[n])
        return n

    for a, b in pairs.tolist():
        low, high = sorted((find(a), find(b)))
        leader[high] = low
    return np.array([find(n) for n in group.tolist()], dtype=np.int64)


class Looks:
    """Thumbnails as unit vectors, made when they are asked for: as float32 they would take three times the memory of
    everything else here."""

    def __init__(self, thumbnails: np.ndarray) -> None:
        self.thumbnails = thumbnails
        self.shared = np.zeros(thumbnails[0].size if len(thumbnails) else 0, np.float32)
        if len(thumbnails) >= ENOUGH_TO_SHARE:
            total = sum(_unit(thumbnails[part])[0].sum(axis=0) for part in _parts(len(thumbnails)))
            self.shared = total / np.float32(len(thumbnails))

    def vectors(self, which: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """[n, D] of unit length, and [n] the spread that each had, in grey levels."""
        unit, spread = _unit(self.thumbnails[which])
        own = unit - self.shared
        length = np.linalg.norm(own, axis=1)
        return own / np.maximum(length, np.finfo(np.float32).tiny)[:, None], spread * length

    def axes(self) -> np.ndarray:
        """[D, AXES or fewer] orthonormal: the leading principal directions."""
        step = -(-len(self.thumbnails) // AXES_FROM)
        sample, _ = self.vectors(slice(None, None, step))
        _, _, directions = np.linalg.svd(sample - sample.mean(axis=0), full_matrices=False)
        return np.asarray(directions[:AXES].T)


def near_pairs(thumbnails: np.ndarray) -> np.ndarray:
    """uint8 [N, side, side, 3] -> [P, 2], i < j: every pair whose vectors correlate by LIKENESS or more. Pictures of
    almost one colour have no likeness to speak of and are left out."""
    if len(thumbnails) < 2:
        return np.empty((0, 2), np.int64)
    looks = Looks(thumbnails)
    axes = looks.axes()
    parts = [(vectors @ axes, spread) for vectors, spread in map(looks.vectors, _parts(len(thumbnails)))]
    short = np.concatenate([p for p, _ in parts])  # [N, AXES]
    order = np.argsort(short[:, 0], kind="stable")
    order = order[np.concatenate([s for _, s in parts])[order] >= PLAIN]
    pairs = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(short[order]):
        pair = order[candidates]
        pairs.append(pair[_correlation(looks, pair) >= LIKENESS])
    found = np.sort(np.concatenate(pairs), axis=1)
    return found[np.lexsort((found[:, 1], found[:, 0]))]


def _candidates(short: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs of rows of `short` [n, AXES], sorted by its first column, that may be close enough: blocks of [P, 2]."""
    radius = sqrt(2 - 2 * LIKENESS)  # the distance of two unit vectors
    squared = (short**2).sum(axis=1)
    ends = np.searchsorted(short[:, 0], short[:, 0] + radius + SLACK, side="right")
    for top in range(0, len(short), ROWS):
        rows = slice(top, min(top + ROWS, len(short)))
        for left in range(top, int(ends[rows.stop - 1]), COLUMNS):
            columns = slice(left, min(left + COLUMNS, int(ends[rows.stop - 1])))
            distance = squared[rows, None] + squared[None, columns] - 2 * short[rows] @ short[columns].T
            i, j = np.nonzero(distance <= radius**2 + SLACK)
            i, j = i + top, j + left
            i, j = i[i < j], j[i < j]
            rank = np.arange(len(i)) - np.searchsorted(i, i)  # among the candidates of its row
            yield np.stack([i, j], axis=1)[rank < LOOKALIKES]


def _correlation(looks: Looks, pairs: np.ndarray) -> np.ndarray:
    """[P, 2] -> [P]"""
    parts = [pairs[part] for part in _parts(len(pairs))]
    each = [(looks.vectors(p[:, 0])[0] * looks.vectors(p[:, 1])[0]).sum(axis=1) for p in parts]
    return np.concatenate(each) if each else np.empty(0, np.float32)


def _unit(thumbnails: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Freed of brightness and contrast: [n, D] of mean 0 and length 1, and [n] the standard deviation it had."""
    values = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    values -= values.mean(axis=1, keepdims=True)
    spread = values.std(axis=1)
    return values / np.maximum(spread * sqrt(values.shape[1]), np.finfo(np.float32).tiny)[:, None], spread


def _parts(count: int) -> list[slice]:
    return [slice(begin, begin + COLUMNS) for begin in range(0, count, COLUMNS)]
