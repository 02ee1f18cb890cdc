"""A class that swallows the others is named, an uneven target is not accused."""

import pytest

from cdtrans.trust.shares import Crowded, crowded_class

EVEN = [10] * 7


def test_the_class_that_most_images_are_put_into() -> None:
    assert crowded_class([2, 3, 80, 5, 4, 3, 3], EVEN) == Crowded(2, 0.8, pytest.approx(1 / 7))


@pytest.mark.parametrize(
    ("predicted", "source"),
    [
        ([50, 25, 25, 0, 0, 0, 0], EVEN),  # half, not more
        ([59, 41], [1, 1]),  # two classes: more than half is nothing special
        ([60, 20, 10, 5, 3, 1, 1], [30, 10, 5, 5, 5, 5, 5]),  # the source is nearly as uneven
        ([0] * 7, EVEN),
    ],
    ids=["half", "two classes", "an uneven source", "no images"],
)
def test_shares_that_may_well_be_right(predicted: list[int], source: list[int]) -> None:
    assert crowded_class(predicted, source) is None


def test_a_class_that_is_rare_in_the_source_may_take_what_any_class_may() -> None:
    """Else two images of a rare class would be a crowd."""
    crowd = crowded_class([60, 10, 10, 10, 10], [1, 100, 100, 100, 100])
    assert crowd is None, "exactly three times a fifth"
    assert crowded_class([61, 9, 10, 10, 10], [1, 100, 100, 100, 100]) == Crowded(0, 0.61, 0.2)
    assert crowded_class([61, 9, 10, 10, 10], [0] * 5) == Crowded(0, 0.61, 0.2), "a source without counts"
