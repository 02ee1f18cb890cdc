"""How a model's predictions spread over the classes. Hard predictions, because soft averages hide a collapse."""

from collections.abc import Sequence
from typing import NamedTuple

MOST = 0.5  # share of the images in one class, above which most of a target of several classes must be wrong
TIMES_FAIR = 3.0  # ... and so many times the class's fair share: two or three classes may well be this uneven


class Crowded(NamedTuple):
    """A class into which a model puts far too many images."""

    label: int
    share: float  # of the images
    fair: float  # the class's share of the source, or 1 / classes if that is more


def crowded_class(predicted: Sequence[int], source: Sequence[int]) -> Crowded | None:
    """[K] images predicted as each class, [K] source images of each class -> the class that holds more than half of the
    images and more than three times its fair share, or None."""
    images, labelled = sum(predicted), sum(source)
    if not images:
        return None
    label = max(range(len(predicted)), key=lambda k: predicted[k])
    share = predicted[label] / images
    fair = max(1 / len(predicted), source[label] / max(labelled, 1))
    return Crowded(label, share, fair) if share > MOST and share > TIMES_FAIR * fair else None
