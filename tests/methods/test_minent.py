"""MinEnt by hand: the entropy, its ramp and its scale."""

import math

import pytest
import torch

from cdtrans.methods.minent import MinEnt, entropy
from support import tiny_batch, tiny_method


def test_entropy_is_that_of_the_softmax_and_finite_with_its_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [math.log(3), 0.0, -1e4], [1e4, 0.0, -1e4]], requires_grad=True)
    h = entropy(logits)
    expected = [math.log(3), -0.75 * math.log(0.75) - 0.25 * math.log(0.25), 0.0]
    assert h.tolist() == pytest.approx(expected, abs=1e-6)
    h.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert entropy(logits.detach().bfloat16()).dtype == torch.float32


def test_the_weight_rises_with_progress_and_the_entropy_is_relative_to_the_largest() -> None:
    method, batch = tiny_method(MinEnt, trade_off=0.5), tiny_batch()
    torch.nn.init.zeros_(method.network.head.classifier.weight)  # every prediction is uniform
    values = [method.losses(batch, torch.tensor(p))["loss_entropy"].item() for p in (0.0, 0.5, 1.0)]
    assert values == pytest.approx([0.0, 0.25, 0.5])
