"""Scores against the authors' numbers, a hand count and a slow reference."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.evaluation.metrics import Scores, score


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
