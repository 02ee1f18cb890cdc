"""Hold out a part of the source, to score the model on labels it was not trained on."""

import numpy as np

SHARE = 0.1
IMAGES_PER_CLASS = 50  # on average; a smaller source needs all its images, and a tenth of it would say little


def holdout_share(setting: float | str, images: int, classes: int) -> float:
    """The share to hold out; 'auto' depends on the size of the source."""
    if setting == "auto":
        return SHARE if images >= IMAGES_PER_CLASS * classes else 0.0
    return float(setting)


def why_none(setting: float | str, largest: int) -> str:
    """Why no image is held out although the setting is not 0; `largest` is the size of the largest class."""
    if setting == "auto":
        return (
            f"No source image is held out: there are fewer than {IMAGES_PER_CLASS} per class on average "
            f"(use --holdout {SHARE:g} to hold some out anyway)."
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
