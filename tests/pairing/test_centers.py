"""Weighted k-means labels against the authors' vectors, and the centre that loses all its images."""

import pytest
import torch

from cdtrans.pairing.pairs import centers, nearest_center, pseudo_labels
from support import devices


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", ["noise", "clusters", "missing_classes"])
def test_labels_equal_the_authors(golden, case: str, device: str) -> None:
    g = golden("pseudo")
    labels = pseudo_labels(g[f"{case}/feat_t"].to(device), g[f"{case}/logits_t"].to(device))
    assert labels.tolist() == g[f"{case}/pseudo_t"].tolist()


@pytest.mark.parametrize("case", ["noise", "clusters", "missing_classes"])
def test_first_centers_equal_the_authors(golden, case: str) -> None:
    g = golden("pseudo")
    found = centers(g[f"{case}/aug_feat_t"], g[f"{case}/prob_t"])
    torch.testing.assert_close(found, g[f"{case}/centers0"].to(found.dtype), atol=1e-6, rtol=1e-5)


def test_an_empty_center_takes_nobody(golden) -> None:
    g = golden("pseudo")
    logits = g["empty_center/logits_t"]
    labels = pseudo_labels(g["empty_center/feat_t"], logits)
    collapsed = g["empty_center/pseudo_t"]
    assert len(collapsed.unique()) == 1, "the vector shows the authors' collapse"
    assert len(labels.unique()) > 1
    first = g["empty_center/labels_round0"]
    assert set(labels.tolist()) <= set(first.tolist()), "only a class that won an image has a centre"


def test_a_class_never_predicted_is_never_a_label() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 5)
    logits[:, 3] = -10.0
    features = torch.randn(50, 8)
    features[0] = 100 * features[0]
    assert 3 not in pseudo_labels(features, logits).tolist()


def test_nearest_center_breaks_ties_to_the_lowest_class() -> None:
    x = torch.ones(1, 2)
    same = torch.ones(3, 2)
    assert nearest_center(x, same, torch.tensor([False, True, True])).tolist() == [1]
