"""A step that is captured or compiled learns exactly what a plain one learns."""

import copy

import torch
from timm.models import VisionTransformer

import pytest
from cdtrans.config import make_config
from cdtrans.model.branches import CDTrans
from cdtrans.model.head import Head
from cdtrans.screen import Screen
from cdtrans.training.losses import adaptation_losses
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import WARM_UP, Step

STEPS = 20
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def tiny_model(drop_path: float) -> CDTrans:
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0, drop_path_rate=drop_path
    )
    return CDTrans(vit, Head(32, 5, "batchnorm"))


def train(model: CDTrans, plan: str, device: str, steps: int = STEPS) -> tuple[CDTrans, list[torch.Tensor], Step]:
    """The same batches for every plan; the rate changes on the way, as it does between epochs."""
    model = copy.deepcopy(model).to(device).train()
    optimisation = Optimisation(model, make_config({"precision": "fp32"}), lr=0.05, epochs=40, device=torch.device(device))
    step = Step(
        lambda a, b, y, z: adaptation_losses(model(a, b), y, z, False),
        optimisation,
        plan=plan,
        steps_ahead=10_000,
        screen=Screen(quiet=True),
    )
    losses = []
    for i in range(steps):
        optimisation.start_epoch(1 + i // 5)
        torch.manual_seed(i)
        size = 3 if i == steps - 2 else 6  # one batch of another size
        x = torch.randn(2, size, 3, 32, 32, generator=torch.Generator().manual_seed(i)).to(device)
        y = torch.arange(size, device=device) % 5
        losses.append(step(x[0], x[1], y, y).clone())
    return model, losses, step


def test_on_the_cpu_every_step_is_plain() -> None:
    _, losses, step = train(tiny_model(0.1), "auto", "cpu", steps=WARM_UP + 1)
    assert step.replay is None
    assert all(loss.shape == (3,) and loss.isfinite().all() for loss in losses)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["graph", "full"])
def test_captured_steps_equal_plain_ones(plan: str) -> None:
    plain, plain_losses, _ = train(tiny_model(0.0), "off", "cuda")
    fast, fast_losses, step = train(tiny_model(0.0), plan, "cuda")
    assert step.replay is not None, "the step was captured"
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
    model = tiny_model(0.0)
    optimisation = Optimisation(
        model.cuda(), make_config({"precision": "fp32"}), lr=0.05, epochs=1, device=torch.device("cuda")
    )
    step = Step(
        lambda a, b, y: adaptation_losses(model(a, b), y, y, False),
        optimisation,
        plan="auto",
        steps_ahead=STEPS,
        screen=Screen(quiet=True),
    )
    x, y = torch.randn(2, 6, 3, 32, 32, device="cuda"), torch.arange(6, device="cuda") % 5
    for _ in range(STEPS):
        step(x[0], x[1], y)
    assert step.replay is None
