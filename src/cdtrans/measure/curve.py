"""The probability that a target image belongs to no class, from a person's answers about some images: a logistic curve
in the score of `pairing.occurring`, whose mean is 0 and whose variance is 1."""

import numpy as np

from cdtrans.record.outcome import NoClassCurve

SLOPE = 1.5  # expected before any answer; the intercept's expectation is 0
CERTAINTY = np.array([0.1, 0.3])  # how certain intercept and slope are before any answer: so little that a dozen decide
LEAST_SLOPE = 0.1  # a higher score never speaks for a class
STEPS, LONGEST_STEP = 50, 1.0  # Newton's method
CUTS = np.linspace(0.01, 0.99, 60)  # ranks of the scores that are tried as the cut


def fit_curve(scores: np.ndarray, answered: np.ndarray, none: np.ndarray) -> NoClassCurve | None:
    """From the scores of all images, [n], and the answers about some: their scores [m], and whether they belong to no
    class, [m]. None if every one belongs to a class: then nothing speaks for a cut."""
    if not none.any():
        return None
    x, prior = np.stack([np.ones(len(answered)), answered]), np.array([0.0, SLOPE])  # [2, m]
    line = np.array([0.0, 1.0])
    for _ in range(STEPS):
        p = logistic(line @ x)
        gradient = x @ (none - p) - CERTAINTY * (line - prior)
        curvature = (x * (p * (1 - p))) @ x.T + np.diag(CERTAINTY)
        line = line + np.clip(np.linalg.solve(curvature, gradient), -LONGEST_STEP, LONGEST_STEP)
        line[1] = max(line[1], LEAST_SLOPE)
    p = logistic(line[0] + line[1] * scores)
    return NoClassCurve(float(line[0]), float(line[1]), best_cut(scores, p), float(p.mean()))


def logistic(x: np.ndarray) -> np.ndarray:
    p: np.ndarray = 1 / (1 + np.exp(-x))
    return p


def best_cut(scores: np.ndarray, p: np.ndarray) -> float:
    """The cut with the largest expected H-score, the harmonic mean of two shares: images of a class that are kept, and
    images of no class that are rejected, by the probabilities p [n] of belonging to none."""
    cuts = np.quantile(scores, CUTS)
    rejected = scores > cuts[:, None]  # [cuts, n]
    kept, found = (~rejected) @ (1 - p) / max((1 - p).sum(), 1e-9), rejected @ p / max(p.sum(), 1e-9)
    return float(cuts[np.argmax(2 * kept * found / np.maximum(kept + found, 1e-9))])
