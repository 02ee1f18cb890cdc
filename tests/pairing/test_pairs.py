"""Pairs against the authors' ordered lists, and the properties that hold for any features."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdtrans.pairing.pairs import Pairs, require_pairs, search_pairs
from support import devices, error_says


def from_golden(g: dict, case: str, device: str = "cpu", **options) -> Pairs:
    names = ("feat_s", "labels_s", "feat_t", "logits_t")
    return search_pairs(*(g[f"{case}/{name}"].to(device) for name in names), **options).pairs()


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
    twice, once = rows(from_golden(g, "clusters")), rows(from_golden(g, "clusters", mutual="once"))
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
    everything = search_pairs(features_s, labels, features_t, logits, center_aware=False).pairs()
    kept = search_pairs(features_s, labels, features_t, logits).pairs()
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
    with error_says("0 of 70 pairs", "epoch 2", "centre", "--source-epochs", "--no-center-aware"):
        require_pairs(Pairs(empty, empty, empty, empty, proposed=70), 2)


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
    domains = [g[f"noise/{name}"] for name in ("feat_s", "labels_s", "feat_t", "logits_t")]
    taught = search_pairs(*domains, center_aware=False, target_class="pair")
    assert taught.arrays()["target_labels"].tolist() == taught.pairs().target_labels.tolist()
    filtered = search_pairs(*domains, target_class="pair")
    assert not filtered.kept.all()
    assert filtered.arrays()["target_labels"].tolist() == filtered.centers[filtered.target].tolist()
