"""The three branches with attention written out, for timm's VisionTransformer and Eva."""

import torch
from torch import Tensor, nn

from cdtrans.network.blocks import embed


def slow_features(vit: nn.Module, source: Tensor, target: Tensor, first_block_residual: bool) -> list[Tensor]:
    """One pair, one branch after the other, head by head."""
    tokens, rope = zip(*(embed(vit, x) for x in (source, target)), strict=True)
    s, t = (x[0] for x in tokens)  # [N, D]
    c = t if first_block_residual else torch.zeros_like(t)
    for i, block in enumerate(vit.blocks):
        normed_s, normed_t = block.norm1(s), block.norm1(t)
        updates = [
            slow_attention(block.attn, queries, keys, rope[0][i])
            for queries, keys in ((normed_s, normed_s), (normed_t, normed_t), (normed_s, normed_t))
        ]
        s, t, c = (x + slow_scale(block, 1, y) for x, y in zip((s, t, c), updates, strict=True))
        s, t, c = (x + slow_scale(block, 2, block.mlp(block.norm2(x))) for x in (s, t, c))
    return [vit.forward_head(vit.norm(x[None]), pre_logits=True) for x in (s, t, c)]


def slow_scale(block: nn.Module, half: int, x: Tensor) -> Tensor:
    if hasattr(block, "gamma_1"):
        gamma = getattr(block, f"gamma_{half}")
        return x if gamma is None else x * gamma
    return getattr(block, f"ls{half}")(x)


def slow_attention(attn: nn.Module, x: Tensor, other: Tensor, rope: Tensor | None) -> Tensor:
    """Queries of x [N, D], keys and values of the other image."""
    queries, keys, values = slow_projections(attn, x)[0], *slow_projections(attn, other)[1:]
    heads = []
    for h in range(attn.num_heads):
        shared = h * keys.shape[1] // attn.num_heads
        q, k, v = attn.q_norm(queries[:, h]), attn.k_norm(keys[:, shared]), values[:, shared]
        if rope is not None:
            q, k = (slow_rotation(attn, x, rope[:, h % rope.shape[1]]) for x in (q, k))
        heads.append((q @ k.T / q.shape[1] ** 0.5).softmax(dim=1) @ v)
    return attn.proj(attn.norm(torch.cat(heads, dim=1)))


def slow_projections(attn: nn.Module, x: Tensor) -> list[Tensor]:
    """[N, D] -> three times [N, heads, d]."""
    layers = (attn.q_proj, attn.k_proj, attn.v_proj) if attn.qkv is None else ()
    parts = [layer(x) for layer in layers] or list(attn.qkv(x).chunk(3, dim=1))
    if getattr(attn, "q_bias", None) is not None:
        parts = [parts[0] + attn.q_bias, parts[1], parts[2] + attn.v_bias]
    return [part.unflatten(1, (-1, attn.head_dim)) for part in parts]


def slow_rotation(attn: nn.Module, x: Tensor, rope: Tensor) -> Tensor:
    """Each pair of numbers of a patch turned by its angle; class token and registers stay."""
    prefix, d = attn.num_prefix_tokens, x.shape[1]
    pairs = [(i, i + d // 2) for i in range(d // 2)] if attn.rotate_half else [(i, i + 1) for i in range(0, d, 2)]
    rows = list(x[:prefix])
    for patch, angles in zip(x[prefix:], rope, strict=True):
        sine, cosine = angles[:d], angles[d:]
        turned = list(patch)
        for i, j in pairs:
            turned[i] = patch[i] * cosine[i] - patch[j] * sine[i]
            turned[j] = patch[j] * cosine[j] + patch[i] * sine[j]
        rows.append(torch.stack(turned))
    return torch.stack(rows)
