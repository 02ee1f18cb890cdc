"""DANN by hand: the reversed gradient, the ramp, the critic's loss."""

import math

import pytest
import torch

from cdtrans.methods.base import Batch
from cdtrans.methods.dann import DANN, reversed_gradient, rising
from support import tiny_method


def test_the_gradient_is_reversed_and_the_value_is_not() -> None:
    x, strength = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor(0.25)
    y = reversed_gradient(x, strength)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-0.75, -1.25]


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.0), (0.1, 2 / (1 + math.exp(-1)) - 1), (1.0, 0.99991)])
def test_lambda_rises_with_progress(progress: float, expected: float) -> None:
    assert float(rising(torch.tensor(progress), 10.0)) == pytest.approx(expected, abs=1e-5)


def batches(shift: float, seed: int = 0, images: int = 32) -> Batch:
    """Target images are brighter by `shift`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, images, 3, 16, 16, generator=generator)
    x[1] += shift
    y = torch.arange(images) % 3
    return Batch(x[0], y, x[1], y, torch.arange(images), torch.ones(images))


@pytest.mark.parametrize(("shift", "separable"), [(2.0, True), (0.0, False)])
def test_the_critic_learns_to_tell_shifted_domains_apart(shift: float, separable: bool) -> None:
    """Through the real head: neither its BatchNorm nor the critic's may hide the difference of the means. At progress 0
    the features get no gradient."""
    method = tiny_method(DANN, hidden=32)
    optimizer = torch.optim.Adam(method.critic.parameters(), lr=0.01)
    for step in range(60):  # each with other images, which a critic cannot memorise
        loss = method.losses(batches(shift, seed=step), torch.tensor(0.0))["loss_domain"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (float(loss.detach()) < 0.1) == separable
