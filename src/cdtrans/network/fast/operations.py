"""The steps of a transformer block: Triton kernels on a GPU under 16-bit autocast, PyTorch's own operations elsewhere.

This is the only module that decides between the two (`fused.usable`). A kernel takes the place of a step where the
step is one that it knows, and the tests compare the two forms of each step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.network.fast import fused

LayerScale = Callable[[Tensor], Tensor]


class Update(NamedTuple):
    """What attention or the MLP adds to the residual stream: y + bias. The bias is kept apart where the kernel of the
    next norm adds it."""

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
    if has_kernel and fused.usable(stream.x):
        dtype = torch.get_autocast_dtype(stream.x.device.type)
        return fused.AddNorm.apply(*stream, norm.weight, norm.bias, norm.eps, dtype, cross)  # type: ignore[no-any-return]
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
        return fused.split(q, k, v, rows, cross)
    bias = attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:  # as in EVA-02
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    if fused.usable(x):
        return fused.QueriesKeysValues.apply(rounded(x), attn.qkv.weight, bias, attn.num_heads, rows, cross)  # type: ignore[no-any-return]
    qkv = attn.qkv(x) if bias is attn.qkv.bias else F.linear(x, attn.qkv.weight, bias)  # [B, N, 3 * heads * d]
    q, k, v = qkv.unflatten(2, (3, attn.num_heads, -1)).unbind(2)  # [B, N, heads, d]
    return fused.split(q, k, v, rows, cross)


def mlp(layers: Any, layer_scale: LayerScale | None, x: Tensor) -> Update:
    """[B, N, D] -> [B, N, D]"""
    has_kernel = type(layers) is Mlp and is_exact_gelu(layers.act) and layers.fc1.bias is not None
    if not (fused.usable(x) and has_kernel):
        return Update(layers(x) if layer_scale is None else layer_scale(layers(x)))
    hidden = fused.BiasGELU.apply(fused.Linear.apply(rounded(x), layers.fc1.weight), layers.fc1.bias)
    return project(layers.fc2, layers.drop2, layer_scale, layers.norm(layers.drop1(hidden)))


def project(linear: Any, drop: Any, layer_scale: LayerScale | None, x: Tensor) -> Update:
    """The last layer of attention and of the MLP."""
    if fused.usable(x) and drop.p == 0 and layer_scale is None:
        return Update(fused.Linear.apply(rounded(x), linear.weight), linear.bias)
    y = drop(linear(x))
    return Update(y if layer_scale is None else layer_scale(y))


def is_exact_gelu(act: nn.Module) -> bool:
    return isinstance(act, nn.GELU) and act.approximate == "none"


def rounded(x: Tensor) -> Tensor:
    """To the precision of matrix products, as autocast does it."""
    return x.to(torch.get_autocast_dtype(x.device.type))
