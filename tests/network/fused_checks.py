"""Checks of the kernels, run by test_fused.py in a process of its own: on a GPU, or in Triton's interpreter."""

import importlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from timm.layers.attention import Attention
from timm.models import Eva, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods.cdtrans import branch_features
from cdtrans.network import operations
from cdtrans.network.network import Head, Network
from cdtrans.network.operations import AddNorm, BiasGELU, Stream, add_norm, attention_inputs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
STEP = 2.0**-7  # relative precision of bfloat16
ROUNDING = 0.5 * STEP if GPU else STEP  # the interpreter cuts off


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the CPU stands in for the GPU, with few programs, so that each passes over several tiles."""
    if not GPU:
        module = importlib.import_module("cdtrans.network.kernels")
        monkeypatch.setattr(operations, "kernels", lambda device: module)
        monkeypatch.setattr(operations, "programs", lambda tiles, x: 2)
        monkeypatch.setattr(operations, "SUM_BLOCK", 64)  # a program costs as much whatever its width
        monkeypatch.setattr(operations, "weight_gradient", lambda d_y, x: d_y.float().t() @ x.float())
        monkeypatch.setattr(operations, "usable", lambda x: torch.is_autocast_enabled("cpu"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(work: Callable[..., tuple[Tensor, ...]], *leaves: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of all leaves for random gradients of the outputs."""
    leaves = tuple(None if x is None else x.detach().clone().requires_grad_() for x in leaves)
    outs = work(*leaves)
    sum((out.float() * random(*out.shape, seed=9 + i)).sum() for i, out in enumerate(outs)).backward()
    return [out.detach().float() for out in outs], [x.grad.float() for x in leaves if x is not None]


def assert_equal(ours: tuple[list[Tensor], ...], theirs: tuple[list[Tensor], ...], tolerance: float) -> None:
    for kind, mine, other in zip(("values", "gradients"), ours, theirs, strict=True):
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            error = float((a - b).norm() / b.norm())
            assert error < tolerance, f"{kind} {i}: {error}"


@pytest.mark.parametrize("d", [24, 100])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("given", ["alone", "found", "found, bias", "found, bias, scale", "found, scale"])
def test_sum_and_norm(d: int, cross: bool, given: str) -> None:
    """In float32, where both are exact. Rows, images and columns that fill no tile."""
    x, y, bias, gamma, beta = random(6, 5, d), random(6, 5, d, seed=1), *random(3, d, seed=2)
    scale = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25, 1.25], device=DEVICE) if "scale" in given else None
    norm = nn.LayerNorm(d, eps=1e-3)

    def fast(x: Tensor, y: Tensor | None, bias: Tensor | None, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return AddNorm.apply(x, y, bias, scale, gamma, beta, norm.eps, torch.float32, cross)

    def slow(x: Tensor, y: Tensor | None, bias: Tensor | None, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        return add_norm(Stream(x, y, bias, scale), lambda x: F.layer_norm(x, (d,), gamma, beta, norm.eps), cross=cross)

    leaves = (x, y if "found" in given else None, bias if "bias" in given else None, gamma, beta)
    ours, theirs = gradients(fast, *leaves), gradients(slow, *leaves)
    assert ours[0][1].shape == ((4 if cross else 6), 5, d)
    assert_equal(ours, theirs, 1e-5)


MANY = [(1100, 1000, 8)] if GPU else []  # more tiles than a grid is high


@pytest.mark.parametrize("shape", [(3, 37, 8), (3, 37, 600), *MANY])
def test_gelu(shape: tuple[int, ...]) -> None:
    h, bias = random(*shape), random(shape[-1], seed=1)
    ours = gradients(lambda h, bias: (BiasGELU.apply(h, bias),), h, bias)
    theirs = gradients(lambda h, bias: (F.gelu(h + bias),), h, bias)
    assert_equal(ours, theirs, 2e-6)


def every_bfloat16() -> Tensor:
    """All finite ones whose square is finite too, as rows of 512, and zeros to fill the last one."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e18)]
    return F.pad(x, (0, -len(x) % 512)).view(-1, 512).to(DEVICE)


def test_gelu_is_exact_to_the_rounding_of_bfloat16() -> None:
    x = every_bfloat16().requires_grad_()
    incoming = random(*x.shape).to(x)
    out = BiasGELU.apply(x, torch.zeros(512, device=DEVICE))
    out.backward(incoming)
    precise = x.detach().double().requires_grad_()
    exact = F.gelu(precise)
    exact.backward(incoming.double())
    assert x.grad is not None
    assert precise.grad is not None
    exact = exact.detach()
    assert ((out.double() - exact).abs() <= 1.01 * ROUNDING * exact.abs() + 1e-6).all()
    error = (x.grad.double() - precise.grad).abs()
    assert (error <= 1.01 * ROUNDING * precise.grad.abs() + 2e-6 * (1 + incoming.double().abs())).all()


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values(cross: bool, queries: int, bias: bool) -> None:
    """In bfloat16, since the product is; the slow way in float32 from the same rounded numbers."""
    heads, d = 3, 24
    x, w, b = random(4, 5, d).bfloat16(), random(3 * d, d, seed=1).bfloat16(), random(3 * d, seed=2).bfloat16()
    leaves = (x.float(), w.float(), b.float() if bias else None)

    def fast(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
        return operations.QueriesKeysValues.apply(x.bfloat16(), w, b, heads, queries, cross)

    def slow(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
        return attention_inputs(*F.linear(x, w, b).unflatten(2, (3, heads, -1)).unbind(2), queries, cross)

    assert_equal(gradients(fast, *leaves), gradients(slow, *leaves), ROUNDING)


def test_a_sum_of_tensors_whose_numbers_lie_in_another_order() -> None:
    x, y, gamma, beta = random(6, 5, 24), random(5, 6, 24, seed=1).transpose(0, 1), *random(2, 24, seed=2)
    total, _ = AddNorm.apply(x.transpose(0, 1), y.transpose(0, 1), None, None, gamma, beta, 1e-6, x.dtype, False)
    assert torch.equal(total, (x + y).transpose(0, 1))


def test_a_stream_of_16_bits_is_left_to_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its means and sums would have 16 bits too."""
    monkeypatch.setattr(operations, "AddNorm", None)
    x, norm = random(2, 5, 24).bfloat16(), nn.LayerNorm(24).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        total, normed = add_norm(Stream(x, x), norm)
    assert torch.equal(total, 2 * x)
    assert normed.shape == x.shape


def test_what_attention_reads() -> None:
    """Source and target in turn: the source's queries, keys and values, the queries of both, the target's."""
    qkv = torch.arange(2 * 2 * 5 * 3).view(4, 5, 3, 1, 1)  # two pairs, five tokens
    streams = attention_inputs(*qkv.unbind(2), 2, cross=True)
    own, k_s, v_s, both, k_t, v_t = (part.flatten(1).tolist() for part in streams)
    assert own == [[0, 3], [30, 33]]
    assert both == [[0, 3, 15, 18], [30, 33, 45, 48]]
    assert k_s[1] == [31, 34, 37, 40, 43]
    assert v_t[0] == [17, 20, 23, 26, 29]
    assert [len(part[0]) for part in (k_s, v_s, k_t, v_t)] == [5] * 4


def test_a_linear_layer() -> None:
    x, w = random(4, 5, 24).bfloat16(), random(16, 24, seed=1)
    ours = gradients(lambda x, w: (operations.Linear.apply(x, w),), x, w)
    theirs = gradients(lambda x, w: (F.linear(x, w.bfloat16().float()),), x.float(), w)
    assert_equal(ours, theirs, ROUNDING)


BACKBONES = {
    "deit": {},
    "layer scale": {"init_values": 0.5},
    "norms of queries and keys": {"qk_norm": True},
    "norms of attention and mlp": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "mean of all tokens": {"global_pool": "avg"},
    "another activation": {"act_layer": nn.SiLU},
    "another GELU": {"act_layer": partial(nn.GELU, approximate="tanh")},
}
EVAS = {
    "rotary positions": {"use_rot_pos_emb": True},
    "split queries, keys and values, SwiGLU": {"use_rot_pos_emb": True, "qkv_fused": False, "swiglu_mlp": True},
    "rotary positions of each block": {"use_rot_pos_emb": True, "rope_type": "mixed", "init_values": 0.5},
}


@pytest.mark.parametrize(("kind", "cross"), [("deit", False), *((kind, True) for kind in {**BACKBONES, **EVAS})])
def test_whole_backbones(kind: str, cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a training pass: as near to float32's as plain operations in bfloat16 come."""
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 0}
    if kind in EVAS:
        vit = Eva(**size, drop_path_rate=0.3, **EVAS[kind])
    else:
        vit = VisionTransformer(**size, drop_path_rate=0.3, attn_layer=Attention, **BACKBONES[kind])
    for p in vit.parameters():
        nn.init.normal_(p, std=0.2)
    model = Network(vit, Head(24, 5, "batchnorm")).to(DEVICE).train()
    source, target = random(2, 3, 3, 16, 16)

    def train(precise: bool, fast: bool) -> list[Tensor]:
        with monkeypatch.context() as m:
            if not fast:
                m.setattr(operations, "usable", lambda x: False)
            torch.manual_seed(1)  # for stochastic depth
            model.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=not precise):
                out = torch.cat(branch_features(model, source, target)) if cross else model.features(source)
            (out.float() * random(*out.shape, seed=3)).sum().backward()
        return [out.detach().float(), *(p.grad.clone() for p in vit.parameters() if p.grad is not None)]

    exact, plain, ours = train(True, False), train(False, False), train(False, True)
    slack = 4e-3 if GPU else 3e-2  # rounding errors add up
    assert len(ours) == len(exact)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert a.dtype == torch.float32
        assert float((a - c).norm()) <= 4 * float((b - c).norm()) + slack * float(c.norm())


@pytest.mark.parametrize("programs", [1, 128, 300])
def test_what_the_programs_summed_is_added_up(programs: int) -> None:
    sums = random(programs, 3, 20)
    torch.testing.assert_close(operations.sum_over_programs(sums), sums.sum(0), rtol=1e-5, atol=1e-4)


def test_they_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model such as those above goes through every one of them."""
    calls = Counter()

    def counted(name: str, apply: Callable, *arguments: object) -> object:
        calls[name] += 1
        return apply(*arguments)

    for name in ("AddNorm", "BiasGELU", "Linear", "QueriesKeysValues"):
        spy = SimpleNamespace(apply=partial(counted, name, getattr(operations, name).apply))
        monkeypatch.setattr(operations, name, spy)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        branch_features(
            Network(vit, Head(24, 5, "batchnorm").to(DEVICE)), random(2, 3, 16, 16), random(2, 3, 16, 16, seed=1)
        )
    # in each of two blocks: two norms, one GELU, four matrix products of which one is of queries, keys and values
    assert calls == {"AddNorm": 4, "BiasGELU": 2, "Linear": 6, "QueriesKeysValues": 2}
