"""CDTrans: one VisionTransformer run as three branches (section 3.3 of the paper).

The source-target branch has no weights of its own. In every block it takes the source's queries and the target's keys
and values (Eq. 2), and the same projection, norms and MLP. So the three branches are one batch of 3B images whose
attention is one call: queries (s, t, s), keys and values (s, t, t).
"""

from typing import Any, NamedTuple

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.model.head import Head, Output


class Branches(NamedTuple):
    """The head's output for a batch of pairs, one per branch."""

    source: Output
    target: Output
    source_target: Output


class CDTrans(nn.Module):
    """A backbone and a head. `forward` runs a batch of pairs through the three branches, `encode` runs images through
    the target branch alone: that is training on the source, feature extraction and inference."""

    def __init__(self, backbone: VisionTransformer, head: Head, *, first_block_residual: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.first_block_residual = first_block_residual

    def encode(self, images: Tensor) -> Output:
        """[B, 3, H, W] -> features and logits of the target branch: timm's own forward, but for the last block's rows
        that nobody reads."""
        feature = run_blocks(self.backbone, embed(self.backbone, images), cross=False)  # [B, D]
        return self.head(feature)  # type: ignore[no-any-return]

    def forward(self, source: Tensor, target: Tensor) -> Branches:
        """[B, 3, H, W] twice -> three outputs. The bottleneck norm sees the branches one by one in the authors' order:
        source, source-target, target, so that the target's statistics come last in the running ones."""
        feature_s, feature_t, feature_c = self.features(source, target).chunk(3)  # each [B, D]
        out_s = self.head(feature_s)
        out_c = self.head(feature_c)
        out_t = self.head(feature_t)
        return Branches(out_s, out_t, out_c)

    def features(self, source: Tensor, target: Tensor) -> Tensor:
        """The backbone's features of (source, target, source-target), [3B, D]."""
        vit = self.backbone
        tokens = embed(vit, torch.cat([source, target]))  # [2B, N, D]
        target_tokens = tokens[len(source) :]
        # The authors' code starts the source-target stream from the target's tokens; the paper's footnote has no
        # addition in the first block, which is the same as starting from nothing.
        start = target_tokens if self.first_block_residual else torch.zeros_like(target_tokens)
        return run_blocks(vit, torch.cat([tokens, start]), cross=True)


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """Images -> tokens before the first block, as timm's forward_features does it."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))  # type: ignore[no-any-return]


def run_blocks(vit: VisionTransformer, x: Tensor, *, cross: bool) -> Tensor:
    """Tokens -> features: all blocks, the final norm and the backbone's own pooling, [B, N, D] -> [B, D]."""
    for i, block in enumerate(vit.blocks):
        x = run_block(block, x, rows=rows_read(vit) if i + 1 == len(vit.blocks) else None, cross=cross)
    return vit.forward_head(vit.norm(x), pre_logits=True)  # type: ignore[no-any-return]


def rows_read(vit: VisionTransformer) -> int | None:
    """How many rows of the last block's output the pooling reads: the class token alone, or (None) all. The last block
    need not compute the others, which saves most of its work."""
    return 1 if vit.global_pool == "token" and vit.attn_pool is None else None


def run_block(block: Any, x: Tensor, *, rows: int | None, cross: bool) -> Tensor:
    """One transformer block, [B, N, D] -> [B, rows, D]. With `cross`, x is the stack of the streams (source, target,
    source-target) of B / 3 pairs."""
    own = x[: 2 * (len(x) // 3)] if cross else x  # the source-target stream makes no queries, keys or values
    x = x[:, :rows] + block.drop_path1(block.ls1(attention(block.attn, block.norm1(own), rows=rows, cross=cross)))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))  # type: ignore[no-any-return]


def attention(attn: Any, x: Tensor, *, rows: int | None, cross: bool) -> Tensor:
    """Self-attention of [B, N, D] (Eq. 1); with `cross` also the cross-attention between its two halves, source and
    target (Eq. 2), in the same call: [2B, N, D] -> [3B, rows, D]."""
    images, tokens, _ = x.shape
    q, k, v = attn.qkv(x).reshape(images, tokens, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)  # [2B, heads, N, d]
    q, k = attn.q_norm(q[:, :, :rows]), attn.k_norm(k)
    if cross:
        pairs = images // 2
        q = torch.cat([q, q[:pairs]])  # (s, t, s)  [3B, heads, rows, d]
        k = torch.cat([k, k[pairs:]])  # (s, t, t)  [3B, heads, N, d]
        v = torch.cat([v, v[pairs:]])  # (s, t, t)
    dropout = attn.attn_drop.p if attn.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)  # [3B, heads, rows, d]
    out = attn.norm(out.transpose(1, 2).flatten(2))  # [3B, rows, D]
    return attn.proj_drop(attn.proj(out))  # type: ignore[no-any-return]
