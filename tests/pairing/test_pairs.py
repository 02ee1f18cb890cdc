"""Pairs against the authors' ordered lists, and the properties that hold for any features."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from cdtrans.config import CDTransOptions
from cdtrans.methods.base import Round, Sizes
from cdtrans.methods.cdtrans import CDTrans
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains, Pairs, Proposals, require_pairs
from support import devices, error_says


def domains_of(features_s: Tensor, labels: Tensor, features_t: Tensor, logits: Tensor) -> Domains:
    """The source's logits are not looked at."""
    return Domains(Encoded(features_s, features_s), labels, Encoded(features_t, logits))


def planned(domains: Domains, **options: Any) -> Proposals:
    """The plan of CDTrans, which looks at no network."""
    sizes = Sizes(domains.target.logits.shape[1], len(domains.source_labels), len(domains.target.logits))
    method = CDTrans(nn.Identity(), CDTransOptions(**options), sizes)  # type: ignore[arg-type]
    return method.plan(domains, Round(1, 1, 1), torch.Generator())


def golden_domains(g: dict, case: str, device: str = "cpu") -> Domains:
    return domains_of(*(g[f"{case}/{name}"].to(device) for name in ("feat_s", "labels_s", "feat_t", "logits_t")))


def from_golden(g: dict, case: str, device: str = "cpu", **options: Any) -> Pairs:
    return planned(golden_domains(g, case, device), **options).pairs()


def rows(pairs: Pairs) -> list[list[int]]:
    return torch.stack([pairs.source, pairs.target], dim=1).tolist()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", ["noise", "clusters", "missing_classes"])
@pytest.mark.parametrize("center_aware", [True, False])
def test_pairs_equal_the_authors_in_order(golden, case: str, center_aware: bool, device: str) -> None:
    g = golden("pseudo")
    pairs = from_golden(g, case, device, center_aware=center_aware)
    suffix = "filtered" if center_aware else "unfiltered"
    assert rows(pairs) == g[f"{case}/pairs_{suffix}"].tolist()
    labels = torch.stack([pairs.source_labels, pairs.target_labels], dim=1)
    assert labels.tolist() == g[f"{case}/labels_{suffix}"].tolist()


def test_mutual_pairs_count_twice_or_once(golden) -> None:
    g = golden("pseudo")
    twice, once = rows(from_golden(g, "clusters")), rows(from_golden(g, "clusters", mutual_pairs="once"))
    assert (len(twice), len(once)) == (338, 293)  # docs/method.md, section 3.4
    assert len({tuple(r) for r in once}) == len(once)
    assert {tuple(r) for r in once} == {tuple(r) for r in twice}
    first_seen = [r for i, r in enumerate(twice) if r not in twice[:i]]
    assert once == first_seen


@given(seed=st.integers(0, 10**6), ns=st.integers(1, 30), nt=st.integers(1, 30), k=st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_whatever_the_features(seed: int, ns: int, nt: int, k: int) -> None:
    g = torch.Generator().manual_seed(seed)
    features_s, features_t = torch.randn(ns, 4, generator=g), torch.randn(nt, 4, generator=g)
    labels, logits = torch.randint(k, (ns,), generator=g), torch.randn(nt, k, generator=g)
    domains = domains_of(features_s, labels, features_t, logits)
    everything, kept = planned(domains, center_aware=False).pairs(), planned(domains).pairs()
    assert everything.proposed == kept.proposed == len(everything) == ns + nt
    assert set(everything.source.tolist()) == set(range(ns)), "two-way: every source image is in some pair"
    assert set(everything.target.tolist()) == set(range(nt))
    agreeing = [
        r
        for r, a, b in zip(rows(everything), everything.source_labels, everything.target_labels, strict=True)
        if a == b
    ]
    assert rows(kept) == agreeing
    assert torch.equal(kept.source_labels, kept.target_labels)


def test_no_pair_left_says_what_rejected_them_and_what_to_try() -> None:
    empty = torch.empty(0, dtype=torch.long)
    with error_says("0 of 70", "pairs", "epoch 2", "centre", "--source-epochs", "--no-center-aware"):
        require_pairs(Pairs(empty, empty, empty, empty, torch.empty(0), proposed=70), 2)


@pytest.mark.parametrize("center_aware", [True, False])
def test_one_way_pairs_are_the_halves_of_the_two_way_list(golden, center_aware: bool) -> None:
    """The authors' list is P_T and then P_S; Eq. 3 has every source image once, Eq. 4 every target image."""
    g = golden("pseudo")
    how = {"center_aware": center_aware}
    both = rows(from_golden(g, "clusters", **how))
    from_source = rows(from_golden(g, "clusters", pairing="one_way_source", **how))
    from_target = rows(from_golden(g, "clusters", pairing="one_way_target", **how))
    assert from_target + from_source == both
    if not center_aware:
        assert [source for source, _ in from_source] == list(range(len(g["clusters/feat_s"])))
        assert [target for _, target in from_target] == list(range(len(g["clusters/feat_t"])))


def test_without_centres_a_target_image_is_taught_the_class_of_its_pair(golden) -> None:
    g = golden("pseudo")
    by_center = from_golden(g, "noise", center_aware=False)
    by_pair = from_golden(g, "noise", center_aware=False, target_class="pair")
    assert rows(by_center) == rows(by_pair)
    assert by_pair.target_labels.tolist() == by_pair.source_labels.tolist() == by_center.source_labels.tolist()
    assert by_center.target_labels.tolist() != by_pair.target_labels.tolist()
    filtered = from_golden(g, "noise", target_class="pair")
    assert filtered.target_labels.tolist() == from_golden(g, "noise").target_labels.tolist()


def test_what_is_written_of_a_pair_is_what_was_taught_and_of_a_rejected_one_why(golden) -> None:
    g = golden("pseudo")
    domains = golden_domains(g, "noise")
    taught = planned(domains, center_aware=False, target_class="pair")
    assert taught.arrays()["target_labels"].tolist() == taught.pairs().target_labels.tolist()
    filtered = planned(domains, target_class="pair")
    assert filtered.kept is not None
    assert not filtered.kept.all()
    assert filtered.arrays()["kept"].tolist() == filtered.kept.tolist()
    assert filtered.arrays()["target_labels"].tolist() == domains.centers[filtered.target].tolist()


def test_only_what_is_kept_is_trained_on_with_its_weight() -> None:
    n, kept = torch.arange(4), torch.tensor([True, False, True, True])
    pairs = Proposals(n, n + 10, n % 2, n % 3, kept, weight=n / 10, coupled=False).pairs()
    assert pairs.source.tolist() == [0, 2, 3]
    assert pairs.target.tolist() == [10, 12, 13]
    assert pairs.weight.tolist() == pytest.approx([0, 0.2, 0.3])
    assert (pairs.proposed, pairs.coupled) == (4, False)
    assert pairs.summary() == {"proposed": 4, "kept": 3, "sources_used": 3, "targets_used": 3, "classes_used": 2}
    plain = Proposals(n, n, n, n).pairs()
    assert (plain.weight.tolist(), plain.coupled, len(plain)) == ([1.0] * 4, True, 4)


@pytest.mark.parametrize(("sources", "targets"), [(3, 8), (8, 3), (4, 4)])
def test_at_random_the_larger_side_is_used_once_and_the_other_evenly(sources: int, targets: int) -> None:
    labels, of_target = torch.arange(sources) % 2, torch.arange(20) % 3
    domains = domains_of(torch.randn(sources, 4), labels, torch.randn(20, 4), torch.randn(20, 3))
    chosen = torch.arange(targets) + 5  # out of twenty
    generator = torch.Generator().manual_seed(0)
    proposals = Proposals.at_random(domains, chosen, of_target, generator)
    assert len(proposals.source) == len(proposals.target) == max(sources, targets)
    for side, images in ((proposals.source, torch.arange(sources)), (proposals.target, chosen)):
        counts = side.bincount(minlength=20)[images]
        assert int(counts.sum()) == len(side), "no other images"
        assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(proposals.source_labels, labels[proposals.source])
    assert torch.equal(proposals.target_labels, of_target[proposals.target])
    assert not proposals.coupled
    nothing = Proposals.at_random(domains, chosen[:0], of_target, generator, coupled=True)
    assert (len(nothing.source), len(nothing.target), nothing.coupled) == (0, 0, True)


def test_agreement_is_counted_from_each_side() -> None:
    """Three source images, of which the last is of another class than its nearest target image seems to be."""
    features = torch.eye(4)
    domains = domains_of(features[:3], torch.tensor([0, 1, 0]), features, 10 * features)
    assert domains.centers.tolist() == [0, 1, 2, 3]
    agreement = domains.agreement()
    assert agreement["source_agreement"] == pytest.approx(2 / 3)
    assert agreement["target_agreement"] == 0.5
    assert agreement["source_accuracy"] == pytest.approx(2 / 3)
