"""The samples of Fig. 2b."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from cdtrans.pairing.pairs import Domains, Proposals
from cdtrans.paper.pair_labels import UNKNOWN
from paired_labels import KNOWN, LABELS, TRUE, domains_of, planned
from research.figures.sampled_pairs import SampledPairs, draw
from support import raises


def sampled(share: float, *, drop: bool = False, domains: Domains | None = None, **options: Any) -> Proposals:
    options = {"pairs": 24, "false_share": share, "drop_false": drop} | options
    return planned(SampledPairs, domains or domains_of(), TRUE, **options)


class TestDraw:
    @pytest.mark.parametrize("count", [1, 5, 8, 9, 24, 1000])
    def test_true_partners_are_of_the_class_and_false_ones_are_not(self, count: int) -> None:
        sample = draw(LABELS, TRUE, count, seed=0)
        assert [len(x) for x in sample] == [count] * 3
        assert (LABELS[sample.source] == TRUE[sample.target]).all()
        assert (LABELS[sample.false] != TRUE[sample.target]).all()

    def test_every_known_target_image_comes_once_before_any_comes_twice(self) -> None:
        assert sorted(draw(LABELS, TRUE, 8, seed=0).target.tolist()) == KNOWN
        assert draw(LABELS, TRUE, 24, seed=0).target.bincount()[KNOWN].tolist() == [3] * 8
        assert sorted(draw(LABELS, TRUE, 12, seed=0).target.bincount()[KNOWN].tolist()) == [1] * 4 + [2] * 4

    def test_partners_are_uniform(self) -> None:
        sample = draw(LABELS, torch.tensor([2]), 20_000, seed=0)
        inside, outside = [5000, 0, 0, 0, 5000, 0, 5000, 5000], [0, 5000, 5000, 5000, 0, 5000, 0, 0]
        assert sample.source.bincount(minlength=8).tolist() == pytest.approx(inside, rel=0.1)
        assert sample.false.bincount(minlength=8).tolist() == pytest.approx(outside, rel=0.1)

    def test_it_depends_on_the_seed_alone(self) -> None:
        first, again, other = (draw(LABELS, TRUE, 24, seed) for seed in (1, 1, 2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first.target, other.target)

    def test_without_a_known_image_there_is_nothing(self) -> None:
        assert [len(x) for x in draw(LABELS, torch.full((10,), UNKNOWN), 24, seed=0)] == [0, 0, 0]


class TestSampledPairs:
    def test_more_noise_contains_less_and_keeps_the_target_images(self) -> None:
        levels = [sampled(share) for share in (0, 0.25, 0.5, 1)]
        wrong = [LABELS[found.source] != TRUE[found.target] for found in levels]
        assert [int(x.sum()) for x in wrong] == [0, 6, 12, 24]
        for lower, higher in pairwise(levels):
            assert torch.equal(lower.target, higher.target)
            false = LABELS[lower.source] != TRUE[lower.target]
            assert torch.equal(lower.source[false], higher.source[false]), "the same false partners"
            still = LABELS[higher.source] == TRUE[higher.target]
            assert torch.equal(lower.source[still], higher.source[still])

    def test_what_is_taught_is_the_source_images_label_true_or_not(self) -> None:
        pairs = sampled(0.5).pairs()
        assert torch.equal(pairs.target_labels, LABELS[pairs.source])
        assert torch.equal(pairs.source_labels, LABELS[pairs.source])

    def test_the_true_pairs_that_are_left_are_those_beside_the_false_ones(self) -> None:
        noisy, left = sampled(0.25), sampled(0.25, drop=True)
        assert torch.equal(noisy.source, left.source)
        pairs = left.pairs()
        assert len(pairs) == 18
        assert pairs.proposed == 24
        assert (pairs.source_labels == TRUE[pairs.target]).all()

    def test_pairs_depend_on_the_sample_s_seed_and_on_nothing_else(self) -> None:
        torch.manual_seed(99)
        one, two = sampled(0.5), sampled(0.5, domains=domains_of(seed=5))
        other = sampled(0.5, sample_seed=1)
        assert torch.equal(one.source, two.source)
        assert torch.equal(one.target, two.target)
        assert not torch.equal(one.target, other.target)

    def test_without_a_known_image_it_is_one_sentence(self) -> None:
        with raises("no-labelled-image"):
            planned(SampledPairs, domains_of(), torch.full((10,), UNKNOWN), pairs=24)
