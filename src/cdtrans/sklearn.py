"""`adapt --effort instant` as a scikit-learn classifier: on feature vectors that you have, not on images.

    from cdtrans.sklearn import InstantClassifier

This module imports scikit-learn and torch; nothing else of cdtrans imports it."""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch.nn import functional as F

from cdtrans.methods.instant import probe_on_both
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe, label_target
from cdtrans.pairing.pairs import Domains


class InstantClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier for unlabelled target rows, from labelled source rows: a ridge probe and neighbour graphs
    label the target in closed form, and a last probe learns from both domains. Nothing is random.

    Rows of the target are marked in `y` as unlabelled: -1, as in `sklearn.semi_supervised`, or None or NaN. So -1
    cannot be a class. Without such rows the classifier is a ridge probe on standardised features. It is made for the
    target: `predict` standardises rows by the target's statistics.

    Parameters
    ----------
    leading : int or None
        The first so many features are searched for neighbours as they are, and all of them whitened. None: all in both
        cases. `adapt` has the features of the last two blocks there, out of those of the last taps.

    Attributes
    ----------
    classes_ : array of the labels in `y`, sorted.
    coef_, intercept_ : of the linear classifier, [K, D] and [K], for rows as they are given.
    label_distributions_ : [N, K] probabilities of every row that it was fitted to; 0 or 1 where `y` has a label.
    transduction_ : [N] the label of every row that it was fitted to.
    n_features_in_ : D.
    """

    def __init__(self, *, leading: int | None = None) -> None:
        self.leading = leading

    def fit(self, X: Any, y: Any) -> "InstantClassifier":
        """X [N, D] are the rows of both domains, and y [N] the labels of the source rows, with -1, None or NaN for
        every target row."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        X = validate_data(self, X, dtype=(np.float64, np.float32))
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        of_target = np.array([label is None or label != label or label in (-1, "-1") for label in y.tolist()], bool)
        if of_target.all():
            raise ValueError("y has no label: give the labels of the source rows, and -1 for the target rows.")
        known = np.array(y[~of_target].tolist())  # not of type object, which only None needs
        check_classification_targets(known)
        leading = X.shape[1] if self.leading is None else self.leading
        if not 1 <= leading <= X.shape[1]:
            raise ValueError(f"leading must be from 1 to the number of features, {X.shape[1]}, not {leading}.")
        self.classes_, codes = np.unique(known, return_inverse=True)
        source, target, labels = torch.tensor(X[~of_target]), torch.tensor(X[of_target]), torch.tensor(codes)
        one_hot = F.one_hot(labels, len(self.classes_)).to(source)
        distributions = np.zeros((len(X), len(self.classes_)))
        distributions[~of_target] = one_hot.numpy()
        if len(target):
            nothing = source.new_zeros(0)  # there is no network
            domains = Domains(Encoded(source, nothing), labels, Encoded(target, nothing))
            labelled = label_target(domains, classes=len(self.classes_), leading=leading).probabilities
            probe, _, statistics = probe_on_both(domains, labelled)
            distributions[of_target] = labelled.numpy()
        else:
            statistics = Statistics.of(source)
            probe = fit_probe(statistics.standardised(source), one_hot, LOOSE)
        weight = probe.weight.double() / (statistics.variance.double() + 1e-5).sqrt()[:, None]  # for rows as given
        self.coef_ = weight.T.numpy()
        self.intercept_ = (probe.bias.double() - statistics.mean.double() @ weight).numpy()
        self.label_distributions_ = distributions
        self.transduction_ = self.classes_[distributions.argmax(axis=1)]
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """[N, D] -> [N, K] probabilities, in the order of `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        scores = torch.tensor(X @ self.coef_.T + self.intercept_)
        return np.asarray(scores.softmax(dim=1).numpy())

    def predict(self, X: Any) -> np.ndarray:
        """[N, D] -> [N] labels."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])
