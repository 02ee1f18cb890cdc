"""The steps of a transformer block: Triton kernels on a GPU under 16-bit autocast, PyTorch's own operations elsewhere.

A training step spent half of its time between the matrix products, and that half only moved numbers through memory. So
each kernel moves them once: forward it does all that is to be done to a row (the sum with the residual stream and the
norm that follows, GELU with its bias), and backward it also sums what the rows give to biases and norms.

This is the only module that decides between the two forms of a step (`usable`), and the tests compare them."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

LayerScale = Callable[[Tensor], Tensor]


class Residual(NamedTuple):
    """The output of attention or the MLP, which the residual stream adds: y + bias. The bias is kept apart where the
    kernel of the next norm adds it."""

    y: Tensor  # [B, N, D]
    bias: Tensor | None = None  # [D]


class Stream(NamedTuple):
    """The residual stream with an update that is not added yet: x + scale (y + bias). The sum is done together with the
    norm that follows it, which a GPU does in one pass through memory."""

    x: Tensor  # [B, N, D]
    y: Tensor | None = None  # [B, N, D]
    bias: Tensor | None = None  # [D]
    scale: Tensor | None = None  # [B] stochastic depth

    def sum(self) -> Tensor:
        if self.y is None:
            return self.x
        y = self.y if self.bias is None else self.y + self.bias
        return self.x + (y if self.scale is None else self.scale[:, None, None] * y)


def add_norm(stream: Stream, norm: Any, *, cross: bool = False) -> tuple[Tensor, Tensor]:
    """The stream's sum, and the norm of it. With `cross` the images are three branches of each pair, and the second,
    source-target, is not normalised, because it has no queries, keys or values: [3P, N, D] and [2P, N, D]."""
    has_kernel = isinstance(norm, nn.LayerNorm) and norm.bias is not None and stream.x.dtype == torch.float32
    if has_kernel and usable(stream.x):
        dtype = torch.get_autocast_dtype(stream.x.device.type)
        return AddNorm.apply(*stream, norm.weight, norm.bias, norm.eps, dtype, cross)  # type: ignore[no-any-return]
    x = stream.sum()
    return x, norm(x.unflatten(0, (-1, 3))[:, ::2].flatten(0, 1) if cross else x)


def queries_keys_values(attn: Any, x: Tensor, *, rows: int | None = None, cross: bool = False) -> tuple[Tensor, ...]:
    """[B, N, D] -> queries of the first `rows` tokens, keys, values; [B, tokens, heads, d] each. With `cross` the
    images are source and target in turn, and there are six parts: queries, keys and values of the source, then the
    queries of both in a row and the keys and values of the target."""
    rows = x.shape[1] if rows is None else rows
    if attn.qkv is None:  # three layers, as in DINOv3; with fewer heads of keys and values, as in Sapiens
        q = attn.q_proj(x).unflatten(2, (attn.num_heads, -1))
        heads = getattr(attn, "num_kv_heads", attn.num_heads)
        k, v = (layer(x).unflatten(2, (heads, -1)) for layer in (attn.k_proj, attn.v_proj))
        return attention_inputs(q, k, v, rows, cross)
    bias = attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:  # as in EVA-02
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    if usable(x):
        return QueriesKeysValues.apply(rounded(x), attn.qkv.weight, bias, attn.num_heads, rows, cross)  # type: ignore[no-any-return]
    qkv = attn.qkv(x) if bias is attn.qkv.bias else F.linear(x, attn.qkv.weight, bias)  # [B, N, 3 * heads * d]
    q, k, v = qkv.unflatten(2, (3, attn.num_heads, -1)).unbind(2)  # [B, N, heads, d]
    return attention_inputs(q, k, v, rows, cross)


def mlp(layers: Any, layer_scale: LayerScale | None, x: Tensor) -> Residual:
    """[B, N, D] -> [B, N, D]"""
    gelu = type(layers) is Mlp and isinstance(layers.act, nn.GELU) and layers.act.approximate == "none"
    if not (usable(x) and gelu and layers.fc1.bias is not None):
        return Residual(layers(x) if layer_scale is None else layer_scale(layers(x)))
    hidden = BiasGELU.apply(Linear.apply(rounded(x), layers.fc1.weight), layers.fc1.bias)
    return project(layers.fc2, layers.drop2, layer_scale, layers.norm(layers.drop1(hidden)))


def project(linear: Any, drop: Any, layer_scale: LayerScale | None, x: Tensor) -> Residual:
    """The last layer of attention and of the MLP."""
    if usable(x) and drop.p == 0 and layer_scale is None:
        return Residual(Linear.apply(rounded(x), linear.weight), linear.bias)
    y = drop(linear(x))
    return Residual(y if layer_scale is None else layer_scale(y))


def rounded(x: Tensor) -> Tensor:
    """To the precision of matrix products, as autocast does it."""
    return x.to(torch.get_autocast_dtype(x.device.type))


class Tiles(NamedTuple):
    """How a kernel's programs share the rows: tuned on an H200 for rows of 384 and 768 (docs/results/speed.md)."""

    warps: int
    each: int  # numbers per thread and pass
    programs: int = 0  # for each multiprocessor, where they sum over the rows they pass
    stages: int = 1  # passes whose numbers are being loaded at the same time

    def rows(self, block: int) -> int:
        """So many rows of a block's width are one pass."""
        return max(1, self.each * 32 * self.warps // block)


NORM_FORWARD, NORM_BACKWARD = Tiles(4, 16), Tiles(8, 4, 4, 3)
QKV_BACKWARD = Tiles(4, 4, 8, 2)
GELU_FORWARD, GELU_BACKWARD = Tiles(4, 32), Tiles(4, 16, 16, 2)
GELU_FORWARD_BLOCK, GELU_BACKWARD_BLOCK = 256, 512  # columns
SUM_ROWS, SUM_BLOCK = 128, 16


def kernels(device: torch.device) -> Any:
    """The kernels, or None where they cannot be built."""
    return build_kernels(device)[0]


@cache
def build_kernels(device: torch.device) -> tuple[Any, str]:
    """The kernels, or None and why: Triton comes with torch on Linux alone, and needs a C compiler, a GPU of compute
    capability 7 or more, and a folder to keep what it builds."""
    try:
        from cdtrans.network import kernels

        with torch.cuda.device(device):  # Triton launches on the current one
            ones, out = torch.ones(2, 8, device=device), torch.empty(8, device=device)
            kernels.sum_rows[(1,)](ones, out, 2, COLUMNS=8, ROWS=2, BLOCK=8)
            weight_gradient(*torch.ones(2, 16, 16, device=device).half())
        return (kernels, "") if bool((out == 2).all()) else (None, "they compute wrong sums")
    except Exception as error:  # whatever it is, the run continues without them, and says so
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def usable(x: Tensor) -> bool:
    """Whether the kernels can take the place of operations on x."""
    return x.is_cuda and torch.is_autocast_enabled("cuda") and kernels(x.device) is not None


class AddNorm(Function):
    """x + scale (y + bias), and the layer norm of that: [B, N, D] twice. With `cross` the images are three streams of
    each pair, source, source-target, target, and the second is not normalised: [3P, N, D] and [2P, N, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        dtype: torch.dtype,
        cross: bool,
    ) -> tuple[Tensor, Tensor]:
        images, tokens, d = x.shape
        x, rows, block = x.contiguous(), images * tokens, power_of_2(d)
        y = None if y is None else y.contiguous()
        total = torch.empty_like(x) if y is not None else x
        normed = x.new_empty(images // 3 * 2 if cross else images, tokens, d, dtype=dtype)
        stats = x.new_empty(2, rows)  # means and inverse standard deviations
        at_once = NORM_FORWARD.rows(block)
        kernels(x.device).add_norm_forward[(cdiv(rows, at_once),)](
            x, y, bias, scale, gamma, beta, total, normed, stats, rows, eps,
            TOKENS=tokens, D=d, BLOCK=block, ROWS=at_once, CROSS=cross,
            ADDS=y is not None, SHIFTS=bias is not None, SCALES=scale is not None, num_warps=NORM_FORWARD.warps,
        )  # fmt: skip
        ctx.save_for_backward(total, stats, scale, gamma)
        ctx.cross, ctx.adds, ctx.shifts = cross, y is not None, bias is not None
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_total, d_normed = (g.contiguous() for g in gradients)
        total, stats, scale, gamma = ctx.saved_tensors
        images, tokens, d = total.shape
        rows, block = images * tokens, power_of_2(d)
        d_x = torch.empty_like(total)
        d_y = torch.empty_like(total, dtype=d_normed.dtype) if ctx.adds else None
        sums = total.new_empty(programs(NORM_BACKWARD, total), 3, d)
        kernels(total.device).add_norm_backward[(len(sums),)](
            d_total, d_normed, total, stats, scale, gamma, d_x, d_y, sums, rows,
            TOKENS=tokens, D=d, BLOCK=block, ROWS=NORM_BACKWARD.rows(block), CROSS=ctx.cross, ADDS=ctx.adds,
            SCALES=scale is not None, STAGES=NORM_BACKWARD.stages, num_warps=NORM_BACKWARD.warps,
        )  # fmt: skip
        d_gamma, d_beta, d_bias = sum_over_programs(sums)
        return d_x, d_y, d_bias if ctx.shifts else None, None, d_gamma, d_beta, None, None, None


class BiasGELU(Function):
    """x Phi(x) for x = h + bias, with Phi the integral of the standard normal density phi. The derivative is
    Phi(x) + x phi(x)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor) -> Tensor:
        h = h.contiguous()
        ctx.save_for_backward(h, bias)
        out, columns = torch.empty_like(h), h.shape[-1]
        rows, at_once = h.numel() // columns, GELU_FORWARD.rows(GELU_FORWARD_BLOCK)
        kernels(h.device).gelu_forward[(cdiv(columns, GELU_FORWARD_BLOCK) * cdiv(rows, at_once),)](
            h, bias, out, rows, COLUMNS=columns, ROWS=at_once, BLOCK=GELU_FORWARD_BLOCK, num_warps=GELU_FORWARD.warps
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        h, bias = ctx.saved_tensors
        d_h, columns = torch.empty_like(h), h.shape[-1]
        blocks = cdiv(columns, GELU_BACKWARD_BLOCK)
        sums = bias.new_empty(cdiv(programs(GELU_BACKWARD, h), blocks), columns)
        kernels(h.device).gelu_backward[(blocks, len(sums))](
            gradients[0].contiguous(), h, bias, d_h, sums, h.numel() // columns, COLUMNS=columns,
            ROWS=GELU_BACKWARD.rows(GELU_BACKWARD_BLOCK), BLOCK=GELU_BACKWARD_BLOCK, STAGES=GELU_BACKWARD.stages,
            num_warps=GELU_BACKWARD.warps,
        )  # fmt: skip
        return d_h, sum_over_programs(sums)


class Linear(Function):
    """x W^T in 16 bits; the weight's gradient is summed and left in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (d_y,) = gradients
        return d_y @ weight, weight_gradient(d_y.flatten(0, -2), x.flatten(0, -2))


class QueriesKeysValues(Function):
    """The projection of [B, N, D] to queries, keys and values, [B, N, heads, d] each: views of one product. With
    `cross`, images are source and target in turn, and what comes out is what the two calls of attention read: the
    source's queries, keys and values, then the queries of both and the target's keys and values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, queries: int, cross: bool
    ) -> tuple[Tensor, ...]:
        weight = weight.to(x.dtype)
        qkv = F.linear(x, weight, None if bias is None else bias.to(x.dtype)).unflatten(2, (3, heads, -1))
        ctx.save_for_backward(x, weight)
        ctx.queries, ctx.cross, ctx.shifts = queries, cross, bias is not None
        q, k, v = qkv.unbind(2)
        return attention_inputs(q, k, v, queries, cross)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (images, tokens, _), d = x.shape, len(weight) // 3
        rows, block = images * tokens, power_of_2(d)
        parts = [g.contiguous() for g in gradients]
        d_qkv, sums = x.new_empty(rows, 3 * d), weight.new_empty(programs(QKV_BACKWARD, x), 3 * d, dtype=torch.float32)
        kernels(x.device).qkv_backward[(len(sums),)](
            *parts, *[None] * (6 - len(parts)), d_qkv, sums, rows,
            TOKENS=tokens, QUERIES=ctx.queries, D=d, BLOCK=block, ROWS=QKV_BACKWARD.rows(block), CROSS=ctx.cross,
            STAGES=QKV_BACKWARD.stages, num_warps=QKV_BACKWARD.warps,
        )  # fmt: skip
        d_bias = sum_over_programs(sums) if ctx.shifts else None
        return (d_qkv @ weight).view_as(x), weight_gradient(d_qkv, x.flatten(0, 1)), d_bias, None, None, None


def attention_inputs(q: Tensor, k: Tensor, v: Tensor, queries: int, cross: bool) -> tuple[Tensor, ...]:
    """[B, N, heads, d] each -> as QueriesKeysValues gives them, with the first `queries` tokens' queries."""
    q = q[:, :queries]
    if not cross:
        return q, k, v
    q, k, v = (part.unflatten(0, (-1, 2)) for part in (q, k, v))  # [P, 2, N, heads, d]
    return q[:, 0], k[:, 0], v[:, 0], q.flatten(1, 2), k[:, 1], v[:, 1]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is not less than n."""
    return 1 << (n - 1).bit_length()


def weight_gradient(d_y: Tensor, x: Tensor) -> Tensor:
    """[M, O], [M, I] -> [O, I] in float32."""
    return torch.mm(d_y.t(), x, out_dtype=torch.float32)


def programs(tiles: Tiles, x: Tensor) -> int:
    return tiles.programs * torch.cuda.get_device_properties(x.device).multi_processor_count


def sum_over_programs(sums: Tensor) -> Tensor:
    """[programs, ...] -> [...]"""
    out = torch.empty_like(sums[0])
    kernels(sums.device).sum_rows[(cdiv(out.numel(), SUM_BLOCK),)](
        sums, out, len(sums), COLUMNS=out.numel(), ROWS=SUM_ROWS, BLOCK=SUM_BLOCK, num_warps=8
    )
    return out
