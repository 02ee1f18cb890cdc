"""Scores against the authors' numbers, a hand count and a slow reference."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.measure.metrics import CalibrationBin, Scores, calibration, calibration_error, score


def test_both_rules_of_the_authors(golden) -> None:
    g = golden("metrics")
    scores = score(g["labels"].numpy(), g["logits"].argmax(1).numpy(), g["logits"].shape[1])
    assert scores.images == 452
    assert scores.accuracy == pytest.approx(float(g["OfficeHome/accuracy"]), abs=1e-12)
    assert scores.class_mean_accuracy == pytest.approx(float(g["VisDA/accuracy"]), abs=1e-12)
    assert scores.accuracy != pytest.approx(scores.class_mean_accuracy, abs=1e-3)


def test_by_hand() -> None:
    scores = score(np.array([0, 0, 0, 0, 2]), np.array([0, 0, 1, 2, 2]), 3)
    assert scores.confusion.tolist() == [[2, 1, 1], [0, 0, 0], [0, 0, 1]]  # true classes down, predicted across
    assert scores.images == 5
    assert scores.accuracy == 3 / 5
    assert scores.per_class[[0, 2]].tolist() == [0.5, 1.0]
    assert np.isnan(scores.per_class[1])  # no image, no score
    assert scores.class_mean_accuracy == 0.75  # of the two classes that have images


def test_classes_without_images_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score(np.array([1]), np.array([3]), 4)
        assert (scores.accuracy, scores.class_mean_accuracy) == (0.0, 0.0)


@given(
    st.integers(1, 5).flatmap(lambda k: st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1))
)
def test_against_a_count_one_by_one(answers: list[tuple[int, int]]) -> None:
    true, predicted = np.array(answers).T
    scores = score(true, predicted, 5)
    right = [t == p for t, p in answers]
    assert scores.accuracy == pytest.approx(sum(right) / len(right))
    of_class = {k: [r for r, (t, _) in zip(right, answers, strict=True) if t == k] for k in set(true.tolist())}
    assert scores.class_mean_accuracy == pytest.approx(np.mean([np.mean(r) for r in of_class.values()]))
    assert isinstance(scores, Scores)
    assert scores.confusion.shape == (5, 5)


def test_calibration_by_hand() -> None:
    sure = np.array([0.82, 0.88, 1.0, 0.95, 0.31])
    right = np.array([True, False, True, True, True])
    bins = calibration(sure, right)
    assert [b.images for b in bins] == [1, 2, 2]  # from 0.3, from 0.8, from 0.9; 1.0 is in the last
    assert [b.confidence for b in bins] == pytest.approx([0.31, 0.85, 0.975])
    assert [b.accuracy for b in bins] == [1.0, 0.5, 1.0]
    assert calibration_error(bins) == pytest.approx((0.69 + 2 * 0.35 + 2 * 0.025) / 5)


def test_a_model_that_is_as_right_as_it_is_sure_has_no_error() -> None:
    assert calibration_error((CalibrationBin(0.25, 0.25, 4), CalibrationBin(0.75, 0.75, 4))) == 0
