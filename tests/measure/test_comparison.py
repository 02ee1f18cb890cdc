"""Intervals and the paired test against published numbers, exact sums and simulation."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.measure.comparison import Comparison, class_mean_interval, wilson


@pytest.mark.parametrize(
    ("right", "images", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_newcombe_printed_it(right: int, images: int, low: float, high: float) -> None:
    """Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson(right, images) == pytest.approx((low, high), abs=5e-5)


def test_wilson_at_the_ends() -> None:
    assert wilson(20, 20).high == 1.0
    assert wilson(20, 20).low == pytest.approx(1 - wilson(0, 20).high)
    assert wilson(1, 1).low > 0.1


def test_the_class_mean_of_one_class_is_its_accuracy() -> None:
    confusion = np.array([[8, 2], [0, 0]])
    assert class_mean_interval(confusion) == pytest.approx(wilson(8, 10))


def test_the_class_mean_of_two_equal_classes_is_surer_than_each() -> None:
    one, both = wilson(8, 10), class_mean_interval(np.array([[8, 2], [2, 8]]))
    assert both == pytest.approx([0.8 + (limit - 0.8) / 2**0.5 for limit in one])


def test_the_class_mean_holds_the_truth_as_often_as_it_says() -> None:
    rng, truth, images = np.random.default_rng(0), np.array([0.95, 0.7, 0.4]), np.array([40, 12, 25])
    inside = 0
    for right in rng.binomial(images, truth, (1000, 3)):
        confusion = np.diag(right)
        confusion[:, 0] += images - right
        confusion[0, 0] = right[0]
        confusion[0, 1] = images[0] - right[0]
        low, high = class_mean_interval(confusion)
        inside += low <= truth.mean() <= high
    assert 930 <= inside <= 975


def models(both: int, adapted: int, source: int, neither: int) -> Comparison:
    """Images that both have right, only one, and neither."""
    kinds = np.repeat([0, 1, 2, 3], [both, adapted, source, neither])
    return Comparison.of(np.isin(kinds, (0, 2)), np.isin(kinds, (0, 1)))


def test_models_are_counted_image_by_image() -> None:
    found = models(4, 9, 1, 11)
    assert (found.images, found.adapted_right, found.source_right) == (25, 13, 5)
    assert (found.adapted_alone, found.source_alone) == (9, 1)
    assert found.p_value == pytest.approx(2 * (1 + 10) / 2**10)
    assert found.better == "adapted"
    assert models(4, 1, 9, 11).better == "source"
    assert "13 times" in found.sentence
    assert "5 times, more than chance" in found.sentence


@pytest.mark.parametrize(("adapted", "source"), [(5, 0), (8, 2), (0, 0), (3, 3)])
def test_few_labels_say_nothing(adapted: int, source: int) -> None:
    found = models(10, adapted, source, 10)
    assert found.better == ""
    assert "chance may explain" in found.sentence


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_test_is_the_binomial_one(adapted: int, source: int) -> None:
    differ = adapted + source
    tail = sum(comb(differ, k) for k in range(min(adapted, source) + 1)) / 2**differ
    assert models(1, adapted, source, 1).p_value == pytest.approx(min(1, 2 * tail))


def test_many_images_are_no_trouble() -> None:
    assert models(0, 26000, 29000, 0).better == "source"
    assert models(0, 50, 29000, 0).p_value < 1e-300
