"""A part of the source that is not trained on: what the model does with labels it has not seen."""

import numpy as np

SHARE = 0.1
IMAGES_PER_CLASS = 50  # on average; a source with fewer needs them all, and a tenth of it would say little


def holdout_share(setting: float | str, images: int, classes: int) -> float:
    """What 'auto' means for a source."""
    if setting == "auto":
        return SHARE if images >= IMAGES_PER_CLASS * classes else 0.0
    return float(setting)


def why_none(setting: float | str, largest: int) -> str:
    """Why nothing of a source, whose largest class has so many images, is held out, although the setting is not 0."""
    if setting == "auto":
        return (
            f"No source image is held out to be watched: there are fewer than {IMAGES_PER_CLASS} a class on average "
            f"(--holdout {SHARE:g} does it all the same)."
        )
    return (
        f"No source image is held out: --holdout {setting:g} is less than one image of the largest class, which has "
        f"{largest}; give a larger share, or 0."
    )


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
