"""The range for the accuracy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdtrans.trust.estimate import estimate
from impressions import impression_of
from support import says


@given(seed=st.integers(0, 10**6), images=st.integers(1, 60), classes=st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_it_is_a_range_of_shares_around_what_the_opinions_say(seed: int, images: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centers, nearest, before, predicted = torch.randint(classes, (4, images), generator=generator)
    found = estimate(impression_of(before, centers=centers, nearest=nearest, classes=classes), predicted)
    assert 0 <= found.low <= found.unanimous <= found.supported <= found.high <= 1


def test_opinions_that_all_agree_give_a_narrow_range_at_the_top() -> None:
    labels = torch.arange(300) % 3
    found = estimate(impression_of(labels), labels.clone())
    assert (found.low, found.high) == (1.0, 1.0)


def test_the_figures_of_a_case_worked_by_hand() -> None:
    """100 images: on 60 all opinions are the prediction, on 20 more the centres alone, on 20 nothing."""
    predicted = torch.zeros(100, dtype=torch.long)
    centers, before = torch.ones(100, dtype=torch.long), torch.ones(100, dtype=torch.long)
    before[:60] = 0
    centers[:80] = 0
    found = estimate(impression_of(before, centers=centers, nearest=before, classes=2), predicted)
    assert (found.unanimous, found.supported) == (0.6, 0.8)
    assert found.low == pytest.approx(0.5 - 2 * (0.5 * 0.5 / 100) ** 0.5)
    assert found.high == pytest.approx(0.9 + 2 * (0.9 * 0.1 / 100) ** 0.5)


def test_a_source_only_model_is_not_asked_about_itself() -> None:
    before = torch.arange(100) % 2
    centers = (torch.arange(100) < 50).long()
    found = estimate(impression_of(before, centers=centers, nearest=centers, classes=2), before)
    assert found.supported == 0.5, "not 1, which its own opinion would give"


def test_it_never_says_accuracy_without_a_range() -> None:
    labels = torch.arange(90) % 3
    said = str(estimate(impression_of(labels), labels.roll(1)).summary()["sentence"])
    assert " to " in said
    assert "without labels" in said


def test_where_harm_was_found_nothing_is_promised_from_below() -> None:
    labels = torch.arange(90) % 3
    found = estimate(impression_of(labels), labels.clone(), harm=True)
    assert (found.low, found.high) == (0.0, 1.0)
    told = found.summary()
    assert told["harm"] is True
    assert says(str(told["sentence"]), "cannot be estimated")
