"""A score for images that belong to none of the classes."""

import numpy as np


def no_class(logits: np.ndarray) -> np.ndarray:
    """[N, K] -> [N]"""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return 1 - p.max(axis=1) / p.sum(axis=1)
