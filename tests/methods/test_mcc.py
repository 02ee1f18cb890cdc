"""MCC by hand: the class confusion of a batch."""

import pytest
import torch

from cdtrans.methods.mcc import MCC, confusion
from cdtrans.methods.minent import entropy
from support import tiny_batch, tiny_method


def test_it_is_the_mean_of_the_off_diagonal_of_the_normalised_confusion_matrix() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 4)
    p = (logits / 2).softmax(dim=1)
    matrix = p.T @ torch.diag(1 + torch.exp(-entropy(logits / 2))) @ p
    rows = matrix / matrix.sum(dim=1, keepdim=True)
    assert float(confusion(logits, 2.0)) == pytest.approx(float(rows.sum() - rows.trace()) / 4)


def test_an_absent_class_has_a_finite_gradient() -> None:
    logits = torch.tensor([[300.0, 0.0, -300.0], [1.0, 0.0, -300.0]], requires_grad=True)
    confusion(logits, 1.0).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_weights_of_images_get_no_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3, requires_grad=True)
    (ours,) = torch.autograd.grad(confusion(logits, 1.0), logits)
    weight, p = (1 + torch.exp(-entropy(logits.detach())))[:, None], logits.softmax(dim=1)
    (expected,) = torch.autograd.grad(-((weight * p**2).sum(dim=0) / (weight * p).sum(dim=0)).mean(), logits)
    torch.testing.assert_close(ours, expected)


def test_the_loss_is_of_the_target() -> None:
    method, batch = tiny_method(MCC, trade_off=0.5, temperature=0.01), tiny_batch()
    losses = method.losses(batch, torch.tensor(0.5))
    target = method.network.encode_each(batch.x_s, batch.x_t)[1]
    assert losses["loss_confusion"].item() == pytest.approx(0.5 * confusion(target.logits, 0.01).item())
