"""MIC by hand: the teacher, the masked images, and what the label's confidence counts for."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods import mic
from cdtrans.methods.mic import MIC
from support import tiny_batch, tiny_method

HALF = torch.tensor(0.5)


def make_method(**options: float) -> MIC:
    method: MIC = tiny_method(MIC, hidden=8, **options)
    with torch.no_grad():
        for network in (method.network, method.teacher):
            network.head.classifier.weight.copy_(torch.eye(3, 16))  # predictions that are not all alike
    return method


@pytest.fixture
def upper_half_masked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    def hide(x: Tensor, share: float = 0.7, squares: int = 4) -> Tensor:
        assert (share, squares) == (0.7, 4)
        return torch.cat([torch.zeros_like(x[:, :, :8]), x[:, :, 8:]], dim=2)

    monkeypatch.setattr(mic, "masked", hide)
    return hide


class Recorded:
    """In place of the optimiser: the loss of the update, and the weights at which it is made."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method

    def __call__(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        self.loss = loss.detach()
        self.weights = [p.detach().clone() for p in self.method.network.parameters()]


def test_the_teacher_labels_whole_images_with_the_batch_s_statistics() -> None:
    method, batch = make_method(), tiny_batch()
    with torch.no_grad():
        method.teacher.head.classifier.weight.copy_(torch.eye(3, 16).flip(0))  # it has an opinion of its own
    feature = method.teacher.features(batch.x_t)
    normed = (feature - feature.mean(dim=0)) / (feature.var(dim=0, correction=0) + 1e-5).sqrt()
    p = method.teacher.head.classifier(normed).softmax(dim=1)
    confidence, labels = method.teach(batch.x_t)
    assert labels.tolist() == p.argmax(dim=1).tolist()
    torch.testing.assert_close(confidence, p.amax(dim=1))
    assert not method.teacher.training, "it drops no paths"


@pytest.mark.parametrize("weighted", [False, True])
def test_the_update_is_sdat_s_and_the_masked_images_at_weights_that_both_move(
    weighted: bool, upper_half_masked: Callable[[Tensor], Tensor]
) -> None:
    method, batch = make_method(rho=0.3, weighted=weighted), tiny_batch()
    confidence, labels = method.teach(batch.x_t)
    before = [p.detach().clone() for p in method.network.parameters()]
    source, target = method.network.encode_together(batch.x_s, batch.x_t)
    errors = F.cross_entropy(method.network.encode(upper_half_masked(batch.x_t)).logits, labels, reduction="none")
    task = F.cross_entropy(source.logits, batch.y_s) + method.confusion(target) + (confidence * errors).mean()
    trained = [p for p in method.network.parameters() if p.requires_grad]
    gradients = dict(zip(map(id, trained), torch.autograd.grad(task, trained), strict=True))
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    update = Recorded(method)
    losses = method.train_step(batch, HALF, update)
    for p, b, w in zip(method.network.parameters(), before, update.weights, strict=True):
        torch.testing.assert_close(w, b + 0.3 * gradients[id(p)] / norm if id(p) in gradients else b)
        torch.testing.assert_close(p.detach(), b, msg="and the perturbation is taken back")
    torch.testing.assert_close(update.loss, torch.stack(list(losses.values())).sum().detach())
    with torch.no_grad():
        for p, w in zip(method.network.parameters(), update.weights, strict=True):
            p.copy_(w)
        errors = F.cross_entropy(method.network.encode(upper_half_masked(batch.x_t)).logits, labels, reduction="none")
    torch.testing.assert_close(losses["loss_masked"].detach(), ((confidence if weighted else 1) * errors).mean())


def test_the_teacher_follows_at_once_and_then_with_decay_0_9() -> None:
    method = make_method()
    weight, averaged = method.network.head.classifier.weight, method.teacher.head.classifier.weight
    expected = 0.0
    with torch.no_grad():
        averaged.zero_()
    for step in range(1, 15):
        with torch.no_grad():
            weight.fill_(step)
        method.after_step(tiny_batch(), HALF)
        decay = min(1 - 1 / (step + 1), 0.9)
        expected = decay * expected + (1 - decay) * step
        torch.testing.assert_close(averaged, torch.full_like(averaged, expected))
