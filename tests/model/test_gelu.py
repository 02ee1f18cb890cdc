"""The GELU of compiled blocks is the GELU."""

import math

import pytest
import torch
from timm.layers.activations import GELUTanh
from timm.models import VisionTransformer
from torch import nn
from torch.nn import functional as F

from cdtrans.model.branches import CDTrans
from cdtrans.model.gelu import GELU, FusedGELU, normal
from cdtrans.model.head import Head
from support import devices

HALF_STEP = 2.0**-8  # of a bfloat16, relative


def every_bfloat16(device: str) -> torch.Tensor:
    """All finite ones whose square is finite too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[x.isfinite() & (x.abs() < 1e18)].to(device)


@pytest.mark.parametrize("device", devices())
def test_integral_and_density(device: str) -> None:
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    integral, density = (y.cpu().double() for y in normal(x.float().to(device)))
    torch.testing.assert_close(integral, torch.special.ndtr(x), rtol=0, atol=4e-7)
    torch.testing.assert_close(density, (-0.5 * x * x).exp() / math.sqrt(2 * math.pi), rtol=0, atol=4e-7)
    assert ((integral >= 0) & (integral <= 1)).all()


@pytest.mark.parametrize("device", devices())
def test_forward_is_exact_to_the_rounding_of_bfloat16(device: str) -> None:
    x = every_bfloat16(device)
    exact = F.gelu(x.double())
    out = FusedGELU.apply(x).double()
    assert ((out - exact).abs() <= 1.01 * HALF_STEP * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("device", devices())
def test_backward_is_exact_to_the_rounding_of_bfloat16(device: str) -> None:
    x = every_bfloat16(device).requires_grad_()
    incoming = torch.randn(len(x), generator=torch.Generator().manual_seed(0)).to(x)
    FusedGELU.apply(x).backward(incoming)
    precise = x.detach().double().requires_grad_()
    F.gelu(precise).backward(incoming.double())
    assert x.grad is not None
    assert precise.grad is not None
    error = (x.grad.double() - precise.grad).abs()
    assert (error <= 1.01 * HALF_STEP * precise.grad.abs() + 2e-6 * (1 + incoming.double().abs())).all()


def test_without_a_compiler_it_is_torchs_own() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(GELU()(x), F.gelu(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_it_is_used_for_16_bits_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr(FusedGELU, "apply", lambda x: "fused")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out = GELU()(x)
    assert out == "fused" if dtype == torch.bfloat16 else torch.equal(out, F.gelu(x))


def test_only_the_exact_gelu_is_exchanged() -> None:
    def model(act: type[nn.Module]) -> CDTrans:
        vit = VisionTransformer(
            img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0, act_layer=act
        )
        return CDTrans(vit, Head(16, 3, "none"))

    exchanged, kept = model(nn.GELU), model(GELUTanh)
    assert all(type(block.mlp.act) is GELU for block in exchanged.backbone.blocks)
    assert all(type(block.mlp.act) is GELUTanh for block in kept.backbone.blocks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_compiled_on_a_gpu() -> None:
    x = torch.randn(4096, device="cuda").bfloat16().requires_grad_()
    out = torch.compile(GELU())(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    precise = x.detach().double().requires_grad_()
    exact = F.gelu(precise)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), precise)
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * HALF_STEP, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1.01 * HALF_STEP, atol=1e-5)
