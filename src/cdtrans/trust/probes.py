"""Linear classifiers on the features of a frozen backbone, each scored on held-out images. The backbone is not trained,
and no target label is used."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from cdtrans.errors import named
from cdtrans.trust.preflight import LISTING, Finding, Severity

FOLDS = 5  # cross-validation, as usual
STRENGTH = 0.01  # inverse penalty (scikit-learn's C) on standardised features: best of 1, 0.1, 0.01, 0.003 on Office-31
ROUNDS = 300  # solver iterations; it usually converges in fewer, and a probe need not converge
SEPARABLE, CHANCE = 0.5, 0.1  # share of the way from guessing the largest class (0) to perfect (1)
ENOUGH = 100  # images; with fewer, an accuracy near chance may be bad luck
# An image looks mislabelled if the confidence in another label is at least SURE times the mean confidence in correct
# predictions, and its own label has at most DOUBTED times that. This finds 40 to 65% of 5% wrong labels in Office-31.
SURE, DOUBTED = 0.9, 0.3
MISLABELLED = 0.005  # share of the source; Office-31's amazon has 0.9%, about half of them really wrong
ALIKE = 0.6  # accuracy of telling the domains apart; 0.5 is chance
SHIFTED = 0.3  # total variation: Office-31 and PACS have up to 0.25, made imbalanced 10:1 up to 0.29
RARE, EXPECTED = 0.25, 5.0  # a class is rare below this share of its expected images, if at least so many are expected


class Sample(NamedTuple):
    """The features of a domain, or of a sample of it."""

    features: np.ndarray  # [N, D]
    paths: Sequence[str]


def probe(source: Sample, labels: np.ndarray, classes: Sequence[str], target: Sample, seed: int) -> list[Finding]:
    """Each domain is standardised by its own mean and deviation, which removes most of the effect of a camera."""
    x, y = _standardised(source.features), _standardised(target.features)
    with warnings.catch_warnings():  # about classes smaller than the folds, and a solver stopped early
        warnings.simplefilter("ignore")
        held_out = _held_out(x, labels, seed, "predict_proba")  # [N, K]
        domain_accuracy = _domain_accuracy(source.features, target.features, seed)
    guess = np.unique(labels)[held_out.argmax(axis=1)]
    return [
        separability(guess, labels),
        label_errors(held_out, guess, labels, classes, source.paths),
        domain_distance(domain_accuracy),
        class_shares(_nearest_labels(x, labels, y), labels, [classes[k] for k in np.unique(labels)]),
    ]


def enough(labels: np.ndarray, targets: int) -> bool:
    """Whether there are at least two classes to fit in every fold."""
    return bool((np.bincount(labels) >= FOLDS).sum() >= 2) and targets >= FOLDS


def separability(guess: np.ndarray, labels: np.ndarray) -> Finding:
    accuracy, largest = float((guess == labels).mean()), float(np.bincount(labels).max() / len(labels))
    gain = (accuracy - largest) / (1 - largest)
    statement = f"A linear classifier predicts the label of held-out source images in {accuracy:.0%} of cases"
    details = {"accuracy": accuracy, "largest_class": largest, "images": len(labels)}
    if gain < CHANCE and len(labels) >= ENOUGH:
        advice = "Check that the labels belong to the images: these labels cannot be learnt."
        return Finding("stop", "separability", statement, advice, details)
    if gain < SEPARABLE:
        advice = "Check the labels, or use a stronger backbone: pairs are only as good as the source model."
        return Finding("warning", "separability", statement, advice, details)
    return Finding("ok", "separability", statement, details=details)


def label_errors(
    held_out: np.ndarray, guess: np.ndarray, labels: np.ndarray, classes: Sequence[str], paths: Sequence[str]
) -> Finding:
    """Most confident first. The limit is relative to the confidence in correct predictions, which grows with the number
    of images."""
    sure, own = held_out.max(axis=1), held_out[np.arange(len(labels)), np.searchsorted(np.unique(labels), labels)]
    right = guess == labels
    usual = sure[right].mean() if right.any() else np.inf
    doubtful = np.flatnonzero(~right & (sure >= SURE * usual) & (own <= DOUBTED * sure))
    doubtful = doubtful[np.argsort(-sure[doubtful], kind="stable")]
    listed = [
        {"path": paths[n], "label": classes[labels[n]], "looks_like": classes[guess[n]], "probability": float(sure[n])}
        for n in doubtful.tolist()
    ]
    details: dict[str, Any] = {"images": listed}
    if not listed:
        return Finding("ok", "mislabelled images", "No source image is likely to be mislabelled", details=details)
    first = listed[0]
    statement = (
        f"{len(listed)} of {len(labels)} source images look mislabelled, such as {first['path']!r}, which looks like "
        f"{first['looks_like']!r}"
    )
    state: Severity = "warning" if len(listed) > MISLABELLED * len(labels) else "ok"
    return Finding(
        state, "mislabelled images", statement, f"Check them, the most confident first ({LISTING}).", details
    )


def domain_distance(accuracy: float) -> Finding:
    """The proxy A-distance (Ben-David et al., 2007): from 0, indistinguishable, to 2. Never a warning: a large distance
    is the case that adaptation is for."""
    distance = max(0.0, 2 * (2 * accuracy - 1))
    statement = f"A classifier tells the domains apart in {accuracy:.0%} of cases (A-distance {distance:.2f} of 2)"
    details = {"accuracy": accuracy, "a_distance": distance}
    advice = "The domains look alike: the source model may do as well as the adapted one." if accuracy < ALIKE else ""
    return Finding("ok", "domain distance", statement, advice, details)


def class_shares(nearest: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> Finding:
    """Class shares by the nearest source images of the target images, compared with the source's own. Neither this nor
    anything else that was tried can tell a target with classes missing from the source from a distant one."""
    expected, observed = (np.array([(x == k).mean() for k in np.unique(labels)]) for x in (labels, nearest))
    shift = float(np.abs(observed - expected).sum() / 2)
    rare = np.flatnonzero((observed < RARE * expected) & (len(nearest) * expected >= EXPECTED))
    details: dict[str, Any] = {"shift": shift, "rare": [names[k] for k in rare.tolist()]}
    details["share"] = dict(zip(names, observed.tolist(), strict=True))
    statement = f"By their nearest source images, the target's class shares differ from the source's by {shift:.0%}"
    if shift <= SHIFTED:
        return Finding("ok", "class shares", statement, details=details)
    seldom = f": {named(details['rare'])} are rare or missing" if details["rare"] else ""
    advice = "Remove source classes that the target does not have: a run assumes the same classes."
    return Finding("warning", "class shares", f"{statement}{seldom}", advice, details)


def _nearest_labels(x: np.ndarray, labels: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The label of the row of x nearest to each row of y, by cosine."""
    x, y = (z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12) for z in (x, y))
    return np.asarray(labels[(y @ x.T).argmax(axis=1)])


def _standardised(features: np.ndarray) -> np.ndarray:
    deviation = features.std(axis=0)
    return np.asarray((features - features.mean(axis=0)) / np.where(deviation > 0, deviation, 1))


def _held_out(x: np.ndarray, labels: np.ndarray, seed: int, method: str) -> np.ndarray:
    """The answer of this method of a classifier for each image, fitted without it."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    classifier = LogisticRegression(C=STRENGTH, max_iter=ROUNDS)
    return np.asarray(cross_val_predict(classifier, x, labels, cv=folds, method=method))


def _domain_accuracy(source: np.ndarray, target: np.ndarray, seed: int) -> float:
    """The accuracy of telling the domains apart; both have equally many images, so that 0.5 is chance."""
    rng, count = np.random.default_rng(seed), min(len(source), len(target))
    drawn = [domain[rng.choice(len(domain), count, replace=False)] for domain in (source, target)]
    x, domain = _standardised(np.concatenate(drawn)), np.repeat([0, 1], count)
    return float((_held_out(x, domain, seed, "predict") == domain).mean())
