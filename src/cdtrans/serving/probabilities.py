"""Probabilities from calibrated logits, and a score for images that belong to none of the classes."""

import numpy as np


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[N, K] -> [N, K] softmax."""
    p = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def no_class(source_only: np.ndarray) -> np.ndarray:
    """Logits of the source-only model [N, K] -> [N]: 1 less its largest probability. Adaptation makes a model sure of
    every target image, whether it belongs to a class or not; the source-only model has seen none of them
    (docs/results/unknown.md)."""
    return np.asarray(1 - probabilities(source_only).max(axis=1))
