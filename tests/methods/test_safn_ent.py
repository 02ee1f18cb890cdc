"""SAFN+ENT by hand: the norm's loss and its gradient, the head, and what is served."""

import pytest
import torch

from cdtrans.methods.minent import entropy
from cdtrans.methods.safn_ent import SAFNENT, mean_length
from cdtrans.network.network import BottleneckHead
from support import tiny_batch, tiny_method


def test_the_gradient_is_that_of_the_paper_s_loss_whose_value_is_constant() -> None:
    torch.manual_seed(0)
    f, delta = torch.randn(5, 7, requires_grad=True), 0.3
    norm = f.norm(dim=1)
    paper = ((norm - norm.detach() - delta) ** 2).mean()
    assert paper.item() == pytest.approx(delta**2)
    (theirs,) = torch.autograd.grad(paper, f)
    (ours,) = torch.autograd.grad(-2 * delta * mean_length(f), f)
    torch.testing.assert_close(ours, theirs)


def test_a_feature_of_length_0_has_a_finite_gradient() -> None:
    f = torch.zeros(2, 3, requires_grad=True)
    mean_length(f).backward()
    assert f.grad is not None
    assert f.grad.isfinite().all()


def test_the_losses_by_hand() -> None:
    method, batch = tiny_method(SAFNENT, hidden=8, dropout=0.0, delta=0.3, trade_off=0.5, entropy=0.2), tiny_batch()
    torch.nn.init.normal_(method.head.classifier.weight)
    losses = method.losses(batch, torch.tensor(0.5))
    source, target = (method.head(method.network.features(x)) for x in (batch.x_s, batch.x_t))
    length = source.feature.norm(dim=1).mean() + target.feature.norm(dim=1).mean()
    torch.testing.assert_close(losses["loss_norm"], -2 * 0.3 * 0.5 * length)
    torch.testing.assert_close(losses["loss_entropy"], 0.2 * entropy(target.logits).mean())
    assert list(losses) == ["loss_source", "loss_norm", "loss_entropy"]


def test_dropout_keeps_the_mean_of_the_squared_length_and_is_off_in_predictions() -> None:
    torch.manual_seed(0)
    head, x = BottleneckHead(4, 3, bottleneck=20_000, dropout=0.75), torch.randn(8, 4)
    with torch.no_grad():
        dropped, full = head(x).feature, head.block(x)
        head.eval()
        plain = head(x).feature
    assert (dropped == 0).float().mean().item() == pytest.approx(0.875, abs=0.01)  # ReLU and Dropout
    assert dropped.square().sum().item() == pytest.approx(full.square().sum().item(), rel=0.02)
    assert (plain == 0).float().mean().item() < 0.6
