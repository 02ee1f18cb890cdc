"""A vision transformer run block by block: timm's VisionTransformer, and its Eva class (EVA-02, DINOv3, Perception
Encoder). Needed for cross-attention, and faster than timm's own forward on a GPU."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import Eva, VisionTransformer
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cdtrans.network.operations import LayerScale, Residual, Stream, add_norm, mlp, project, queries_keys_values


class Tokens(NamedTuple):
    """Images before the first block."""

    x: Tensor  # [B, N, D]: class and register tokens, then patches
    rope: list[Tensor | None]  # rotary position embedding of each block, [patches, heads or 1, sine and cosine]


# The attention half of a block: (block, stream, rope, rows) -> the stream's sum and what attention adds to it.
AttentionStep = Callable[[Any, Stream, Tensor | None, int | None], tuple[Tensor, Residual]]


def why_no_shared_attention(backbone: Any) -> str:
    """Why a backbone's queries cannot be matched with the keys of another image, as the end of a sentence about it;
    empty if they can."""
    if not any("attention" in type(module).__name__.lower() for module in backbone.modules()):
        return "has no self-attention that source and target could share"
    if type(backbone) not in (VisionTransformer, Eva):
        return "computes its self-attention in another way than a ViT, so that source and target cannot share it"
    if not all(is_plain_block(block) for block in backbone.blocks):
        return "has other blocks than a ViT's (attention, then MLP, each after its norm), so they cannot be shared"
    if isinstance(backbone, Eva) and backbone.patch_drop is not None:
        return "drops patches (patch_drop_rate), so that rotary positions of source and target differ"
    return ""


def is_plain_block(block: Any) -> bool:
    known = (Block, Attention), (EvaBlock, EvaAttention), (EvaBlock, AttentionRope)
    return (type(block), type(getattr(block, "attn", None))) in known and block.attn.gate is None


def embed(backbone: Any, images: Tensor) -> Tokens:
    """[B, 3, H, W] -> tokens, as timm's forward_features makes them."""
    patches = embed_patches(backbone.patch_embed, images)
    if not isinstance(backbone, Eva):
        x = backbone.norm_pre(backbone.patch_drop(backbone._pos_embed(patches)))
        return Tokens(x, [None] * len(backbone.blocks))
    x, rope = backbone._pos_embed(patches)  # rope: None, [patches, .], or of each block and head
    if rope is None or not backbone.rope_mixed:
        return Tokens(backbone.norm_pre(x), [None if rope is None else rope[:, None]] * len(backbone.blocks))
    return Tokens(backbone.norm_pre(x), list(rope.transpose(1, 2)))


def embed_patches(patch: Any, images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, N, D]. A convolution whose stride is its kernel is one matrix product of the patches, which a
    GPU computes faster, above all backward."""
    if type(patch) is not PatchEmbed or not patch.flatten:  # a convolutional stem, or images of many sizes
        return patch(images)  # type: ignore[no-any-return]
    height, width = patch.patch_size
    rows, columns = images.shape[2] // height, images.shape[3] // width  # the rest of the image is cut off
    images = images[:, :, : rows * height, : columns * width]
    patches = images.unflatten(3, (columns, width)).unflatten(2, (rows, height))  # [B, 3, rows, height, columns, width]
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, 3 * height * width]
    return patch.norm(F.linear(patches, patch.proj.weight.flatten(1), patch.proj.bias))  # type: ignore[no-any-return]


def run_blocks(
    backbone: Any,
    tokens: Tokens,
    scales: Tensor | None,
    attention: AttentionStep,
    taps: int = 1,
    *,
    recompute: bool = False,
) -> Tensor:
    """Tokens -> features: all blocks, the final norm and the backbone's own pooling, [B, N, D] -> [B, D]. `scales` are
    the stochastic depth, [depth, 2, B]. With several `taps` the pooled tokens of the blocks before the last follow, the
    later ones first: [B, taps * D]. With `recompute` the backward pass computes each block again."""
    run = partial(checkpoint, run_block, use_reentrant=False) if recompute else run_block
    stream, last = Stream(tokens.x), len(backbone.blocks) - 1
    tapped = []
    with torch.cuda.device_of(tokens.x):  # kernels are launched on the current device
        for i, block in enumerate(backbone.blocks):
            rows = rows_read(backbone) if i == last else None
            stream = run(block, stream, None if scales is None else scales[i], tokens.rope[i], rows, attention)
            if last - taps < i < last:
                tapped.append(pooled(backbone, stream))
    feature = backbone.forward_head(backbone.norm(stream.sum()), pre_logits=True)
    return torch.cat([feature, *reversed(tapped)], dim=1) if tapped else feature


def pooled(backbone: Any, stream: Stream) -> Tensor:
    """One vector of a block's output, pooled as the last block's is but without the final norm: [B, D]."""
    rows = rows_read(backbone)
    y = None if stream.y is None else stream.y[:, :rows]
    return backbone.pool(stream._replace(x=stream.x[:, :rows], y=y).sum())  # type: ignore[no-any-return]


def possible_taps(backbone: Any, taps: int) -> int:
    """How many of the last blocks can be tapped, at most `taps`. Only the last has an attention pooling."""
    plain = not why_no_shared_attention(backbone) and backbone.attn_pool is None
    return min(taps, len(backbone.blocks)) if plain and backbone.global_pool in ("token", "avg") else 1


def rows_read(backbone: Any) -> int | None:
    """How many rows of the last block's output the pooling reads: the class token alone, or (None) all. The last block
    does not compute the others, which saves most of its work."""
    token_alone = backbone.global_pool == "token" and backbone.attn_pool is None and backbone.num_prefix_tokens > 0
    return 1 if token_alone else None


def run_block(
    block: Any, stream: Stream, scales: Tensor | None, rope: Tensor | None, rows: int | None, attention: AttentionStep
) -> Stream:
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, N, D] -> [B, rows, D]. `scales` are the block's stochastic
    depth, [2, B]."""
    x, update = attention(block, stream, rope, rows)
    x, normed = add_norm(Stream(x[:, :rows], *update, None if scales is None else scales[0]), block.norm2)
    update = mlp(block.mlp, layer_scale(block, 2), normed)
    return Stream(x, *update, None if scales is None else scales[1])


def self_attention(
    block: Any, stream: Stream, rope: Tensor | None, rows: int | None, factors: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Residual]:
    """Every image with itself (Eq. 1): [B, N, D] -> [B, N, D] and an update of [B, rows, D]. `factors` makes the
    factor of the attention that a token gets from its key: [B, N, heads, d] -> [B, N, heads, 1]."""
    x, normed = add_norm(stream, block.norm1)
    q, k, v = position(block.attn, queries_keys_values(block.attn, normed, rows=rows), rope, rows)
    if factors is not None:
        v = v * factors(k).to(v.dtype)
    return x, project_heads(block, attend(block.attn, q, k, v))


def position(
    attn: Any, parts: tuple[Tensor, ...], rope: Tensor | None, rows: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with their norms and rotary positions, and the values. A single row is the class token's, which
    has no position."""
    q, k, v = attn.q_norm(parts[0]), attn.k_norm(parts[1]), parts[2]
    if rope is None:
        return q, k, v
    return q if rows is not None else rotate(attn, q, rope).type_as(v), rotate(attn, k, rope).type_as(v), v


def rotate(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding of the patches of one or two images, [B, images * N, heads, d]."""
    prefix = attn.num_prefix_tokens
    x = x.unflatten(1, (-1, prefix + len(rope)))  # [B, images, N, heads, d]
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=attn.rotate_half)
    return torch.cat([x[:, :, :prefix], rotated], dim=2).flatten(1, 2)


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, all [B, tokens, heads, d]."""
    if k.shape[2] < q.shape[2]:  # several heads of queries share one of keys and values
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dropout = attn.attn_drop.p if attn.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)


def project_heads(block: Any, x: Tensor) -> Residual:
    """The heads' outputs [B, N, heads, d] -> [B, N, D]."""
    attn = block.attn
    return project(attn.proj, attn.proj_drop, layer_scale(block, 1), attn.norm(x.flatten(2)))


def layer_scale(block: Any, half: int) -> LayerScale | None:
    """The learned factor of a block's attention (1) or MLP (2), if it has one."""
    if isinstance(block, EvaBlock):
        gamma = block.gamma_1 if half == 1 else block.gamma_2
        return None if gamma is None else lambda y: gamma * y
    scale = block.ls1 if half == 1 else block.ls2
    return None if isinstance(scale, nn.Identity) else scale


class Transferability(nn.Module):
    """Factors for the attention of the class token to each patch in the last block (TVT). A critic tells source from
    target by the key of a patch, in each head; the factor is its entropy in bits: 1 where it cannot tell."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        dim, self.prefix = backbone.blocks[-1].attn.head_dim, backbone.num_prefix_tokens
        self.critic = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1), nn.Flatten(-2)
        )
        initialise(self.critic, nn.init.xavier_normal_)

    def forward(self, keys: Tensor) -> Tensor:
        """[B, N, heads, d] -> [B, N, heads, 1]: the factors of all tokens."""
        return self.factors(self.logits(keys))

    def logits(self, keys: Tensor) -> Tensor:
        """[B, N, heads, d] -> [B, patches, heads]: positive for source."""
        logits: Tensor = self.critic(keys[:, self.prefix :])
        return logits.float()

    def factors(self, logits: Tensor) -> Tensor:
        """[B, patches, heads] -> [B, N, heads, 1]. Class and register tokens have 1."""
        return F.pad(bits(logits), (0, 0, self.prefix, 0), value=1.0)[..., None]


def initialise(module: nn.Module, fill: Callable[[Tensor], Tensor], bias: float = 0.0) -> None:
    """Initialise the linear layers of a module."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            fill(layer.weight)
            nn.init.constant_(layer.bias, bias)


def bits(logits: Tensor) -> Tensor:
    """The entropy of a decision between two, by its logit."""
    return (F.softplus(logits) - logits * logits.sigmoid()) / math.log(2)
