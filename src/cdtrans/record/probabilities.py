"""Probabilities of a run's labels: from logits by a temperature, and how many of the most confident ones are right.

The expected accuracy of a set of labels is the mean of their probabilities, so it is as good as these are calibrated.
The probability that an image belongs to no class is a logistic curve in the score of `pairing.occurring`, whose mean is
0 and whose variance is 1, fitted to a person's answers."""

import math
from dataclasses import dataclass

import numpy as np

from cdtrans.errors import SettingsError
from cdtrans.record.outcome import NoClassCurve

COLDEST, HOTTEST = 0.05, 50.0
STEPS = 40  # steps of the search for a temperature
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
SLOPE = 1.5  # the curve's slope expected before any answer; the intercept's expectation is 0
CERTAINTY = np.array([0.1, 0.3])  # how certain intercept and slope are before any answer: so little that a dozen decide
LEAST_SLOPE = 0.1  # a higher score never speaks for a class
CURVE_STEPS, LONGEST_STEP = 50, 1.0  # Newton's method
CUTS = np.linspace(0.01, 0.99, 60)  # ranks of the scores that are tried as the cut


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


def no_class(score: np.ndarray, curve: NoClassCurve | None) -> np.ndarray:
    """[N] scores -> from 0 to 1: the probability that an image belongs to no class, if answers have given a curve.
    Without one it only ranks the images."""
    intercept, slope = (0.0, 1.0) if curve is None else (curve.intercept, curve.slope)
    return logistic(intercept + slope * score.astype(np.float64))


def logistic(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def no_class_cut(curve: NoClassCurve) -> float:
    """The probability above which an image is taken for one of no class."""
    return float(no_class(np.array(curve.cut), curve))


def fit_curve(scores: np.ndarray, answered: np.ndarray, none: np.ndarray) -> NoClassCurve | None:
    """The curve from the scores of all images, [n], and the answers about some: their scores, [m], and whether they
    belong to no class, [m]. None if every one belongs to a class: then nothing speaks for a cut."""
    if not none.any():
        return None
    x, prior = np.stack([np.ones(len(answered)), answered]), np.array([0.0, SLOPE])  # [2, m]
    line = np.array([0.0, 1.0])
    for _ in range(CURVE_STEPS):
        p = logistic(line @ x)
        gradient = x @ (none - p) - CERTAINTY * (line - prior)
        curvature = (x * (p * (1 - p))) @ x.T + np.diag(CERTAINTY)
        line = line + np.clip(np.linalg.solve(curvature, gradient), -LONGEST_STEP, LONGEST_STEP)
        line[1] = max(line[1], LEAST_SLOPE)
    p = logistic(line[0] + line[1] * scores)
    return NoClassCurve(float(line[0]), float(line[1]), best_cut(scores, p), float(p.mean()))


def best_cut(scores: np.ndarray, p: np.ndarray) -> float:
    """The cut with the largest expected H-score, the harmonic mean of two shares: images of a class that are kept, and
    images of no class that are rejected, by the probabilities p [n] of belonging to none."""
    cuts = np.quantile(scores, CUTS)
    rejected = scores > cuts[:, None]  # [cuts, n]
    kept, found = (~rejected) @ (1 - p) / max((1 - p).sum(), 1e-9), rejected @ p / max(p.sum(), 1e-9)
    return float(cuts[np.argmax(2 * kept * found / np.maximum(kept + found, 1e-9))])


@dataclass(frozen=True)
class Kept:
    """The labels whose probability is at least `threshold`."""

    threshold: float
    share: float  # share of the images that keep their label
    accuracy: float  # expected of these


def threshold_for_share(confidences: np.ndarray, share: float) -> Kept:
    """The surest `share` of the images; a few more if several are equally sure."""
    if not 0 < share <= 1:
        raise SettingsError(
            "keep-share",
            f"The share to keep must be above 0 and at most 1, not {share:g}; 0.8 is the most confident 80%.",
        )
    surest = np.sort(confidences)[::-1]
    return _first(surest, max(1, round(share * len(surest))))


def threshold_for_accuracy(confidences: np.ndarray, accuracy: float) -> Kept:
    """As many of the surest images as can be kept with this accuracy expected of them."""
    if not 0 < accuracy <= 1:
        raise SettingsError(
            "keep-accuracy", f"The accuracy must be above 0 and at most 1, not {accuracy:g}; 0.95 is 95%."
        )
    surest = np.sort(confidences)[::-1]
    means = surest.cumsum() / np.arange(1, len(surest) + 1)
    ends = np.append(surest[1:] < surest[:-1], True)  # where no equally sure image follows
    enough = np.flatnonzero(ends & (means >= accuracy))
    if not len(enough):
        highest = np.floor(1000 * surest[0]) / 10  # rounded down, so that this accuracy can be asked for
        raise SettingsError(
            "keep-accuracy",
            f"An accuracy of {accuracy:.1%} cannot be expected of any part of the images: of the most confident it is "
            f"{highest:g}%; give a lower --accuracy.",
        )
    return _first(surest, int(enough[-1]) + 1)


def accuracy_by_share(confidences: np.ndarray) -> tuple[Kept, ...]:
    """Expectations of all images, of the surest 90%, and so on."""
    return tuple(threshold_for_share(confidences, share) for share in SHARES)


def _first(surest: np.ndarray, count: int) -> Kept:
    """The first of confidences in descending order. The threshold lies half-way to the next one, so that rounding does
    not decide; all images are kept whatever their probability."""
    threshold = 0.0 if count == len(surest) else float(surest[count - 1] + surest[count]) / 2
    kept = surest[surest >= threshold]
    return Kept(threshold, len(kept) / len(surest), float(kept.mean()))
