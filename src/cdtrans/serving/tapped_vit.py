"""A ViT of timm whose classifier reads its last blocks (`--taps`) instead of the last one alone. Part of cdtrans
(Apache-2.0), which copies this file into hub folders: it imports nothing of cdtrans."""

from typing import Any

import torch
from torch import Tensor, nn


def widen_head(vit: Any, taps: int) -> None:
    """Give timm's model a head for the features of so many blocks."""
    vit.head = nn.Linear(vit.head.in_features + (taps - 1) * vit.embed_dim, vit.head.out_features)


def tapped_logits(vit: Any, images: Tensor, taps: int) -> Tensor:
    """[B, 3, H, W] -> [B, K]. The head gets timm's feature, then the pooled tokens of the blocks before the last,
    without the final norm, the later ones first."""
    prefix = vit.num_prefix_tokens > 0  # class and register tokens, which timm gives apart from the patches
    x, blocks = vit.forward_intermediates(images, indices=taps, return_prefix_tokens=prefix, output_fmt="NLC")
    tokens = [torch.cat(block[::-1], dim=1) if prefix else block for block in blocks[:-1]]  # [B, N, D] each
    tapped = [vit.pool(block) for block in reversed(tokens)]
    return vit.head(torch.cat([vit.forward_head(x, pre_logits=True), *tapped], dim=1))  # type: ignore[no-any-return]
