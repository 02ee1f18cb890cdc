"""Linear classifiers on the features of a frozen backbone, each scored on held-out images. The backbone is not trained,
and no target label is used."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from cdtrans.errors import named
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.graphs import Start
from cdtrans.pairing.occurring import absent_classes, unsteady
from cdtrans.pairing.pairs import Domains
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


class Sample(NamedTuple):
    """The features of a domain, or of a sample of it."""

    features: np.ndarray  # [N, D]
    paths: Sequence[str]


def probe(
    source: Sample, labels: np.ndarray, classes: Sequence[str], target: Sample, seed: int, leading: int
) -> list[Finding]:
    """Each domain is standardised by its own mean and deviation, which removes most of the effect of a camera. The
    first `leading` features belong to the last two blocks."""
    x = _standardised(source.features)
    with warnings.catch_warnings():  # about classes smaller than the folds, and a solver stopped early
        warnings.simplefilter("ignore")
        held_out = _held_out(x, labels, seed, "predict_proba")  # [N, K]
        domain_accuracy = _domain_accuracy(source.features, target.features, seed)
    guess = np.unique(labels)[held_out.argmax(axis=1)]
    return [
        separability(guess, labels),
        label_errors(held_out, guess, labels, classes, source.paths),
        domain_distance(domain_accuracy),
        *class_rows(target_start(source.features, labels, target.features, leading), np.unique(labels), classes),
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


def target_start(x: np.ndarray, labels: np.ndarray, y: np.ndarray, leading: int) -> Start:
    """The graphs that `occurring` looks at, of both domains' features."""
    source, target = (Encoded(z, z[:, :0]) for z in map(torch.from_numpy, (x, y)))
    domains = Domains(source, torch.from_numpy(labels), target)
    return Start.of(domains, classes=int(labels.max()) + 1, leading=leading)


def class_rows(start: Start, present: np.ndarray, classes: Sequence[str]) -> list[Finding]:
    """The classes that seem absent, as a run would notice it, and a row for what only a person can see. `present`: the
    classes of the drawn source images. Class shares tell less: across a wide gap they shift too."""
    signs = unsteady(start, start.probe), absent_classes(start)
    scattered, absent = ([classes[k] for k in present if gone is not None and gone[k]] for gone in signs)
    details: dict[str, Any] = {"absent": absent, "scattered": scattered}
    ask = "'cdtrans ask SOURCE TARGET' finds out in a minute"
    cannot = "Whether every target image shows one of the classes cannot be seen from here"
    unseen = Finding("ok", "images of no class", cannot, f"If one may not, {ask}.")
    if absent:
        names = ", ".join(map(repr, absent))
        statement = f"{len(absent)} of {len(present)} classes seem absent from the target: {names}"
        advice = f"A run will leave them out. Are they? {ask}, or name the classes that occur with --target-classes."
        return [Finding("warning", "classes that occur", statement, advice, details), unseen]
    statement, advice = "No class is clearly absent; fewer than 40% of absent classes cannot be seen", ""
    if scattered:
        of = f"{len(scattered)} of {len(present)} classes"
        statement += f". Images taken for {of} are scattered ({named(scattered)}): a wide gap, absent or rare classes"
        advice = f"Which it is, {ask}."
    return [Finding("ok", "classes that occur", statement, advice, details), unseen]


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
