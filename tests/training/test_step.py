"""A step that is captured learns exactly what a plain one learns."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from timm.models import VisionTransformer

from cdtrans.config import CDTransOptions, make_config
from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.cdtrans import CDTrans
from cdtrans.network.network import Head, Network
from cdtrans.runtime.screen import Screen
from cdtrans.training.adaptation import training_step
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import GRAPH_STEPS, WARM_UP, Memory, Step

STEPS = 20
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def tiny_model(drop_path: float) -> Network:
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0, drop_path_rate=drop_path
    )
    return Network(vit, Head(32, 5, "batchnorm"))


def make_step(model: Network, plan: str, device: str, *, capturable: bool = True) -> tuple[Optimisation, Step]:
    config = make_config({"precision": "fp32"})
    optimisation = Optimisation(model, config, lr=0.05, epochs=40, device=torch.device(device))
    method = CDTrans(model, CDTransOptions(), Sizes(5, 10, 10))
    memory = Memory(method, "pairs", Screen())
    step = Step(training_step(method, optimisation), optimisation, memory, plan, capturable=capturable)
    step.ahead = 10_000
    return optimisation, step


def batches(optimisation: Optimisation, device: str, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same for every plan; the rate changes on the way, as it does between epochs."""
    for i in range(steps):
        if i % 5 == 0:
            optimisation.start_epoch(1 + i // 5)
        torch.manual_seed(i)
        size = 3 if i == steps - 2 else 6  # one batch of another size
        x = torch.randn(2, size, 3, 32, 32, generator=torch.Generator().manual_seed(i)).to(device)
        n = torch.arange(size, device=device)
        yield *Batch(x[0], n % 5, x[1], n % 5, n, torch.ones(size, device=device)), torch.tensor(i / steps).to(device)


def train(model: Network, plan: str, device: str, steps: int = STEPS) -> tuple[Network, list[torch.Tensor], Step]:
    model = copy.deepcopy(model).to(device).train()
    optimisation, step = make_step(model, plan, device)
    return model, [step(*batch).clone() for batch in batches(optimisation, device, steps)], step


def test_on_the_cpu_every_step_is_plain() -> None:
    _, losses, step = train(tiny_model(0.1), "auto", "cpu", steps=WARM_UP + 1)
    assert step.graph is None
    assert all(loss.shape == (3,) and loss.isfinite().all() for loss in losses)
    assert step.names == ("loss_source", "loss_target", "loss_distillation")


def test_every_call_trains_once_on_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The road from plain to captured steps, on a CPU whose 'graph' runs the recorded step again when replayed."""

    class Recording:
        def replay(self) -> None:
            step.graph.output.copy_(train_once(*step.graph.inputs))

    @contextmanager
    def recorded(graph: Recording, capture_error_mode: str) -> Iterator[None]:
        before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimisation.state_dict()), optimisation.taken.clone()
        yield
        model.load_state_dict(before[0])  # capturing must train on nothing
        optimisation.load_state_dict(before[1])
        optimisation.taken.copy_(before[2])

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    plain, plain_losses, _ = train(tiny_model(0.0), "off", "cpu")
    model = copy.deepcopy(tiny_model(0.0)).train()
    optimisation, step = make_step(model, "graph", "cpu")
    step.capturable = True
    train_once = step._train
    losses = [step(*batch).clone() for batch in batches(optimisation, "cpu")]
    assert step.graph is not None
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain_losses))
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    assert int(optimisation.taken) == 5, "steps since the last start of an epoch"


@pytest.mark.parametrize(("plan", "ahead", "captured"), [("auto", 49, 0), ("auto", 50, 1), ("graph", 1, 1)])
def test_it_is_captured_once_if_enough_steps_are_ahead_or_if_asked(
    plan: str, ahead: int, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GRAPH_STEPS == 50
    calls = []
    optimisation, step = make_step(tiny_model(0.0), plan, "cpu")
    step.capturable, step.ahead = True, ahead

    def capture(inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append(step.calls)
        step.graph = lambda *inputs: torch.zeros(3)  # type: ignore[assignment]

    monkeypatch.setattr(step, "_capture", capture)
    for batch in batches(optimisation, "cpu", WARM_UP + 3):
        step(*batch)
    assert calls == [WARM_UP + 1] * captured


@needs_gpu
@pytest.mark.gpu
def test_captured_steps_equal_plain_ones() -> None:
    plain, plain_losses, _ = train(tiny_model(0.0), "off", "cuda")
    fast, fast_losses, step = train(tiny_model(0.0), "graph", "cuda")
    assert step.graph is not None, "the step was captured"
    torch.testing.assert_close(torch.stack(fast_losses), torch.stack(plain_losses), atol=2e-4, rtol=2e-4)
    for (name, a), b in zip(fast.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


@needs_gpu
@pytest.mark.gpu
def test_captured_steps_draw_fresh_random_numbers_from_the_seed() -> None:
    _, once, _ = train(tiny_model(0.5), "graph", "cuda")
    _, again, _ = train(tiny_model(0.5), "graph", "cuda")
    _, without, _ = train(tiny_model(0.0), "graph", "cuda")
    torch.testing.assert_close(torch.stack(once), torch.stack(again), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(torch.stack(once)[-1], torch.stack(without)[-1])


@needs_gpu
@pytest.mark.gpu
def test_a_short_run_is_left_alone() -> None:
    model = tiny_model(0.0).cuda()
    optimisation, step = make_step(model, "auto", "cuda")
    step.ahead = STEPS
    for batch in batches(optimisation, "cuda"):
        step(*batch)
    assert step.graph is None


@needs_gpu
@pytest.mark.gpu
def test_a_method_that_cannot_be_captured_is_not() -> None:
    optimisation, step = make_step(tiny_model(0.0).cuda(), "graph", "cuda", capturable=False)
    for batch in batches(optimisation, "cuda"):
        step(*batch)
    assert step.graph is None
