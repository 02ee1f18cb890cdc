"""The method 'instant' on feature vectors, as a scikit-learn classifier."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from cdtrans.sklearn import InstantClassifier

NOT_APPLICABLE = {
    "check_classifiers_classes": "has -1 as a class, which marks target rows here, as in sklearn.semi_supervised; the"
    " check exempts scikit-learn's own classifiers of that kind by their names"
}


def two_domains() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three classes in six dimensions; the target is larger, moved, and a little mixed: rows of the source, their
    classes, and rows of the target, whose classes are the same."""
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    source, target = (3.5 * np.eye(3, 6)[y] + rng.normal(0, 1, (90, 6)) for _ in range(2))
    return source, y, 2 * target @ (np.eye(6) + rng.normal(0, 0.2, (6, 6))) + [30, 0, 0, 0, 0, 0]


def joined(source: np.ndarray, y: np.ndarray, target: np.ndarray, mark: object = -1) -> tuple[np.ndarray, np.ndarray]:
    marks = np.full(len(target), mark, dtype=object if mark is None or y.dtype.kind == "O" else None)
    return np.concatenate([source, target]), np.concatenate([y, marks])


@pytest.mark.slow
def test_scikit_learns_own_checks() -> None:
    ended = check_estimator(InstantClassifier(), expected_failed_checks=NOT_APPLICABLE, on_skip=None)
    assert [e["check_name"] for e in ended if e["status"] == "xfail"] == list(NOT_APPLICABLE)
    assert sum(e["status"] == "passed" for e in ended) > 45


def test_classes_by_name_and_by_number() -> None:
    """The other things that the check that does not apply looks at."""
    source, y, _ = two_domains()
    for names in (np.array(["one", "two", "three"]), np.array(["one", "two", "three"], object), np.array([5, 0, 7])):
        fitted = InstantClassifier().fit(source, names[y])
        assert fitted.classes_.tolist() == sorted(names.tolist())
        assert (fitted.predict(source) == names[y]).mean() > 0.95


def test_target_rows_help_where_the_domains_differ() -> None:
    source, y, target = two_domains()
    alone = InstantClassifier().fit(source, y)
    adapted = InstantClassifier().fit(*joined(source, y, target))
    assert (alone.predict(target) == y).mean() < 0.6
    assert (adapted.predict(target) == y).mean() > 0.95
    assert (adapted.transduction_[:90] == y).all(), "the source's labels stand"
    assert (adapted.transduction_[90:] == y).mean() > 0.95
    assert adapted.label_distributions_.shape == (180, 3)
    assert np.allclose(adapted.label_distributions_.sum(axis=1), 1)
    assert np.allclose(adapted.predict_proba(target).sum(axis=1), 1)
    assert (adapted.coef_.shape, adapted.intercept_.shape, adapted.n_features_in_) == ((3, 6), (3,), 6)


@pytest.mark.slow
def test_every_mark_of_a_target_row_means_the_same() -> None:
    source, y, target = two_domains()
    expected = InstantClassifier().fit(*joined(source, y, target)).predict_proba(target)
    names = np.array(["a", "b", "c"])
    for labels, mark in ((y.astype(float), np.nan), (names[y], None), (names[y], -1)):
        fitted = InstantClassifier().fit(*joined(source, labels, target, mark))
        assert len(fitted.classes_) == 3
        assert np.array_equal(fitted.predict_proba(target), expected)


def test_the_order_of_the_rows_does_not_matter_and_a_pipeline_takes_it() -> None:
    source, y, target = two_domains()
    rows, labels = joined(source, y, target)
    order = np.random.default_rng(1).permutation(len(rows))
    plain, mixed = InstantClassifier().fit(rows, labels), InstantClassifier().fit(rows[order], labels[order])
    assert (plain.transduction_[order] == mixed.transduction_).all()
    pipeline = make_pipeline(StandardScaler(), InstantClassifier()).fit(rows, labels)
    assert (pipeline.predict(target) == y).mean() > 0.95


def test_the_leading_features_are_a_view_of_their_own() -> None:
    source, y, target = two_domains()
    rows, labels = joined(source, y, target)
    one, six, every = (InstantClassifier(leading=n).fit(rows, labels).label_distributions_ for n in (1, 6, None))
    assert np.array_equal(six, every)
    assert not np.allclose(one, every)
    for leading in (0, 7):
        with pytest.raises(ValueError, match="leading must be from 1 to the number of features, 6"):
            InstantClassifier(leading=leading).fit(rows, labels)


def test_what_cannot_be_fitted() -> None:
    source, y, target = two_domains()
    with pytest.raises(ValueError, match="y has no label"):
        InstantClassifier().fit(target, np.full(90, -1))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        InstantClassifier().fit(source, y[:-1])
    with pytest.raises(NotFittedError):
        InstantClassifier().predict(source)
