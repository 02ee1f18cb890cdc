"""Inference from labelled images: 95% intervals of an accuracy, and which of two models is better.

The accuracy on a finite set of images comes from few labels. The images are divided into strata by a score that needs
no labels, the model's confidence, and labels are drawn at random in each. Labels then need not show how accuracy
differs between strata, which makes the interval narrower than Wilson's (docs/results/labels.md compares it with
prediction-powered inference and others). The number of correct images among those without a label is beta-binomial in
each stratum, and the sum over strata is computed exactly: no normal approximation, valid for few labels, and exact when
every image has a label.
"""

from functools import cache
from math import ceil, sqrt

import numpy as np

from cdtrans.record.outcome import Interval

CONFIDENCE_LEVEL = 0.95
# Pseudo-labels per limit, spread over the strata: half a wrong one for the lower limit, half a right one for the upper
# limit. Between Jeffreys' interval (half of both for both limits) and Clopper and Pearson's (a whole one).
PSEUDO_COUNT = 0.5
POWER_QUANTILE = 0.8416  # quantile of the normal distribution: the next test decides with a chance of 80%
TWO_SIDED_QUANTILE = 1.96
FEWEST_TO_DECIDE = 6  # images on which exactly one model is right: 6 to 0 is the first result with p below 0.05


@cache
def wilson(right: int, images: int) -> Interval:
    """Wilson's score interval of a proportion, which holds for few images and near 0 and 1 too."""
    from scipy.stats import binomtest

    limits = binomtest(right, images).proportion_ci(CONFIDENCE_LEVEL, "wilson")
    return Interval(float(limits.low), float(limits.high))


def class_mean_interval(right: np.ndarray, images: np.ndarray) -> Interval:
    """The mean accuracy of the classes that have images, [K] correct ones and all: the distances to the limits of each
    class's Wilson interval add up as squares (Zou & Donner 2008)."""
    counts = [(r, n) for r, n in zip(right.tolist(), images.tolist(), strict=True) if n]
    limits = np.array([(r / n, wilson(r, n).low, wilson(r, n).high) for r, n in counts])  # [classes, 3]
    shares, low, high = limits.T
    mean, down, up = shares.mean(), sqrt(((shares - low) ** 2).sum()), sqrt(((high - shares) ** 2).sum())
    return Interval(float(max(0.0, mean - down / len(counts))), float(min(1.0, mean + up / len(counts))))


def sign_test(wins: int, losses: int) -> float:
    """McNemar's test, exact and two-sided: how likely so uneven a split of the images on which only one of two models
    is right would be if neither were better."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def strata_for(labels: int) -> int:
    """The number of strata that these labels can fill: more than the square root leave too few labels in each to see
    its spread (measured in docs/results/labels.md)."""
    return max(1, round(sqrt(labels)) - 1)


def strata(score: np.ndarray, count: int) -> np.ndarray:
    """[N] the stratum of each image: equally many images in each, the lowest scores first."""
    place = np.empty(len(score), dtype=np.int64)
    place[np.argsort(score, kind="stable")] = np.arange(len(score))
    return place * count // len(score)


def accuracy_interval(score: np.ndarray, labelled: np.ndarray, correct: np.ndarray) -> tuple[float, Interval]:
    """An estimate of the accuracy on all N images, and its interval. `score`: [N] any score, known for all. `labelled`:
    [n] positions of the labelled images, a random sample, all with the same chance. `correct`: [n] whether the model is
    right on each."""
    for count in range(strata_for(len(labelled)), 0, -1):
        stratum = strata(score, count)
        known = np.bincount(stratum[labelled], minlength=count)
        if known.all():
            break
    right = np.bincount(stratum[labelled], weights=correct, minlength=count).astype(np.int64)
    return stratified_interval(np.bincount(stratum, minlength=count), known, right)


def stratified_interval(size: np.ndarray, known: np.ndarray, right: np.ndarray) -> tuple[float, Interval]:
    """Estimate and interval from [H] images, labelled images and correct ones among them, by stratum; every stratum has
    a label."""
    images, tail = int(size.sum()), (1 - CONFIDENCE_LEVEL) / 2
    pseudo = PSEUDO_COUNT * size / images
    low = _unlabelled_right(size - known, right, known - right + pseudo)
    high = _unlabelled_right(size - known, right + pseudo, known - right)
    at_low = int(np.searchsorted(low.cumsum(), tail))
    at_high = min(int(np.searchsorted(high.cumsum(), 1 - tail)), len(high) - 1)  # the sum may round to below 1
    estimate = float((size * right / known).sum() / images)
    return estimate, Interval(float(right.sum() + at_low) / images, float(right.sum() + at_high) / images)


def _unlabelled_right(unlabelled: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """The distribution of the number of correct images among those without a label, over all strata. [H] each;
    `right` and `wrong` are the parameters of the beta distribution of a stratum's accuracy."""
    length = int(unlabelled.sum()) + 1
    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    for images, a, b in zip(unlabelled.tolist(), right.tolist(), wrong.tolist(), strict=True):
        spectrum *= np.fft.rfft(beta_binomial(images, a, b), length)
    return np.maximum(np.fft.irfft(spectrum, length), 0.0)


def beta_binomial(images: int, a: float, b: float) -> np.ndarray:
    """[images + 1] the probability of each number of correct images, if the accuracy is Beta(a, b) distributed."""
    from scipy.stats import betabinom

    if a == 0 or b == 0:
        return np.asarray(np.eye(1, images + 1, 0 if a == 0 else images)[0])
    return np.asarray(betabinom.pmf(np.arange(images + 1), images, a, b))


def labels_to_decide(wins: int, losses: int, labelled: int, images: int) -> int | None:
    """Random labels that would probably (80%) decide the sign test in addition, if the models differ as much as they do
    so far. None if even labels for all images might not."""
    decided = wins + losses
    if wins == losses:
        return None
    share = max(wins, losses) / decided
    needed = ((TWO_SIDED_QUANTILE / 2 + POWER_QUANTILE * sqrt(share * (1 - share))) / (share - 0.5)) ** 2
    total = ceil(max(needed, FEWEST_TO_DECIDE) * labelled / decided)
    return max(1, total - labelled) if total <= images else None
