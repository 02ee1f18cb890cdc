"""CDTrans: one VisionTransformer run as three branches (section 3.3 of the paper).

The source-target branch has no weights of its own. In every block it takes the source's queries and the target's keys
and values (Eq. 2), and the same projection, norms and MLP. So the three branches are one batch of 3B images, pair by
pair: source, source-target, target. Lying side by side, the source's and the target's queries are one long query, and
the target's keys and values answer both in one call: that is the source-target branch and the target branch, and no
tensor is copied for it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from timm.layers.mlp import Mlp
from timm.layers.patch_embed import PatchEmbed
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.model.fast import fused
from cdtrans.model.head import Output

if TYPE_CHECKING:
    from cdtrans.model.network import Network


class Branches(NamedTuple):
    """The head's output for a batch of pairs, one per branch."""

    source: Output
    target: Output
    source_target: Output


def three_branches(
    network: "Network", source: Tensor, target: Tensor, *, first_block_residual: bool = True
) -> Branches:
    """[B, 3, H, W] twice -> three outputs. The bottleneck norm sees the branches one by one in the authors' order:
    source, source-target, target, so that the target's statistics come last in the running ones."""
    feature_s, feature_t, feature_c = branch_features(
        network, source, target, first_block_residual=first_block_residual
    )  # each [B, D]
    out_s = network.head(feature_s)
    out_c = network.head(feature_c)
    out_t = network.head(feature_t)
    return Branches(out_s, out_t, out_c)


def branch_features(
    network: "Network", source: Tensor, target: Tensor, *, first_block_residual: bool = True
) -> tuple[Tensor, ...]:
    """The backbone's features of the source, target and source-target branch, [B, D] each.

    The authors' code starts the source-target stream from the target's tokens; the paper's footnote has no addition in
    the first block, which is the same as starting from nothing (`first_block_residual=False`)."""
    tokens = embed(network.backbone, torch.stack([source, target], dim=1).flatten(0, 1))  # [2B, N, D]
    tokens_s, tokens_t = tokens.unflatten(0, (-1, 2)).unbind(1)
    start = tokens_t if first_block_residual else torch.zeros_like(tokens_t)
    x = torch.stack([tokens_s, start, tokens_t], dim=1).flatten(0, 1)  # [3B, N, D]
    feature_s, feature_c, feature_t = network.run_blocks(x, cross=True).unflatten(0, (-1, 3)).unbind(1)
    return feature_s, feature_t, feature_c


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """Images -> tokens before the first block, as timm's forward_features does it."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(embed_patches(vit.patch_embed, images))))  # type: ignore[no-any-return]


def embed_patches(patch: Any, images: Tensor) -> Tensor:
    """[B, 3, H, W] -> [B, N, D]. A convolution whose stride is its kernel is one matrix product of the patches, and
    that is what a GPU does fast, backward above all."""
    if type(patch) is not PatchEmbed or not patch.flatten:  # a convolutional stem, or images of many sizes
        return patch(images)  # type: ignore[no-any-return]
    height, width = patch.patch_size
    rows, columns = images.shape[2] // height, images.shape[3] // width  # what is left over is not seen
    images = images[:, :, : rows * height, : columns * width]
    patches = images.unflatten(3, (columns, width)).unflatten(2, (rows, height))  # [B, 3, rows, height, columns, width]
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, 3 * height * width]
    return patch.norm(F.linear(patches, patch.proj.weight.flatten(1), patch.proj.bias))  # type: ignore[no-any-return]


def rows_read(vit: VisionTransformer) -> int | None:
    """How many rows of the last block's output the pooling reads: the class token alone, or (None) all. The last block
    need not compute the others, which saves most of its work."""
    return 1 if vit.global_pool == "token" and vit.attn_pool is None else None


class Stream(NamedTuple):
    """Tokens and what a block has found for them: x + scale (found + bias). The sum waits for the norm that follows it,
    since a GPU can do both in one pass through memory."""

    x: Tensor  # [B, N, D]
    found: Tensor | None = None  # [B, N, D]
    bias: Tensor | None = None  # [D]
    scale: Tensor | None = None  # [B] stochastic depth

    def sum(self) -> Tensor:
        if self.found is None:
            return self.x
        found = self.found if self.bias is None else self.found + self.bias
        return self.x + (found if self.scale is None else self.scale[:, None, None] * found)


def run_block(block: Any, stream: Stream, scales: Tensor | None, *, rows: int | None, cross: bool) -> Stream:
    """One transformer block, [B, N, D] -> [B, rows, D]. With `cross`, x holds B / 3 pairs, each as its three streams:
    source, source-target, target. `scales` are the block's stochastic depth, [2, B]."""
    x, normed = add_norm(stream, block.norm1, cross=cross)
    found, bias = attention(block.attn, block.ls1, normed, rows=rows, cross=cross)  # [B, rows, D]
    x, normed = add_norm(Stream(x[:, :rows], found, bias, None if scales is None else scales[0]), block.norm2)
    found, bias = mlp(block.mlp, block.ls2, normed)
    return Stream(x, found, bias, None if scales is None else scales[1])


def add_norm(stream: Stream, norm: Any, *, cross: bool = False) -> tuple[Tensor, Tensor]:
    """A stream's sum, and the norm of it. With `cross` the second of three streams, source-target, is left out of the
    norm: it makes no queries, keys or values."""
    known = isinstance(norm, nn.LayerNorm) and norm.bias is not None and stream.x.dtype == torch.float32
    if known and fused.usable(stream.x):
        dtype = torch.get_autocast_dtype(stream.x.device.type)
        return fused.AddNorm.apply(*stream, norm.weight, norm.bias, norm.eps, dtype, cross)  # type: ignore[no-any-return]
    x = stream.sum()
    return x, norm(x.unflatten(0, (-1, 3))[:, ::2].flatten(0, 1) if cross else x)


def attention(
    attn: Any, layer_scale: nn.Module, x: Tensor, *, rows: int | None, cross: bool
) -> tuple[Tensor, Tensor | None]:
    """Self-attention of [B, N, D] (Eq. 1) -> [B, rows, D]. With `cross`, x holds pairs of source and target, and what
    the source's queries find in the target (Eq. 2) comes between: [2P, N, D] -> [3P, rows, D]. The projection's bias
    may be left to add."""
    triples = queries_keys_values(attn, x, queries=x.shape[1] if rows is None else rows, cross=cross)
    dropout = attn.attn_drop.p if attn.training else 0.0
    found = [attend(*triple, dropout) for triple in triples]  # [B, rows, heads, d], or [P, rows] and [P, 2 rows]
    out = torch.cat(found, dim=1).unflatten(1, (3, -1)).flatten(0, 1) if cross else found[0]
    return project(attn.proj, attn.proj_drop, layer_scale, attn.norm(out.flatten(2)))


def queries_keys_values(attn: Any, x: Tensor, *, queries: int, cross: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """[B, N, D] -> queries, keys and values of all images; with `cross` those of the source, and then the queries of
    both with the target's keys and values. All [., tokens, heads, d]."""
    if fused.usable(x):
        qkv = attn.qkv
        parts = fused.QueriesKeysValues.apply(rounded(x), qkv.weight, qkv.bias, attn.num_heads, queries, cross)
    else:
        parts = fused.split(attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)), queries, cross)
    triples = [parts[:3], parts[3:]] if cross else [parts]
    return [(attn.q_norm(q), attn.k_norm(k), v) for q, k, v in triples]


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, all [B, tokens, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)


def mlp(mlp: Any, layer_scale: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """[B, N, D] -> [B, N, D]; the second bias may be left to add."""
    if not (fused.usable(x) and type(mlp) is Mlp and is_exact_gelu(mlp.act) and mlp.fc1.bias is not None):
        return layer_scale(mlp(x)), None
    hidden = fused.BiasGELU.apply(fused.Linear.apply(rounded(x), mlp.fc1.weight), mlp.fc1.bias)
    return project(mlp.fc2, mlp.drop2, layer_scale, mlp.norm(mlp.drop1(hidden)))


def is_exact_gelu(act: nn.Module) -> bool:
    return isinstance(act, nn.GELU) and act.approximate == "none"


def project(linear: Any, drop: Any, layer_scale: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The last step of attention and of the MLP. The bias is left to add where nothing comes between and a kernel will
    add it."""
    if fused.usable(x) and drop.p == 0 and isinstance(layer_scale, nn.Identity):
        return fused.Linear.apply(rounded(x), linear.weight), linear.bias
    return layer_scale(drop(linear(x))), None


def rounded(x: Tensor) -> Tensor:
    """To the precision of matrix products, as autocast does it."""
    return x.to(torch.get_autocast_dtype(x.device.type))
