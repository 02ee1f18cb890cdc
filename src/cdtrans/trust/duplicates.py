"""Find copies of images: exact ones, and near ones that differ in compression, size, brightness or contrast.

Near copies are found by their thumbnails, not by a perceptual hash: in the white background of a product photo the bits
of a hash are noise, so copies differ and different images agree. A thumbnail becomes a unit vector without its
brightness, its contrast and what all images share (a background, a round mask). Two images whose vectors correlate by
LIKENESS or more are near copies. Crops, mirror images and other views of an object are not.

The search is exact but does not build the whole matrix. Projections only shrink distances, so pairs that are too far
apart on the first principal axis, then on AXES of them, are skipped; the others are compared in full. The work grows
with the square of the images: 4,000 take 0.1 s, 200,000 a minute on one core. Memory is a kilobyte per image.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np

LIKENESS = 0.99  # Office-31: copies at JPEG quality 30 or half the size have 0.995, two classes less than 0.985
PLAIN = 4.0  # grey levels of standard deviation; below it rounding alone uses up most of what LIKENESS allows
ENOUGH_TO_SHARE = 100  # images from which on the mean shows what they share and not single images
AXES = 32  # they contain three quarters of the variance of photographs
AXES_FROM = 200  # images that the axes are computed from; worse axes cost time but lose no pair
TILE_ROWS, TILE_COLUMNS = 512, 8192  # a tile of the comparison: 16 MB
LOOKALIKES = 256  # compared in full per image and tile; only a video of a still object has more
SLACK = 1e-4  # rounding of float32 in a squared distance


def exact_groups(digests: Sequence[str] | np.ndarray) -> np.ndarray:
    """[N] -> [N]: equal numbers for equal pixels; a group is numbered after its first image."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return np.asarray(first[group])


def near_groups(digests: Sequence[str], thumbnails: np.ndarray) -> np.ndarray:
    """[N] -> [N]: equal numbers for images that are exact or near copies, directly or through others."""
    group = exact_groups(digests)
    distinct = np.unique(group)
    pairs = distinct[near_pairs(thumbnails[distinct])]
    first = np.arange(len(group))  # first image of each one's group, as far as it is known
    while np.ptp(first[pairs], axis=1).any():
        np.minimum.at(first, first[pairs], first[pairs].min(axis=1, keepdims=True))
        first = first[first]
    return np.asarray(first[group])


class ThumbnailVectors:
    """Thumbnails as unit vectors, computed on demand: as float32 they would take three times the memory of everything
    else here."""

    def __init__(self, thumbnails: np.ndarray) -> None:
        self.thumbnails = thumbnails
        self.shared = np.zeros(thumbnails[0].size if len(thumbnails) else 0, np.float32)
        if len(thumbnails) >= ENOUGH_TO_SHARE:
            total = sum(_unit(thumbnails[part])[0].sum(axis=0) for part in _parts(len(thumbnails)))
            self.shared = total / np.float32(len(thumbnails))

    def vectors(self, which: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """[n, D] of unit length, and [n] their original standard deviations in grey levels."""
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
    """uint8 [N, side, side, 3] -> [P, 2], i < j: every pair whose vectors correlate by LIKENESS or more. Images of
    almost one colour are left out, because their correlation is noise."""
    if len(thumbnails) < 2:
        return np.empty((0, 2), np.int64)
    looks = ThumbnailVectors(thumbnails)
    axes = looks.axes()
    parts = [(vectors @ axes, spread) for vectors, spread in map(looks.vectors, _parts(len(thumbnails)))]
    short = np.concatenate([p for p, _ in parts])  # [N, AXES]
    order = np.argsort(short[:, 0], kind="stable")
    order = order[np.concatenate([s for _, s in parts])[order] >= PLAIN]
    pairs = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(short[order]):
        pair = order[candidates]
        pairs.append(pair[_correlation(looks, pair) >= LIKENESS])
    near = np.sort(np.concatenate(pairs), axis=1)
    return near[np.lexsort((near[:, 1], near[:, 0]))]


def _candidates(short: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs of rows of `short` [n, AXES], sorted by its first column, that may be close enough: blocks of [P, 2]."""
    radius = sqrt(2 - 2 * LIKENESS)  # the distance of two unit vectors
    squared = (short**2).sum(axis=1)
    ends = np.searchsorted(short[:, 0], short[:, 0] + radius + SLACK, side="right")
    for top in range(0, len(short), TILE_ROWS):
        rows = slice(top, min(top + TILE_ROWS, len(short)))
        for left in range(top, int(ends[rows.stop - 1]), TILE_COLUMNS):
            columns = slice(left, min(left + TILE_COLUMNS, int(ends[rows.stop - 1])))
            distance = squared[rows, None] + squared[None, columns] - 2 * short[rows] @ short[columns].T
            i, j = np.nonzero(distance <= radius**2 + SLACK)
            i, j = i + top, j + left
            i, j = i[i < j], j[i < j]
            rank = np.arange(len(i)) - np.searchsorted(i, i)  # among the candidates of its row
            yield np.stack([i, j], axis=1)[rank < LOOKALIKES]


def _correlation(looks: ThumbnailVectors, pairs: np.ndarray) -> np.ndarray:
    """[P, 2] -> [P]"""
    parts = [pairs[part] for part in _parts(len(pairs))]
    each = [(looks.vectors(p[:, 0])[0] * looks.vectors(p[:, 1])[0]).sum(axis=1) for p in parts]
    return np.concatenate(each) if each else np.empty(0, np.float32)


def _unit(thumbnails: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors without brightness and contrast: [n, D] of mean 0 and length 1, and [n] the original deviations."""
    values = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    values -= values.mean(axis=1, keepdims=True)
    spread = values.std(axis=1)
    return values / np.maximum(spread * sqrt(values.shape[1]), np.finfo(np.float32).tiny)[:, None], spread


def _parts(count: int) -> list[slice]:
    return [slice(begin, begin + TILE_COLUMNS) for begin in range(0, count, TILE_COLUMNS)]
