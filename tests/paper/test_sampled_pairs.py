"""The pairs of Fig. 2b."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cdtrans.paper.sampled_pairs import draw, sampled_pairs

from cdtrans.config import Config, make_config
from cdtrans.pairing.pairs import Search
from cdtrans.paper.pair_quality import UNKNOWN

LABELS = torch.tensor([2, 0, 1, 1, 2, 0, 2, 2])  # of the source; class 3 has no image there
TRUE = torch.tensor([0, 1, 2, 2, 1, 0, 3, UNKNOWN, 2, 1])
KNOWN = [0, 1, 2, 3, 4, 5, 8, 9]
NOTHING = torch.zeros(0, dtype=torch.long)
FOUND = Search(NOTHING, NOTHING, NOTHING.bool(), LABELS, TRUE.clamp(0), TRUE, LABELS, target_class="pair")


def config(share: float, pairing: str = "sampled", count: int = 24) -> Config:
    return make_config({"pairing": pairing, "sampled_pairs": count, "false_share": share})


@pytest.mark.parametrize("count", [1, 5, 8, 9, 24, 1000])
def test_true_partners_are_of_the_class_and_false_ones_are_not(count: int) -> None:
    sample = draw(LABELS, TRUE, count, seed=0)
    assert [len(x) for x in sample] == [count] * 3
    assert (LABELS[sample.source] == TRUE[sample.target]).all()
    assert (LABELS[sample.false] != TRUE[sample.target]).all()


def test_every_known_target_image_comes_once_before_any_comes_twice() -> None:
    assert sorted(draw(LABELS, TRUE, 8, seed=0).target.tolist()) == KNOWN
    assert draw(LABELS, TRUE, 24, seed=0).target.bincount()[KNOWN].tolist() == [3] * 8
    assert sorted(draw(LABELS, TRUE, 12, seed=0).target.bincount()[KNOWN].tolist()) == [1] * 4 + [2] * 4


def test_partners_are_uniform() -> None:
    sample = draw(LABELS, torch.tensor([2]), 20_000, seed=0)
    assert sample.source.bincount(minlength=8).tolist() == pytest.approx([5000, 0, 0, 0, 5000, 0, 5000, 5000], rel=0.1)
    assert sample.false.bincount(minlength=8).tolist() == pytest.approx([0, 5000, 5000, 5000, 0, 5000, 0, 0], rel=0.1)


def test_more_noise_contains_less_and_keeps_the_target_images() -> None:
    levels = [sampled_pairs(FOUND, TRUE, config(share)) for share in (0, 0.25, 0.5, 1)]
    wrong = [LABELS[found.source] != TRUE[found.target] for found in levels]
    assert [int(x.sum()) for x in wrong] == [0, 6, 12, 24]
    for lower, higher in pairwise(levels):
        assert torch.equal(lower.target, higher.target)
        false = LABELS[lower.source] != TRUE[lower.target]
        assert torch.equal(lower.source[false], higher.source[false]), "the same false partners"
        still = LABELS[higher.source] == TRUE[higher.target]
        assert torch.equal(lower.source[still], higher.source[still])


def test_what_is_taught_is_the_source_images_label_true_or_not() -> None:
    pairs = sampled_pairs(FOUND, TRUE, config(0.5)).pairs()
    assert torch.equal(pairs.target_labels, LABELS[pairs.source])
    assert torch.equal(pairs.source_labels, LABELS[pairs.source])


def test_the_true_pairs_that_are_left_are_those_beside_the_false_ones() -> None:
    noisy, left = (sampled_pairs(FOUND, TRUE, config(0.25, pairing)) for pairing in ("sampled", "sampled_true"))
    assert torch.equal(noisy.source, left.source)
    pairs = left.pairs()
    assert len(pairs) == 18
    assert pairs.proposed == 24
    assert (pairs.source_labels == TRUE[pairs.target]).all()


def test_pairs_depend_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (draw(LABELS, TRUE, 24, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.target, other.target)
    torch.manual_seed(99)
    changed = replace(FOUND, source=torch.arange(3), target=torch.arange(3), kept=torch.zeros(3, dtype=torch.bool))
    one, two = sampled_pairs(FOUND, TRUE, config(0.5)), sampled_pairs(changed, TRUE, config(0.5))
    assert torch.equal(one.source, two.source)


def test_without_a_known_image_there_is_no_pair() -> None:
    assert len(sampled_pairs(FOUND, torch.full((10,), UNKNOWN), config(0)).source) == 0
