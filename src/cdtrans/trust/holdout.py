"""A part of the source that is not trained on: what the model does with labels it has not seen."""

import numpy as np

SHARE = 0.1
IMAGES_PER_CLASS = 50  # on average; a source with fewer needs them all, and a tenth of it would say little


def holdout_share(setting: float | str, images: int, classes: int) -> float:
    """What 'auto' means for a source."""
    if setting == "auto":
        return SHARE if images >= IMAGES_PER_CLASS * classes else 0.0
    return float(setting)


def split(labels: tuple[int, ...], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Positions to train on and to hold out: the share of each class, rounded down, so that no class is left empty."""
    generator = np.random.default_rng([seed, len(labels)])
    array = np.asarray(labels)
    held: list[int] = []
    for label in np.unique(array):
        members = generator.permutation(np.flatnonzero(array == label))
        held += members[: int(share * len(members))].tolist()
    chosen = set(held)
    return [i for i in range(len(labels)) if i not in chosen], sorted(held)
