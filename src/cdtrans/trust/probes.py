"""What a frozen backbone sees in the two domains: linear classifiers on its features, each judged on images that it has
not seen. No weight of the backbone is trained, and no target label is known."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from cdtrans.errors import named
from cdtrans.trust.findings import LISTED, Finding, State

FOLDS = 5
STRENGTH = 0.01  # the inverse of the penalty on standardised features: best of 1, 0.1, 0.01, 0.003 on Office-31
ROUNDS = 300  # of the solver; it converges in fewer, and a probe need not
SEPARABLE, CHANCE = 0.5, 0.1  # share of the way from guessing the largest class to being always right
ENOUGH = 100  # images, fewer of which may fail to beat chance by chance
SURE = 0.9  # of the mean confidence in labels that are right: so much another label needs to look like the true one,
DOUBTED = 0.3  # and so much of that the given label may have; of 5 % wrong labels in Office-31 it finds 40 to 65 %
MISLABELLED = 0.005  # of the source; those that Office-31 has in amazon (0.9 %) are worth a look
ALIKE = 0.6  # accuracy of telling the domains apart; 0.5 is a coin
EXPECTED = 5.0  # target images a class would have by its share of the source: then not one is seen by chance in 150
SELDOM_UNSURE = 0.05  # of the source's own images have a confidence below the limit that the target is held against
UNCLAIMED = 0.4  # of the target below that limit: Office-31's tasks stay below 0.37, without half the classes at 0.57


class Seen(NamedTuple):
    """A domain, or a sample of it, through the backbone."""

    features: np.ndarray  # [N, D]
    paths: Sequence[str]


def probe(source: Seen, labels: np.ndarray, classes: Sequence[str], target: Seen, seed: int) -> list[Finding]:
    """Each domain is standardised by its own mean and deviation, which takes away most of what a camera does."""
    x, y = _standardised(source.features), _standardised(target.features)
    with warnings.catch_warnings():  # of classes too small for every fold, and of a solver stopped early
        warnings.simplefilter("ignore")
        held_out = _cross_validated(x, labels, seed)  # [N, K]
        known = np.unique(labels)
        on_target = _classifier().fit(x, labels).predict_proba(y)  # [M, known]
        tell_apart = _domain_accuracy(source.features, target.features, seed)
    return [
        separability(held_out, labels),
        mislabelled(held_out, labels, classes, source.paths),
        domain_distance(tell_apart),
        missing_classes(on_target, labels, [classes[k] for k in known]),
        unclaimed(held_out, on_target, target.paths),
    ]


def enough(labels: np.ndarray, targets: int) -> bool:
    """Whether every classifier can be fitted to two classes, whichever part is held out."""
    return bool((np.bincount(labels) >= FOLDS).sum() >= 2) and targets >= FOLDS


def separability(held_out: np.ndarray, labels: np.ndarray) -> Finding:
    accuracy = float((_best(held_out, labels) == labels).mean())
    guess = float(np.bincount(labels).max() / len(labels))
    gain = (accuracy - guess) / (1 - guess)
    found = f"Held-out source images get their label from a linear classifier in {accuracy:.0%} of cases"
    details = {"accuracy": accuracy, "largest_class": guess, "images": len(labels)}
    if gain < CHANCE and len(labels) >= ENOUGH:
        advice = "Check that the labels belong to the images: as they are, they cannot be learnt."
        return Finding("stop", "separability", found, advice, details)
    if gain < SEPARABLE:
        advice = "Check the labels, or take a stronger backbone: pairs can be no better than the source model."
        return Finding("warning", "separability", found, advice, details)
    return Finding("ok", "separability", found, details=details)


def mislabelled(held_out: np.ndarray, labels: np.ndarray, classes: Sequence[str], paths: Sequence[str]) -> Finding:
    """The surest first. Confidence is held against that in right labels, because it grows with the number of images."""
    guess, known = _best(held_out, labels), np.unique(labels)
    sure, own = held_out.max(axis=1), held_out[np.arange(len(labels)), np.searchsorted(known, labels)]
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
        return Finding("ok", "mislabelled images", "No source image looks surely mislabelled", details=details)
    first = listed[0]
    found = (
        f"{len(listed)} of {len(labels)} source images look mislabelled, such as {first['path']!r}, which looks like "
        f"{first['looks_like']!r}"
    )
    state: State = "warning" if len(listed) > MISLABELLED * len(labels) else "ok"
    return Finding(state, "mislabelled images", found, f"Look at them, the surest first ({LISTED}).", details)


def domain_distance(accuracy: float) -> Finding:
    """The proxy A-distance (Ben-David et al., 2007): from 0, indistinguishable, to 2. A large one is what adaptation is
    for, so it is no reason to warn."""
    distance = max(0.0, 2 * (2 * accuracy - 1))
    found = f"A linear classifier tells the domains apart in {accuracy:.0%} of cases (A-distance {distance:.2f} of 2)"
    details = {"accuracy": accuracy, "a_distance": distance}
    advice = "The domains look alike: the source model may do as well as the adapted one." if accuracy < ALIKE else ""
    return Finding("ok", "domain distance", found, advice, details)


def missing_classes(on_target: np.ndarray, labels: np.ndarray, known: Sequence[str]) -> Finding:
    """Classes that no target image is taken for, if some should be."""
    _, counts = np.unique(labels, return_counts=True)
    expected = len(on_target) * counts / counts.sum()
    taken = np.bincount(on_target.argmax(axis=1), minlength=len(known))
    missing = [known[k] for k in np.flatnonzero((taken == 0) & (expected >= EXPECTED)).tolist()]
    details = {"missing": missing, "taken_for": dict(zip(known, taken.tolist(), strict=True))}
    if missing:
        found = f"{len(missing)} of {len(known)} source classes look like no target image: {named(missing)}"
        advice = "Take these classes out of the source if the target has none: the run assumes the same classes."
        return Finding("warning", "missing classes", found, advice, details)
    found = "Each source class has target images that look like it"
    if (expected < EXPECTED).any():
        found = f"No source class with {EXPECTED:.0f} images to expect in the target is missing there"
    return Finding("ok", "missing classes", found, details=details)


def unclaimed(held_out: np.ndarray, on_target: np.ndarray, paths: Sequence[str]) -> Finding:
    """Target images that the source classifier is less sure of than of almost all held-out source images."""
    limit = np.quantile(held_out.max(axis=1), SELDOM_UNSURE)
    unsure = np.flatnonzero(on_target.max(axis=1) < limit)
    share = len(unsure) / len(on_target)
    details = {"share": share, "images": [paths[n] for n in unsure.tolist()]}
    found = f"No class claims {share:.0%} of the target images"
    if share > UNCLAIMED:
        advice = f"Look at them ({LISTED}): the target may hold other classes, or lie very far from the source."
        return Finding("warning", "unclaimed targets", found, advice, details)
    return Finding("ok", "unclaimed targets", found, details=details)


def _standardised(features: np.ndarray) -> np.ndarray:
    deviation = features.std(axis=0)
    return np.asarray((features - features.mean(axis=0)) / np.where(deviation > 0, deviation, 1))


def _classifier() -> LogisticRegression:
    return LogisticRegression(C=STRENGTH, max_iter=ROUNDS)


def _cross_validated(x: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """[N, K] probabilities of each image by a classifier that was not fitted to it."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    return np.asarray(cross_val_predict(_classifier(), x, labels, cv=folds, method="predict_proba"))


def _domain_accuracy(source: np.ndarray, target: np.ndarray, seed: int) -> float:
    """As many images of each, so that 0.5 is a coin."""
    rng, count = np.random.default_rng(seed), min(len(source), len(target))
    drawn = [domain[rng.choice(len(domain), count, replace=False)] for domain in (source, target)]
    x, domain = _standardised(np.concatenate(drawn)), np.repeat([0, 1], count)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    return float((cross_val_predict(_classifier(), x, domain, cv=folds) == domain).mean())


def _best(held_out: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.asarray(np.unique(labels)[held_out.argmax(axis=1)])
