"""MSTN by hand: class means, moving centres, and which predictions they are made of."""

from functools import partial

import pytest
import torch

from cdtrans.methods.mstn import MSTN, class_means
from support import tiny_batch, tiny_method

make_method = partial(tiny_method, MSTN, hidden=8)


def test_class_means_by_hand() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    means, present = class_means(features, torch.tensor([2, 0, 2]), 3)
    assert means.tolist() == [[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]]
    assert present[:, 0].tolist() == [True, False, True]


def test_centres_move_by_three_tenths_and_absent_classes_stay() -> None:
    method = make_method()
    centers = torch.ones(3, 2)
    features = torch.tensor([[11.0, 1.0], [21.0, 1.0]], requires_grad=True)
    moved = method.moved(centers, features, torch.tensor([1, 1]))
    expected = [[1.0, 1.0], [0.3 * 16 + 0.7, 1.0], [1.0, 1.0]]
    torch.testing.assert_close(moved, torch.tensor(expected))
    assert torch.equal(centers, moved), "they are remembered"
    moved.sum().backward()
    assert features.grad is not None
    torch.testing.assert_close(features.grad, torch.full((2, 2), 0.15))  # 0.3 of a mean of two


def test_the_loss_is_the_mean_squared_distance_of_the_centres() -> None:
    method = make_method(renewal=1.0)
    losses = method.losses(tiny_batch(), torch.tensor(1.0))
    expected = (method.source_centers - method.target_centers).square().mean()
    assert float(losses["loss_semantic"].detach()) == pytest.approx(float(expected), rel=1e-3)  # lambda is 0.9999
    source, _ = method.network.encode_together(tiny_batch().x_s, tiny_batch().x_t)
    torch.testing.assert_close(method.source_centers, class_means(source.logits, tiny_batch().y_s, 3)[0].detach())
