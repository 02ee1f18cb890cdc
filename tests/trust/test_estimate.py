"""The range for the accuracy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.trust.estimate import HALF_WIDTH, Estimate, estimate, measurable
from cdtrans.trust.support import Support
from impressions import evidence_of
from support import says

shares = st.floats(0, 1)
EVIDENCE = evidence_of(torch.arange(60) % 3)


def of(agreement: float = 0.5, steady: float = 0.5, shift: float = 0.5, stayed: float = 0.0) -> Estimate:
    evidence = EVIDENCE._replace(agreement=torch.tensor(agreement), steady=torch.tensor(steady))
    return estimate(Support(0.5, 0.5, shift), stayed, evidence, known=True, labels=50)


@given(agreement=shares, steady=shares, shift=shares, stayed=shares, more=st.floats(0.01, 1))
def test_it_is_a_range_of_shares_that_rises_with_agreement_and_falls_with_shift_and_inertia(
    agreement: float, steady: float, shift: float, stayed: float, more: float
) -> None:
    found = of(agreement, steady, shift, stayed)
    assert 0 <= found.low <= found.accuracy <= found.high <= 1
    assert found.high - found.low <= 2 * HALF_WIDTH + 1e-9
    assert of(agreement + more, steady, shift, stayed).accuracy >= found.accuracy
    assert of(agreement, steady + more, shift, stayed).accuracy >= found.accuracy
    assert of(agreement, steady, shift + more, stayed).accuracy <= found.accuracy
    assert of(agreement, steady, shift, stayed + more).accuracy < found.accuracy


def test_a_case_worked_by_hand() -> None:
    found = of(agreement=1 / (1 + 2.718281828**-2), shift=0.5, stayed=0.5)  # whose logits are 2, 0 (steady too) and 0
    assert found.accuracy == pytest.approx(1 / (1 + 2.718281828 ** -(-0.56 + 0.86 * 2 - 1.37 / 2)), abs=1e-6)
    told = found.summary()
    assert (told["low"], told["high"]) == (pytest.approx(0.4846, abs=1e-4), pytest.approx(0.7486, abs=1e-4))
    assert says(told["sentence"], "48% to 75%", "without labels")


def test_where_it_cannot_be_relied_on_there_is_no_range_but_a_number_of_labels() -> None:
    told = of()._replace(known=False, labels=47).summary()
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
    assert measurable(labels, images) is enough
