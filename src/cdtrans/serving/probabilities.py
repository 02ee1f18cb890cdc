"""Probabilities from logits, the temperature that calibrates them, and a score for images of none of the classes."""

import math

import numpy as np

COLDEST, HOTTEST = 0.05, 50.0
STEPS = 40  # of the search for a temperature


def calibrated(logits: np.ndarray, temperature: float) -> np.ndarray:
    """[N, K] -> [N, K] in double precision, whatever was recorded: equal wherever it is computed."""
    return np.asarray(logits.astype(np.float64) / temperature)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[N, K] -> [N, K] softmax."""
    p = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def temperature(logits: np.ndarray, accuracy: float) -> float:
    """At which a model with these logits [N, K] is, on average, as confident as it is right. Confidence falls as the
    temperature rises, so halving the interval finds it."""
    low, high = COLDEST, HOTTEST
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        confidence = float(probabilities(calibrated(logits, middle)).max(axis=1).mean())
        low, high = (middle, high) if confidence > accuracy else (low, middle)
    return math.sqrt(low * high)


def no_class(source_only: np.ndarray) -> np.ndarray:
    """Logits of the source-only model [N, K] -> [N]: 1 less its largest probability. Adaptation makes a model sure of
    every target image, whether it belongs to a class or not; the source-only model has seen none of them
    (docs/results/unknown.md)."""
    return np.asarray(1 - probabilities(source_only).max(axis=1))
