"""Confidence as high as the accuracy."""

import pytest
import torch

from cdtrans.trust.calibration import COLDEST, HOTTEST, temperature


@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.95])
def test_the_mean_confidence_becomes_the_accuracy(accuracy: float) -> None:
    logits = 4 * torch.randn(500, 5, generator=torch.Generator().manual_seed(0))
    found = temperature(logits, accuracy)
    assert (logits / found).softmax(dim=1).amax(dim=1).mean() == pytest.approx(accuracy, abs=1e-4)


def test_what_no_temperature_reaches_ends_at_the_bounds() -> None:
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    assert temperature(logits, 0.1) == pytest.approx(HOTTEST, rel=1e-3), "five classes are never below 20 %"
    assert temperature(logits, 1.0) == pytest.approx(COLDEST, rel=1e-3)
    assert temperature(torch.zeros(3, 2), 0.9) > 0, "logits that are all equal"
