"""The part of the source that is only watched."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdtrans.trust.holdout import IMAGES_PER_CLASS, holdout_share, split


@given(st.lists(st.integers(0, 4), max_size=200), st.floats(0, 0.5), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_it_is_a_stratified_part_and_no_class_loses_its_last_image(labels: list[int], share: float, seed: int) -> None:
    train, held = split(tuple(labels), share, seed)
    assert sorted(train + held) == list(range(len(labels)))
    array = np.array(labels, dtype=int)
    for k in set(labels):
        count = int((array == k).sum())
        assert int((array[held] == k).sum()) == int(share * count) < count


def test_the_seed_decides_which() -> None:
    labels = tuple(np.arange(300) % 3)
    assert split(labels, 0.1, 1) == split(labels, 0.1, 1)
    assert split(labels, 0.1, 1)[1] != split(labels, 0.1, 2)[1]


@pytest.mark.parametrize(
    ("setting", "images", "share"),
    [("auto", IMAGES_PER_CLASS * 10, 0.1), ("auto", IMAGES_PER_CLASS * 10 - 1, 0.0), (0.3, 5, 0.3), (0, 10**6, 0.0)],
)
def test_auto_is_a_tenth_where_there_are_images_enough(setting: float | str, images: int, share: float) -> None:
    assert holdout_share(setting, images, 10) == share
