"""BNM and FBNM by hand: the norms of certain predictions, the gradient, and what they refuse."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdtrans.config import make_config
from cdtrans.methods.bnm import BNM, largest_column_norms
from cdtrans.network.network import Output
from cdtrans.run.pipeline import adapt, resolve
from support import error_says, tiny_batch, tiny_method
from tiny_task import QUICK, draw

CERTAIN = 200 * torch.eye(4)[[0, 0, 0, 1, 2]]  # the logits of five images of three of four classes
NORM = 3**0.5 + 1 + 1


def nuclear(method: BNM, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The loss of a method that says this of the target."""
    encode = method.network.encode_each

    def fixed(*batches: Tensor) -> tuple[Output, Output]:
        source, target = encode(*batches)
        return source, target._replace(logits=logits)

    monkeypatch.setattr(method.network, "encode_each", fixed)
    return method.losses(tiny_batch(), torch.tensor(0.5))["loss_nuclear"]


@pytest.mark.parametrize("fast", [False, True])
def test_of_certain_predictions_it_is_the_sum_of_the_roots_of_the_class_counts(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = nuclear(tiny_method(BNM, trade_off=2.0, fast=fast), CERTAIN, monkeypatch)
    assert float(loss) == pytest.approx(-2 * NORM / 4)


def test_a_wide_batch_counts_as_many_columns_as_it_has_images() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.4, 0.6]])
    assert largest_column_norms(p).tolist() == pytest.approx([0.37**0.5, 0.6])
    torch.testing.assert_close(largest_column_norms(p.T), largest_column_norms(p.T[:, [1, 0]]))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("logits", [CERTAIN, torch.zeros(5, 4)])
def test_the_gradient_is_finite_at_repeated_and_vanishing_singular_values(
    fast: bool, logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nuclear(tiny_method(BNM, fast=fast), logits, monkeypatch), logits)
    assert gradient.isfinite().all()


def test_the_gradient_is_that_of_the_nuclear_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """-U V^T / min(B, K), with constant U and V."""
    torch.manual_seed(0)
    logits = torch.randn(5, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(nuclear(tiny_method(BNM), logits, monkeypatch), logits)
    p = logits.softmax(dim=1)
    u, _, vh = torch.linalg.svd(p.detach(), full_matrices=False)
    (expected,) = torch.autograd.grad(-(p * (u @ vh)).sum() / 4, logits)
    torch.testing.assert_close(ours, expected)


def test_a_small_batch_is_refused(tmp_path: Path) -> None:
    with error_says("bnm", "--batch-size", "4", "3"):
        resolve(make_config({"device": "cpu", "method": "bnm", "batch_size": 3}))
    for kind in ("a", "b"):
        draw(tmp_path / "source" / kind / "1.png", 0, seed=ord(kind))
        draw(tmp_path / "target" / f"{kind}.png", 0, seed=ord(kind) + 2)
    settings = QUICK | {"method": "bnm", "source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    with error_says("bnm", "4 images", "fewer"):
        adapt(out=tmp_path / "run", quiet=True, **settings)
    assert not (tmp_path / "run").exists()
