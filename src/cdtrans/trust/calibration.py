"""Probabilities that mean something, without labels: the temperature at which a model is, on average over the target,
as confident as it is estimated to be right."""

import math

from torch import Tensor

COLDEST, HOTTEST = 0.05, 50.0
STEPS = 50  # of the search


def temperature(logits: Tensor, accuracy: float) -> float:
    """For logits [N, K]: mean confidence falls as the temperature rises, so halving the interval finds it."""
    low, high = COLDEST, HOTTEST
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        confidence = float((logits / middle).softmax(dim=1).amax(dim=1).mean())
        low, high = (middle, high) if confidence > accuracy else (low, middle)
    return math.sqrt(low * high)
