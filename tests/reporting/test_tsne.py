"""t-SNE is what its paper says, and as good as scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE, trustworthiness

from cdtrans.reporting.tsne import affinities, gradient, principal_components, tsne
from support import devices


def points(n: int = 40, d: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def test_the_gradient_is_that_of_the_divergence() -> None:
    (p,), y = affinities(points()[None], 5.0), points(d=2, seed=1).requires_grad_()
    near = 1 / (1 + (y[:, None] - y).square().sum(-1))
    near = near * (1 - torch.eye(len(y)))
    divergence = torch.special.xlogy(p, p).sum() - torch.xlogy(p, (near / near.sum()).clamp(min=1e-12)).sum()
    (expected,) = torch.autograd.grad(divergence, y)
    torch.testing.assert_close(gradient(p[None], y.detach()[None])[0], expected, rtol=1e-6, atol=1e-9)


def test_the_principal_components_are_those_of_scikit_learn() -> None:
    x = points() * torch.tensor([1.0, 5.0, 0.1, 3.0, 1.0, 1.0])
    u, s, _ = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    expected = torch.from_numpy(u * s)[:, :2] / float((u * s)[:, 0].std(ddof=1))
    (ours,) = principal_components(x[None])
    torch.testing.assert_close(ours.abs(), expected.abs(), rtol=1e-6, atol=1e-9)
    assert (ours.gather(0, ours.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_neighbours_stay_neighbours_as_with_scikit_learn(device: str) -> None:
    x = (load_digits().data[:300] / 16).astype(np.float32)
    ours = tsne(torch.from_numpy(x)[None].to(device), 30.0)[0].cpu().numpy()
    theirs = TSNE(perplexity=30.0, init="pca", max_iter=500, random_state=0).fit_transform(x)
    assert trustworthiness(x, ours) > trustworthiness(x, theirs) - 0.01 > 0.95


def test_equal_points_are_no_problem() -> None:
    x = torch.ones(2, 12, 4)
    x[1, 6:] = 2
    one, two = tsne(x, 3.0)
    assert one.isfinite().all()
    assert two.isfinite().all()
    assert (two[:6, 0] - two[6:, 0]).abs().min() > 1, "two heaps"


@pytest.mark.parametrize("device", devices())
def test_a_view_is_laid_out_as_if_it_were_alone(device: str) -> None:
    """Before t-SNE's chaos sets in: after many steps the order of additions decides where a group goes."""
    x = torch.stack([points(), 100 * points(seed=1), points(seed=2) + 5]).to(device)
    p, y = affinities(x, 5.0), principal_components(x)
    for view in range(3):
        alone, start = affinities(x[view : view + 1], 5.0), principal_components(x[view : view + 1])
        torch.testing.assert_close(p[view], alone[0])
        torch.testing.assert_close(y[view], start[0])
        torch.testing.assert_close(gradient(p, y)[view], gradient(alone, start)[0])
