"""CDAN+BSP by hand: the largest singular value, its gradient, and how the penalty scales."""

import pytest
import torch

from cdtrans.methods.cdan_bsp import CDANBSP, first_squared
from cdtrans.network.network import Output
from support import tiny_batch, tiny_method


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_value_and_gradient_are_those_of_an_svd(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    f = torch.randn(shape, requires_grad=True)
    square = first_squared(f)
    (gradient,) = torch.autograd.grad(square, f)
    u, s, vh = torch.linalg.svd(f.detach())
    torch.testing.assert_close(square.detach(), s[0] ** 2)
    torch.testing.assert_close(gradient, 2 * s[0] * torch.outer(u[:, 0], vh[0]), atol=1e-4, rtol=1e-3)


def test_single_equal_and_vanishing_singular_values() -> None:
    for f, expected in ((torch.diag(torch.tensor([1.0, 3.0])), 9.0), (3 * torch.eye(4), 9.0), (torch.zeros(4, 5), 0.0)):
        f.requires_grad_()
        square = first_squared(f)
        (gradient,) = torch.autograd.grad(square, f)
        assert square.item() == pytest.approx(expected)
        assert gradient.isfinite().all()


def test_it_is_computed_in_float32_under_autocast() -> None:
    f = torch.randn(5, 8)
    exact = first_squared(f)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(first_squared(f), exact)


def test_the_penalty_does_not_depend_on_the_size_of_the_batch() -> None:
    """Twice the same images have twice the square. 36 images with 256 equal features of 1 have 36 * 256."""
    method = tiny_method(CDANBSP, hidden=8)
    method.domain = lambda source, target, strength: strength  # the critic has an opinion of 16 features only

    def penalty(images: int, features: int) -> float:
        out = Output(torch.ones(images, features), torch.zeros(images, 3))
        return float(method.losses_of(out, out, tiny_batch(images), torch.tensor(0.0))["loss_spectral"])

    expected = 2 * 1e-4 * 36 * 256
    assert penalty(36, 256) == pytest.approx(expected)
    assert penalty(6, 16) == pytest.approx(expected)
