"""The range for the accuracy."""

import pytest
import torch
from hypothesis import given, strategies as st

from cdtrans.record.outcome import Interval, Support
from cdtrans.trust.estimate import HALF_WIDTH, accuracy_range, expected_accuracy, measurable
from impressions import evidence_of

shares = st.floats(0, 1)
EVIDENCE = evidence_of(torch.arange(60) % 3)


def of(agreement: float = 0.5, steady: float = 0.5, shift: float = 0.5, stayed: float = 0.0) -> tuple[float, Interval]:
    evidence = EVIDENCE._replace(agreement=torch.tensor(agreement), steady=torch.tensor(steady))
    known = Support(0.5, 0.5, shift), stayed, evidence
    return expected_accuracy(*known), accuracy_range(*known)


@given(agreement=shares, steady=shares, shift=shares, stayed=shares, more=st.floats(0.01, 1))
def test_it_is_a_range_of_shares_that_rises_with_agreement_and_falls_with_shift_and_inertia(
    agreement: float, steady: float, shift: float, stayed: float, more: float
) -> None:
    accuracy, band = of(agreement, steady, shift, stayed)
    assert 0 <= band.low <= accuracy <= band.high <= 1
    assert band.high - band.low <= 2 * HALF_WIDTH + 1e-9
    assert of(agreement + more, steady, shift, stayed)[0] >= accuracy
    assert of(agreement, steady + more, shift, stayed)[0] >= accuracy
    assert of(agreement, steady, shift + more, stayed)[0] <= accuracy
    assert of(agreement, steady, shift, stayed + more)[0] < accuracy


def test_a_case_worked_by_hand() -> None:
    agreement = 1 / (1 + 2.718281828**-2)  # its logit is 2; those of steady and shift are 0
    accuracy, band = of(agreement=agreement, shift=0.5, stayed=0.5)
    assert accuracy == pytest.approx(1 / (1 + 2.718281828 ** -(-0.56 + 0.86 * 2 - 1.37 / 2)), abs=1e-6)
    assert (band.low, band.high) == (pytest.approx(0.4846, abs=1e-4), pytest.approx(0.7486, abs=1e-4))


def test_a_model_agrees_with_the_reference_or_has_a_range_of_its_own_no_more() -> None:
    """The reference is every image's class modulo 3."""
    predicted = torch.arange(60) % 3
    assert EVIDENCE.agrees(predicted)
    assert not EVIDENCE.agrees(torch.where(torch.arange(60) < 12, (predicted + 1) % 3, predicted))


@pytest.mark.parametrize(
    ("classes", "images", "enough"),
    [([10, 10, 10], 200, True), ([10, 10, 10], 199, False), ([9, 9, 10], 500, False), ([0, 2, 10, 0, 30], 500, True)],
)
def test_few_images_give_no_range(classes: list[int], images: int, enough: bool) -> None:
    """The middle class counts, without those that have no image."""
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(classes))
    assert measurable(labels, images) is enough
