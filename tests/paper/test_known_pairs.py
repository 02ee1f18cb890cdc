"""Pairs made with target labels: the nearest of the true class (Table 5), and the samples of Fig. 2b."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from cdtrans.methods import METHODS, WITH_TARGET_LABELS, require_method
from cdtrans.methods.base import Round, Sizes
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains, Proposals
from cdtrans.paper import known_pairs
from cdtrans.paper.known_pairs import GroundTruth, KnownPairs, SampledPairs, draw
from cdtrans.paper.pair_labels import UNKNOWN, adapt_with_labels
from cdtrans.runtime.screen import Screen
from support import error_says, raises
from tiny_task import make_source, make_task

LABELS = torch.tensor([2, 0, 1, 1, 2, 0, 2, 2])  # the source's; class 3 has no image there
TRUE = torch.tensor([0, 1, 2, 2, 1, 0, 3, UNKNOWN, 2, 1])
KNOWN = [0, 1, 2, 3, 4, 5, 8, 9]


def domains_of(labels: Tensor = LABELS, targets: int = len(TRUE), seed: int = 0) -> Domains:
    g = torch.Generator().manual_seed(seed)
    source, target = (Encoded(*torch.randn(2, n, 4, generator=g)) for n in (len(labels), targets))
    return Domains(source, labels, target)


def planned(kind: type[KnownPairs], domains: Domains, true: Tensor, **options: Any) -> Proposals:
    """As in a run: the method reads the labels when it plans."""
    sizes = Sizes(4, len(domains.source_labels), len(true))
    method = kind.with_labels(lambda: true)(nn.Identity(), kind.Options(**options), sizes)  # type: ignore[arg-type]
    return method.plan(domains, Round(1, 1, 1), torch.Generator())


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


class TestGroundTruth:
    def test_nearest_of_the_same_class_from_both_sides(self) -> None:
        angles_s, angles_t = torch.tensor([0.0, 10, 50, 90]), torch.tensor([2.0, 48, 60, 91, 89])
        labels, true = torch.tensor([0, 1, 0, 2]), torch.tensor([1, 0, 0, UNKNOWN, 1])
        source, target = (Encoded(directions(a), torch.randn(len(a), 3)) for a in (angles_s, angles_t))
        pairs = planned(GroundTruth, Domains(source, labels, target), true, mutual_pairs="once")
        listed = sorted(zip(pairs.source.tolist(), pairs.target.tolist(), strict=True))
        assert listed == [(0, 1), (1, 0), (1, 4), (2, 1), (2, 2)], "class 2 and the unknown image are in none"
        assert pairs.pairs().target_labels.tolist() == labels[pairs.source].tolist()
        assert pairs.arrays()["kept"].all()
        twice = planned(GroundTruth, Domains(source, labels, target), true)
        assert set(zip(twice.source.tolist(), twice.target.tolist(), strict=True)) == set(listed)
        assert len(twice.source) > len(listed)

    def test_without_a_known_image_it_is_one_sentence(self) -> None:
        with raises("no-labelled-image"):
            planned(GroundTruth, domains_of(), torch.full((10,), UNKNOWN))


def directions(degrees: Tensor) -> Tensor:
    radians = degrees.deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_only_ablations_have_these_methods() -> None:
    assert set(known_pairs.METHODS) == set(WITH_TARGET_LABELS)
    assert not set(known_pairs.METHODS) & set(METHODS)
    for name, kind in known_pairs.METHODS.items():
        assert kind.uses_target_labels
        with error_says(f"'{name}'", "target labels", "cdtrans ablate"):
            require_method(name)


def test_two_targets_have_methods_of_their_own() -> None:
    """Else the labels of one run would be those of another."""
    one, two = (GroundTruth.with_labels(lambda n=n: torch.tensor([n])) for n in (1, 2))
    assert (one.true_labels().tolist(), two.true_labels().tolist()) == ([1], [2])
    with pytest.raises(NotImplementedError):
        GroundTruth.true_labels()


@pytest.mark.parametrize(("method", "code"), [("cdtrans", "needs-no-labels"), ("ground_truth", "no-labelled-image")])
def test_a_method_without_labels_and_labels_of_other_images_are_refused(tmp_path: Path, method: str, code: str) -> None:
    settings = {"source_epochs": 1, "epochs": 1, "method": method}
    task = make_task(tmp_path / "task", **settings)
    places = {"source": str(task.source), "target": str(task.target)}
    task.config.write_text(yaml.safe_dump(yaml.safe_load(task.config.read_text()) | places))
    labels = make_source(tmp_path / "others", each=2)
    with raises(code):
        adapt_with_labels(labels=labels, config=task.config, out=tmp_path / "out", screen=Screen(quiet=True))
