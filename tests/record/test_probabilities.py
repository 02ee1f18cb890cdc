"""Confidence as high as the accuracy."""

import numpy as np
import pytest

from cdtrans.record.probabilities import COLDEST, HOTTEST, probabilities, temperature


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
