"""CAT by hand: the clusters, their alignment, the critic's confident targets, the ramp."""

import math

import pytest
import torch

from cdtrans.methods.cat import alignment, clustering, late, selected


def test_clustering_by_hand() -> None:
    features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]])  # d: 2, 8 and 10
    same, near, far = 2.0, 9.0 - 8.0, 0.0  # 0 and 1 are of one class; m = 9
    expected = 2 * (same + near + far) / 9
    assert float(clustering(features, torch.tensor([5, 5, 1]), 9.0)) == pytest.approx(expected)


def test_alignment_is_over_the_classes_that_both_batches_have() -> None:
    f_s, y_s = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0]]), torch.tensor([0, 0, 1])
    f_t, y_t = torch.tensor([[1.0, 4.0], [7.0, 7.0]]), torch.tensor([0, 2])
    assert float(alignment(f_s, y_s, f_t, y_t, 4)) == pytest.approx(8.0)  # ((1 - 1)^2 + (0 - 4)^2) / 2
    assert float(alignment(f_s, y_s, f_s, y_s, 4)) == 0
    assert float(alignment(f_s[:2], y_s[:2], f_t[1:], y_t[1:], 4)) == 0, "no class in both"


def test_the_mean_by_the_critic_s_weights_is_one_over_confident_targets() -> None:
    errors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert float((selected(errors > 3) * errors).mean()) == 6
    assert float((selected(errors > 9) * errors).mean()) == 0


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0.0, 0.0), (0.12, 0.0), (0.125, math.exp(-10)), (0.25, math.exp(-5)), (0.375, 1), (1, 1)],
)
def test_the_clusters_count_late(progress: float, expected: float) -> None:
    assert float(late(torch.tensor(progress))) == pytest.approx(expected, rel=1e-4)
