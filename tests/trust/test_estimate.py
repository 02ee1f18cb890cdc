"""The range for the accuracy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.trust.estimate import HALF_WIDTH, estimate, measurable
from cdtrans.trust.support import Evidence, Support
from support import says

shares = st.floats(-1, 1.5)


@given(mean=shares, more=st.floats(0.01, 1), shift=st.floats(0, 1))
def test_it_is_a_range_of_shares_that_rises_with_support_and_falls_with_shift(
    mean: float, more: float, shift: float
) -> None:
    start = Support(0.5, 0.5, 0.2)
    found = estimate(Support(mean, mean, shift), start, known=True, labels=50)
    assert 0 <= found.low <= found.accuracy <= found.high <= 1
    assert found.high - found.low <= 2 * HALF_WIDTH + 1e-9
    assert estimate(Support(mean, mean + more, shift), start, known=True, labels=50).accuracy >= found.accuracy
    assert estimate(Support(mean, mean, shift + more), start, known=True, labels=50).accuracy <= found.accuracy
    better_start = Support(0.5, 0.5 + more, 0.2)
    unchanged = [estimate(x, x, known=True, labels=50).accuracy for x in (start, better_start)]
    assert unchanged[0] <= unchanged[1]


def test_a_case_worked_by_hand() -> None:
    found = estimate(Support(0.0, 0.6, 0.5), Support(0.0, 0.5, 0.3), known=True, labels=50)
    assert found.accuracy == pytest.approx(1 / (1 + 2.718281828 ** -(0.01 + 4.35 * 0.1)))
    told = found.summary()
    assert (told["low"], told["high"]) == (pytest.approx(0.4734, abs=1e-3), pytest.approx(0.7454, abs=1e-3))
    assert says(told["sentence"], "47% to 75%", "without labels")


def test_where_it_cannot_be_relied_on_there_is_no_range_but_a_number_of_labels() -> None:
    told = estimate(Support(0.9, 0.9, 0.1), Support(0.8, 0.8, 0.1), known=False, labels=47).summary()
    assert (told["low"], told["high"]) == (None, None)
    assert says(told["sentence"], "unknown", "about 47")
    assert "%" not in told["sentence"]


@pytest.mark.parametrize(
    ("classes", "images", "enough"),
    [([10, 10, 10], 200, True), ([10, 10, 10], 199, False), ([9, 9, 10], 500, False), ([0, 2, 10, 0, 30], 500, True)],
)
def test_few_images_give_no_range(classes: list[int], images: int, enough: bool) -> None:
    """The middle class counts, without those that have no image."""
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(classes))
    assert measurable(Evidence(labels[:, None], labels, torch.tensor(1.0)), images) is enough
