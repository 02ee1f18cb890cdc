"""CGDM by hand: the weighted loss, the gradients' discrepancy, and what each kind of update may change."""

import math
from functools import partial

import pytest
import torch

from cdtrans.methods.base import Batch
from cdtrans.methods.cgdm import CGDM, gradient_discrepancy, weighted_loss
from cdtrans.methods.mcd import supervised_loss
from support import Updates, tiny_batch, tiny_method

make_method = partial(tiny_method, CGDM, hidden=8)


def batch() -> Batch:
    return tiny_batch()._replace(y_t=torch.tensor([0, 0, 1, 1, 2, 2]))


class TestWeightedLoss:
    def test_by_hand(self) -> None:
        p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
        weights = [1.5, 1 + math.exp(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
        losses = [-math.log(0.5), -math.log(0.1)]
        expected = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights) / 2
        assert float(weighted_loss([p.log()], torch.tensor([0, 1]))) == pytest.approx(expected, rel=1e-4)

    def test_gradient_flows_through_the_weights_and_not_through_their_sum(self) -> None:
        z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
        weighted_loss([z], torch.tensor([0])).backward()
        assert z.grad is not None
        torch.testing.assert_close(z.grad, torch.tensor([[-0.5, 0.5]]).double(), atol=1e-4, rtol=0)  # dH = 0 here
        moved = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
        weighted_loss([moved], torch.tensor([0])).backward()
        assert moved.grad is not None
        plain = moved.detach().softmax(dim=1) - torch.tensor([[1.0, 0.0]])
        assert (moved.grad - plain).abs().max() > 0.01


class TestGradientDiscrepancy:
    def test_by_hand(self) -> None:
        w, b = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
        source = (w * torch.tensor([[1.0, 0.0], [1.0, 1.0]])).sum() + (b * torch.tensor([1.0, 0.0])).sum()
        target = (w * torch.tensor([[2.0, 0.0], [1.0, -1.0]])).sum() - (b * torch.tensor([3.0, 0.0])).sum()
        # rows of w: cos 1 and 0, on average 0.5; b: cos -1
        assert float(gradient_discrepancy(source, target, [w, b])) == pytest.approx(1 - (0.5 - 1) / 2)

    def test_biases_before_a_batchnorm_are_left_out(self) -> None:
        method = make_method()
        compared = {id(p) for p in method.compared()}
        left = [name for name, p in method.classifiers.named_parameters() if id(p) not in compared]
        assert left == [f"heads.{head}.{layer}.bias" for head in (0, 1) for layer in (1, 5)]


def test_the_updates_minimise_the_paper_s_losses() -> None:
    weights = {"entropy": 0.3, "balance": 0.2, "labels": 0.5, "gradients": 0.7, "trade_off": 1.5}
    method = make_method(dropout=0.0, generator_updates=1, **weights)
    with torch.no_grad():
        for head in method.classifiers.heads:
            head[-1].weight.mul_(300)  # predictions of different certainty
    update = Updates(method)
    method.train_step(batch(), torch.tensor(0.5), update)
    source, target = map(method.classifiers.each, method.features(batch().x_s, batch().x_t))
    p, q = (z.softmax(dim=1) for z in target)
    certainty = torch.zeros(())
    for each in (p, q):
        mean = each.mean(dim=0)
        certainty = certainty - 0.3 * (each * each.log()).sum(dim=1).mean() + 0.2 * (mean * mean.log()).sum()
    supervised, labelled = supervised_loss(source, batch().y_s), weighted_loss(target, batch().y_t)
    d = 1.5 * (p - q).abs().mean()
    mismatch = gradient_discrepancy(supervised, labelled, method.compared())
    expected = [supervised + certainty + 0.5 * labelled, supervised + certainty - d, d + certainty + 0.7 * mismatch]
    assert update.losses == pytest.approx([float(x.detach()) for x in expected], rel=1e-3)
