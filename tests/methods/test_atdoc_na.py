"""ATDOC-NA by hand: the vote, the weighted loss, and what the bank remembers."""

import pytest
import torch
from torch.nn import functional as F

from cdtrans.methods.atdoc_na import ATDOCNA, MemoryBank
from cdtrans.methods.base import Sizes
from support import tiny_batch, tiny_method


def made_bank(features: list[list[float]], predictions: list[list[float]], neighbours: int) -> MemoryBank:
    bank = MemoryBank(Sizes(len(predictions[0]), 1, len(features)), len(features[0]), neighbours)
    bank.features.copy_(torch.tensor(features))
    bank.predictions.copy_(torch.tensor(predictions))
    return bank


def test_the_nearest_entries_vote_and_an_image_has_no_vote_for_itself() -> None:
    bank = made_bank([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]], [[0, 9], [0.8, 0], [0.2, 0.1], [0, 7]], 2)
    labels, weights = bank.vote(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 3]))
    assert labels.tolist() == [0, 1]
    assert weights.tolist() == pytest.approx([0.5, 4.5])


def test_a_target_smaller_than_the_vote() -> None:
    assert MemoryBank(Sizes(3, 1, 2), 4, 5).vote(torch.randn(2, 4), torch.arange(2))[0].shape == (2,)


def test_the_loss_is_a_mean_by_weights_that_rises_with_progress() -> None:
    method, batch = tiny_method(ATDOCNA), tiny_batch(4)._replace(i_t=torch.tensor([7, 0, 3, 5]))
    method.bank.predictions.copy_(torch.rand(10, 3))
    _, target = method.network.encode_each(batch.x_s, batch.x_t)
    labels, weights = method.bank.vote(target.feature.detach(), batch.i_t)
    errors = [-float(z.log_softmax(0)[y]) for z, y in zip(target.logits.detach(), labels, strict=True)]
    mean = sum(float(w) * e for w, e in zip(weights, errors, strict=True)) / float(weights.sum())
    for progress in (0.0, 0.5):
        losses = method.losses(batch, torch.tensor(progress))
        assert float(losses["loss_target"].detach()) == pytest.approx(0.2 * progress * mean, rel=1e-4)


def test_the_bank_remembers_the_batch_in_eval_mode_and_nothing_else() -> None:
    method, batch = tiny_method(ATDOCNA), tiny_batch(4)._replace(i_t=torch.tensor([7, 0, 3, 5]))
    before = {name: x.clone() for name, x in method.state_dict().items()}
    method.after_step(batch, torch.tensor(0.5))
    assert method.network.training
    changed = {name for name, x in method.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"bank.features", "bank.predictions"}
    others = [1, 2, 4, 6, 8, 9]
    assert torch.equal(method.bank.features[others], before["bank.features"][others])
    feature, logits = method.eval().network.encode(batch.x_t)
    torch.testing.assert_close(method.bank.features[batch.i_t], F.normalize(feature.detach()))
    p = logits.detach().softmax(dim=1)
    torch.testing.assert_close(method.bank.predictions[batch.i_t], p**2 / (p**2).sum(dim=0))
    assert method.bank.predictions[batch.i_t].sum(dim=0).tolist() == pytest.approx([1, 1, 1])
