"""Confidence as high as the accuracy, and which labels to keep by it."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cdtrans.errors import SettingsError
from cdtrans.record import wording
from cdtrans.record.probabilities import (
    COLDEST,
    HOTTEST,
    SHARES,
    Kept,
    accuracy_by_share,
    probabilities,
    temperature,
    threshold_for_accuracy,
    threshold_for_share,
)
from run_folders import outcome
from support import error_says, raises

SURE = np.array([0.5, 0.9, 0.7, 0.6, 0.8])
some = st.lists(st.sampled_from(np.linspace(0.1, 1, 19)) | st.floats(0.01, 1), min_size=1, max_size=40).map(np.array)
share = st.floats(0.001, 1)


def test_by_hand() -> None:
    assert threshold_for_share(SURE, 0.4) == Kept(pytest.approx(0.75), 0.4, pytest.approx(0.85))
    assert threshold_for_share(SURE, 1) == Kept(0.0, 1.0, pytest.approx(0.7))
    assert threshold_for_accuracy(SURE, 0.8) == Kept(pytest.approx(0.65), 0.6, pytest.approx(0.8))
    assert threshold_for_accuracy(SURE, 0.7) == Kept(0.0, 1.0, pytest.approx(0.7))
    equal = np.array([0.9, 0.9, 0.9, 0.2])
    assert threshold_for_share(equal, 0.25) == Kept(0.9, 0.75, pytest.approx(0.9)), "equally sure images stay together"


@given(some, share, share)
def test_the_more_are_kept_the_lower_threshold_and_accuracy(sure: np.ndarray, one: float, other: float) -> None:
    few, many = (threshold_for_share(sure, s) for s in sorted((one, other)))
    assert few.threshold >= many.threshold
    assert few.share <= many.share
    assert few.accuracy >= many.accuracy - 1e-12


@given(some, share)
def test_a_result_describes_its_threshold(sure: np.ndarray, wanted: float) -> None:
    kept = threshold_for_share(sure, wanted)
    assert kept.share == pytest.approx((sure >= kept.threshold).mean())
    assert kept.accuracy == pytest.approx(sure[sure >= kept.threshold].mean())
    assert kept.share >= wanted - 0.5 / len(sure) - 1e-9
    fewer = sure[sure > sure[sure >= kept.threshold].min()]
    assert len(fewer) < max(wanted * len(sure) + 0.5, 1), "one image fewer would be too few, but for equal ones"


@given(some, share)
def test_as_many_as_possible_reach_the_accuracy(sure: np.ndarray, wanted: float) -> None:
    """Compared with every threshold there is."""
    means = {float((sure >= t).mean()): float(sure[sure >= t].mean()) for t in sure}
    enough = [part for part, mean in means.items() if mean >= wanted + 1e-9]
    if not enough and max(means.values()) < wanted - 1e-9:
        with raises("keep-accuracy"):
            threshold_for_accuracy(sure, wanted)
    elif enough:
        kept = threshold_for_accuracy(sure, wanted)
        assert kept.accuracy >= wanted - 1e-9
        assert kept.share >= max(enough) - 1e-9


def test_the_highest_that_can_be_expected_can_be_asked_for() -> None:
    sure = np.array([0.93456, 0.5])
    with error_says("99.0%", "93.4%"):
        threshold_for_accuracy(sure, 0.99)
    assert threshold_for_accuracy(sure, 0.934).share == 0.5


@pytest.mark.parametrize("find", [threshold_for_share, threshold_for_accuracy])
@pytest.mark.parametrize("wanted", [0, -0.5, 1.01, 80, float("nan"), float("inf")])
def test_what_is_no_share_is_refused(find, wanted: float) -> None:
    with pytest.raises(SettingsError):
        find(SURE, wanted)


def test_the_table_and_its_line() -> None:
    table = accuracy_by_share(np.arange(1, 101) / 100)
    assert [kept.share for kept in table] == list(SHARES)
    assert [round(kept.accuracy, 3) for kept in table] == [0.505, 0.555, 0.605, 0.655, 0.705, 0.755]
    line = wording.kept_accuracy(table, outcome())
    for part in ("50% of all images", "60% of the most confident 80%", "76% of the most confident 50%", "every image"):
        assert part in line
    assert wording.kept_accuracy(accuracy_by_share(np.array([0.9])), outcome()).count("90%") == 3, "one image is enough"


@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.95])
def test_the_mean_confidence_becomes_the_accuracy(accuracy: float) -> None:
    logits = 4 * np.random.default_rng(0).normal(size=(500, 5))
    found = temperature(logits, accuracy)
    assert probabilities(logits / found).max(axis=1).mean() == pytest.approx(accuracy, abs=1e-4)


def test_what_no_temperature_reaches_ends_at_the_bounds() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 5))
    assert temperature(logits, 0.1) == pytest.approx(HOTTEST, rel=1e-3), "five classes are never below 20 %"
    assert temperature(logits, 1.0) == pytest.approx(COLDEST, rel=1e-3)
    assert temperature(np.zeros((3, 2)), 0.9) > 0, "logits that are all equal"
