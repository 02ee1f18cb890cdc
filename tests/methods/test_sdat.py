"""SDAT by hand: the perturbation of the weights, what it is made from, and that it is taken back."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.mcc import confusion
from cdtrans.methods.sdat import SDAT
from support import tiny_batch, tiny_method

HALF = torch.tensor(0.5)


def weights_of(method: SDAT) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in method.named_parameters()}


def task_gradients(method: SDAT) -> dict[str, Tensor]:
    """Gradients of CE(source) + v MCC(target), by the name of a weight of the network."""
    source, target = method.network.encode_together(tiny_batch().x_s, tiny_batch().x_t)
    loss = F.cross_entropy(source.logits, tiny_batch().y_s) + method.options.confusion * confusion(target.logits, 2.0)
    named = {f"network.{name}": p for name, p in method.network.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def update_of(method: SDAT, then: Callable[[], None], lr: float = 0.0) -> Callable[..., None]:
    """In place of the optimiser: SGD, after something else."""

    def update(loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        then()
        trained = [p for p in method.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for p, gradient in zip(trained, gradients, strict=True):
                p -= lr * gradient

    return update


def test_the_update_happens_where_the_task_loss_has_risen_most() -> None:
    """At distance rho in the direction of the task loss's gradient; the critic's weights stay where they are."""
    method = tiny_method(SDAT, hidden=8, rho=0.3, confusion=5.0)
    before, gradients, seen = weights_of(method), task_gradients(method), {}
    method.train_step(tiny_batch(), HALF, update_of(method, lambda: seen.update(weights_of(method))))
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for name, weight in before.items():
        expected = weight + 0.3 * gradients[name] / norm if name in gradients else weight
        torch.testing.assert_close(seen[name], expected, msg=lambda m, n=name: f"{n}: {m}")
    moved = torch.stack([(seen[name] - before[name]).norm() for name in before]).norm()
    assert moved.item() == pytest.approx(0.3, rel=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_is_taken_from_the_weights_before(parts: int) -> None:
    """With the gradient of all losses where the update was made, also if the backward pass computes them again."""
    method, gradients = tiny_method(SDAT, hidden=8, rho=0.3), {}
    before = weights_of(method)
    method.network.compute_in_parts(parts)

    def note() -> None:
        """The same losses once more: they depend on the batch alone."""
        loss = torch.stack(list(method.losses(tiny_batch(), HALF).values())).sum()
        named = {name: p for name, p in method.named_parameters() if p.requires_grad}
        gradients.update(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    losses = method.train_step(tiny_batch(), HALF, update_of(method, note, lr=0.1))
    for name, weight in weights_of(method).items():
        expected = before[name] - 0.1 * gradients[name] if name in gradients else before[name]
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert list(losses) == ["loss_source", "loss_domain", "loss_confusion"]


def test_the_weights_are_back_if_the_step_fails() -> None:
    """As it does on a GPU with too little memory: the step is then repeated in parts."""
    method = tiny_method(SDAT, hidden=8, rho=0.3)
    before = weights_of(method)

    def fail() -> None:
        assert any(not torch.equal(p, before[name]) for name, p in method.named_parameters())
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        method.train_step(tiny_batch(), HALF, update_of(method, fail))
    torch.testing.assert_close(weights_of(method), before, atol=1e-6, rtol=1e-6)


def test_under_autocast_the_second_pass_rounds_the_perturbed_weights() -> None:
    """Autocast keeps rounded weights from the first pass, which must not be used again."""
    method, again = tiny_method(SDAT, hidden=8, rho=100.0), []

    def with_fresh_roundings() -> None:
        torch.clear_autocast_cache()
        again.append(method.losses(tiny_batch(), HALF)["loss_source"])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = method.train_step(tiny_batch(), HALF, update_of(method, with_fresh_roundings))
    assert losses["loss_source"].item() == again[0].item()
