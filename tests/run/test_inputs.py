"""The held-out part of the source."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cdtrans.config import Config
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.scan import LabelledDomain
from cdtrans.run.inputs import AUTO_HOLDOUT_FROM, hold_out, stratified_split
from support import Notes, raises


@given(st.lists(st.integers(0, 4), max_size=200), st.floats(0, 0.5), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_it_is_a_stratified_part_and_no_class_loses_its_last_image(labels: list[int], share: float, seed: int) -> None:
    train, held_out = stratified_split(tuple(labels), share, seed)
    assert sorted(train + held_out) == list(range(len(labels)))
    array = np.array(labels, dtype=int)
    for k in set(labels):
        count = int((array == k).sum())
        assert int((array[held_out] == k).sum()) == int(share * count) < count


def test_the_seed_decides_which() -> None:
    labels = tuple(np.arange(300) % 3)
    assert stratified_split(labels, 0.1, 1) == stratified_split(labels, 0.1, 1)
    assert stratified_split(labels, 0.1, 1)[1] != stratified_split(labels, 0.1, 2)[1]


@pytest.mark.parametrize(
    ("setting", "images", "held_out", "notes"),
    [
        ("auto", AUTO_HOLDOUT_FROM * 10, 50, 0),
        ("auto", AUTO_HOLDOUT_FROM * 10 - 1, 0, 1),
        (0.3, 50, 10, 0),
        (0.1, 50, 0, 1),
        (0.0, 1000, 0, 0),
    ],
)
def test_auto_is_a_tenth_where_there_are_images_enough(
    setting: float | str, images: int, held_out: int, notes: int
) -> None:
    labels, paths = tuple(n % 10 for n in range(images)), tuple(map(str, range(images)))
    domain = LabelledDomain(Path(), paths, labels, tuple("abcdefghij"))
    source = Decoded(domain, np.zeros((images, 1, 1, 3), np.uint8), np.arange(images), paths)
    screen = Notes()
    train, held = hold_out(source, Config(holdout=setting), screen)
    assert (len(train), len(held)) == (images - held_out, held_out)
    assert len(screen.lines) == notes
    assert {*train.domain.paths, *held.digests} == {*paths}
    assert held.domain.paths == held.digests
    if not held_out:
        with raises("no-holdout"):
            hold_out(source, Config(holdout=setting, select="holdout"), screen)
