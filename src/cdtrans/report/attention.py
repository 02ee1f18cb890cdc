"""Where the source image looks in the target image: the heat maps of the paper's Fig. 2a."""

from typing import Any

import torch
from torch import Tensor

from cdtrans.model.cross_attention import Stream, embed, run_block
from cdtrans.model.network import Network


@torch.inference_mode()
def cross_attention(model: Network, source: Tensor, target: Tensor) -> Tensor:
    """[B, 3, H, W] twice -> [B, rows, columns]: the share of its attention that the source's class token gives to each
    patch of the target in the last block, mean over the heads; without a class token, the mean of all its queries.

    The source-target branch has no queries or keys of its own, so the two plain branches are all that must be run."""
    vit: Any = model.backbone  # timm types its blocks as plain modules
    stream = Stream(embed(vit, torch.cat([source, target])))  # [2B, N, D]
    with torch.cuda.device_of(stream.x):
        for block in vit.blocks[:-1]:
            stream = run_block(block, stream, None, rows=None, cross=False)
    last = vit.blocks[-1]
    attn = last.attn
    q, k, _ = attn.qkv(last.norm1(stream.sum())).unflatten(2, (3, attn.num_heads, -1)).unbind(2)  # [2B, N, heads, d]
    looking = slice(0, 1) if vit.has_class_token else slice(None)
    q = attn.q_norm(q).chunk(2)[0][:, looking].transpose(1, 2)  # [B, heads, rows, d], the source's
    k = attn.k_norm(k).chunk(2)[1].transpose(1, 2)  # [B, heads, N, d], the target's
    weights: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1).mean(dim=(1, 2))  # [B, N]
    patches: Tensor = weights[:, vit.num_prefix_tokens :].unflatten(1, tuple(vit.patch_embed.grid_size))
    return patches
