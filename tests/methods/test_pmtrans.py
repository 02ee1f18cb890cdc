"""PMTrans by hand: the mixed images and the two losses on them."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch
from cdtrans.methods.pmtrans import PMTrans, feature_loss, label_loss
from support import tiny_batch, tiny_method

make_method = partial(tiny_method, PMTrans, depth=2)


def make_batch() -> Batch:
    return tiny_batch(4)._replace(i_t=torch.tensor([7, 0, 3, 5]))


@pytest.mark.parametrize("shares", [[0.0] * 4, [1.0] * 4, [0.25] * 4, [1.0, 0.0, 0.5, 0.0]], ids=str)
def test_a_mixed_image_is_its_patches_mixed(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixing tokens is mixing patches, and so pixels: the embedding of a patch is linear."""
    method, batch, drawn = make_method().eval(), make_batch(), torch.tensor(shares)
    monkeypatch.setattr(method, "draw", lambda images, patches: drawn.expand(images, -1))
    features, share = method.features(batch.x_s, batch.x_t)
    pixels = drawn.view(2, 2).repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
    by_hand = (batch.x_s, pixels * batch.x_s + (1 - pixels) * batch.x_t, batch.x_t)
    for ours, images in zip(features, by_hand, strict=True):
        torch.testing.assert_close(ours, method.network.features(images))
    assert share.tolist() == [sum(shares) / 4] * 4


def test_the_target_s_share_is_beta_distributed() -> None:
    method = make_method()
    with torch.no_grad():
        method.mixture.copy_(torch.tensor([3.0, 1.0]))
    a, b = F.softplus(torch.tensor([3.0, 1.0])).tolist()
    drawn = 1 - method.draw(200, 200).detach()
    assert float(drawn.mean()) == pytest.approx(a / (a + b), abs=0.01)
    assert float(drawn.var()) == pytest.approx(a * b / ((a + b) ** 2 * (a + b + 1)), abs=0.003)


def test_the_mixture_and_the_weights_are_learnt() -> None:
    method = make_method()
    losses = method.losses(make_batch(), torch.tensor(0.5))
    torch.stack(list(losses.values())).sum().backward()
    for parameter in (method.mixture, method.weights):
        assert parameter.grad is not None
        assert (parameter.grad != 0).all()
    assert (method.weights.grad > 0).all()  # minimised, as in the authors' code: they become smaller
    assert F.softplus(method.weights).tolist() == pytest.approx([0.126928] * 2, rel=1e-4)


def test_feature_loss_by_hand() -> None:
    mixed, source, target = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[0.0, 1.0], [5.0, 0.0]])
    share = torch.tensor([1.0, 0.25])
    own, other = float(torch.tensor(1.0).exp()), 1.0  # exp of the cosines

    def minus_log(chosen: float, another: float) -> float:
        return -float(torch.tensor(chosen / (chosen + another)).log())

    apart = (minus_log(own, other) + 0.25 * minus_log(own, other) + 0.75 * minus_log(other, own)) / 2
    assert float(feature_loss(mixed, source, target, torch.tensor([0, 1]), share)) == pytest.approx(apart)
    one_class = minus_log(own, other) + minus_log(other, own)  # both source images are of the class
    together = (one_class + 0.25 * one_class + 0.75 * minus_log(other, own)) / 2
    assert float(feature_loss(mixed, source, target, torch.tensor([1, 1]), share)) == pytest.approx(together)


def test_label_loss_by_hand() -> None:
    logits, y_s, y_t = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.tensor([3, 3, 0])
    weights, share = torch.tensor([0.5, 1.0, 0.1]), torch.tensor([0.2, 0.5, 0.9])
    minus_log = -logits.log_softmax(dim=1)
    of_source = sum(float(share[i] * minus_log[i, y_s[i]]) for i in range(3))
    rest = [float(weights[i] * (1 - share[i])) for i in range(3)]
    mean = sum(rest[i] * float(minus_log[i, y_t[i]]) for i in range(3)) / sum(rest)
    expected = (of_source + mean * float((1 - share).sum())) / 3
    assert float(label_loss(logits, y_s, y_t, weights, share)) == pytest.approx(expected)


def test_the_bank_follows_the_target() -> None:
    method, batch = make_method(), make_batch()
    before: Tensor = method.bank.features.clone()
    method.after_step(batch, torch.tensor(0.5))
    moved = [i for i in range(10) if not torch.equal(before[i], method.bank.features[i])]
    assert moved == sorted(batch.i_t.tolist())
