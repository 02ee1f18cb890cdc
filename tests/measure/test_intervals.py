"""Intervals and the paired test against published numbers, exact sums and simulation."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cdtrans.measure.ask import draw_random
from cdtrans.measure.intervals import (
    accuracy_interval,
    beta_binomial,
    class_mean_interval,
    labels_to_decide,
    sign_test,
    strata,
    strata_for,
    stratified_interval,
    wilson,
)

NONE = np.array([], dtype=np.int64)


def population(images: int, seed: int, sure: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and whether the model is right: more often where the score is high."""
    rng = np.random.default_rng(seed)
    score = rng.random(images)
    return score, rng.random(images) < 1 / (1 + np.exp(-sure * (2 * score - 0.4)))


def test_wilson_as_newcombe_printed_it() -> None:
    """Statistics in Medicine 17 (1998), table I, method 3."""
    assert astuple(wilson(81, 263)) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_the_class_mean_of_one_class_is_its_accuracy_and_of_two_equal_ones_surer() -> None:
    one, same = wilson(8, 10), class_mean_interval(np.array([8, 0]), np.array([10, 0]))
    assert (same.low, same.high) == pytest.approx((one.low, one.high))
    both = class_mean_interval(np.array([8, 8]), np.array([10, 10]))
    assert (both.low, both.high) == pytest.approx([0.8 + (x - 0.8) / 2**0.5 for x in (one.low, one.high)])


def test_the_class_mean_holds_the_truth_as_often_as_it_says() -> None:
    rng, truth, images = np.random.default_rng(0), np.array([0.95, 0.7, 0.4]), np.array([40, 12, 25])
    intervals = [class_mean_interval(right, images) for right in rng.binomial(images, truth, (1000, 3))]
    assert 930 <= sum(x.low <= truth.mean() <= x.high for x in intervals) <= 975


@given(st.integers(2, 200), st.integers(0, 10**6), st.data())
@settings(max_examples=60)
def test_the_interval_holds_its_estimate_and_all_that_is_known(images: int, seed: int, data: st.DataObject) -> None:
    score, correct = population(images, seed)
    n = data.draw(st.integers(1, images))
    labelled = np.random.default_rng(seed).choice(images, n, replace=False)
    estimate, interval = accuracy_interval(score, labelled, correct[labelled])
    right = correct[labelled].sum()
    assert right / images <= interval.low <= estimate + 1e-9
    assert estimate - 1e-9 <= interval.high <= 1 - (n - right) / images + 1e-9


@given(st.integers(1, 300), st.integers(0, 10**6))
@settings(max_examples=30)
def test_it_is_exact_when_every_image_is_labelled(images: int, seed: int) -> None:
    score, correct = population(images, seed)
    estimate, interval = accuracy_interval(score, np.arange(images), correct)
    assert interval.low == interval.high == pytest.approx(correct.mean()) == pytest.approx(estimate)


@given(st.integers(20, 100), st.integers(0, 10**6))
@settings(max_examples=20)
def test_neither_the_order_of_labels_nor_the_scale_of_the_score_matters(images: int, seed: int) -> None:
    score, correct = population(images, seed)
    rng = np.random.default_rng(seed)
    labelled = rng.choice(images, 15, replace=False)
    result = accuracy_interval(score, labelled, correct[labelled])
    other = rng.permutation(labelled)
    assert accuracy_interval(score**3 * 7 - 1, other, correct[other]) == result


@pytest.mark.slow
@pytest.mark.parametrize(("images", "labels", "sure"), [(150, 30, 3.0), (900, 30, 3.0), (900, 60, 6.0), (500, 20, 0.0)])
def test_it_covers_the_truth_and_is_narrower_than_wilsons_where_the_score_says_something(
    images: int, labels: int, sure: float
) -> None:
    score, correct = population(images, 1, sure)
    rng = np.random.default_rng(2)
    covered, width, plain = 0, 0.0, 0.0
    for _ in range(250):
        drawn = draw_random(score, labels, NONE, rng)
        _, interval = accuracy_interval(score, drawn, correct[drawn])
        covered += interval.low <= correct.mean() <= interval.high
        width += interval.high - interval.low
        without = wilson(int(correct[drawn].sum()), labels)
        plain += without.high - without.low
    assert covered / 250 >= 0.92
    assert width / plain < (0.88 if sure else 1.0)


def test_without_an_error_it_still_allows_for_some() -> None:
    score = np.arange(1000.0)
    drawn = draw_random(score, 30, NONE, np.random.default_rng(0))
    estimate, interval = accuracy_interval(score, drawn, np.ones(30, dtype=bool))
    assert 0.85 < interval.low < 0.97
    assert interval.high == estimate == 1.0


def test_a_large_target_is_computed_in_a_moment() -> None:
    score = np.random.default_rng(0).random(100_000)
    _, interval = accuracy_interval(score, np.arange(50), np.arange(50) % 5 > 0)
    assert 0.6 < interval.low < 0.8 < interval.high < 0.95


def test_beta_binomial_of_a_certain_accuracy() -> None:
    assert beta_binomial(4, 1.0, 1.0) == pytest.approx(np.full(5, 0.2)), "as in Polya's urn"
    assert beta_binomial(3, 0.0, 2.0).tolist() == [1, 0, 0, 0]
    assert beta_binomial(3, 2.0, 0.0).tolist() == [0, 0, 0, 1]


def test_strata_are_of_equal_size_and_in_the_order_of_the_score() -> None:
    score = np.random.default_rng(0).random(103)
    result = strata(score, 4)
    assert sorted(np.bincount(result).tolist()) == [25, 26, 26, 26]
    assert all(score[result == h].max() < score[result == h + 1].min() for h in range(3))
    assert [strata_for(n) for n in (1, 5, 30, 100)] == [1, 1, 4, 9]


def test_every_image_has_the_same_chance_to_be_drawn() -> None:
    score, rng = np.random.default_rng(0).random(50), np.random.default_rng(1)
    count = np.zeros(50)
    for _ in range(800):
        count[draw_random(score, 20, NONE, rng)] += 1
    assert count.min() > 800 * 0.4 * 0.8
    assert count.max() < 800 * 0.4 * 1.2


def test_a_second_draw_takes_other_images_and_balances_the_strata() -> None:
    score, rng = np.arange(100.0), np.random.default_rng(0)
    first = np.arange(10)  # all in the lowest stratum
    second = draw_random(score, 20, first, rng)
    assert not set(first) & set(second)
    assert len(set(second)) == 20
    assert np.bincount(strata(score, strata_for(30))[second])[0] == 0
    assert len(draw_random(score, 1000, first, rng)) == 90, "all that are left"


def test_labels_that_leave_strata_empty_are_put_into_fewer() -> None:
    """Whoever stops half-way may have left out a stratum."""
    correct = np.arange(20) % 5 > 0
    result = accuracy_interval(np.arange(100.0), np.arange(80, 100), correct)
    assert (
        result
        == accuracy_interval(np.zeros(100), np.arange(80, 100), correct)
        == stratified_interval(np.array([100]), np.array([20]), np.array([16]))
    )


def test_the_sign_test() -> None:
    assert [sign_test(0, 0), sign_test(3, 3)] == [1, 1]
    assert sign_test(9, 2) == sign_test(2, 9) == pytest.approx(2 * (1 + 11 + 55) / 2**11)


def test_labels_to_decide() -> None:
    assert labels_to_decide(4, 0, 20, 1000) == 10, "six of them are needed, and one label in five is one"
    more = labels_to_decide(6, 2, 30, 1000)
    assert 40 < more < 120
    assert labels_to_decide(6, 2, 30, 60) is None
    assert labels_to_decide(3, 3, 30, 1000) is None
    assert labels_to_decide(0, 0, 30, 1000) is None
