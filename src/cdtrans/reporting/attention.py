"""The attention of the source image over the target image: the heat maps of the paper's Fig. 2a."""

from typing import Any

import torch
from torch import Tensor

from cdtrans.network.blocks import embed, position, run_block, self_attention, why_no_shared_attention
from cdtrans.network.network import Network
from cdtrans.network.operations import Stream, queries_keys_values


def why_no_heat_maps(model: Network) -> str:
    """Why a model has no heat maps, as a sentence; empty if it has."""
    why = why_no_shared_attention(model.backbone)
    return f"There are no heat maps, because the backbone {why}." if why else ""


@torch.inference_mode()
def cross_attention(model: Network, source: Tensor, target: Tensor) -> Tensor:
    """[B, 3, H, W] twice -> [B, rows, columns]: the share of its attention that the source's class token gives to each
    patch of the target in the last block, mean over the heads; without a class token, the mean of all its queries.
    Not for models with a reason in `why_no_heat_maps`.

    The source-target branch has no queries or keys of its own, so only the two plain branches are run."""
    vit: Any = model.backbone  # timm types its blocks as plain modules
    tokens = embed(vit, torch.cat([source, target]))  # [2B, N, D]
    stream = Stream(tokens.x)
    with torch.cuda.device_of(stream.x):
        for block, rope in zip(vit.blocks[:-1], tokens.rope[:-1], strict=True):
            stream = run_block(block, stream, None, rope, None, self_attention)
    last = vit.blocks[-1]
    attn = last.attn
    parts = queries_keys_values(attn, last.norm1(stream.sum()))
    q, k, _ = position(attn, (*parts,), tokens.rope[-1], None)  # [2B, N, heads, d]
    looking = slice(0, 1) if vit.cls_token is not None else slice(None)
    q = q.chunk(2)[0][:, looking].transpose(1, 2)  # [B, heads, rows, d], the source's
    k = k.chunk(2)[1].transpose(1, 2)  # [B, heads, N, d], the target's
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # keys that several heads of queries share
    weights: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1).mean(dim=(1, 2))  # [B, N]
    patches: Tensor = weights[:, vit.num_prefix_tokens :].unflatten(1, tuple(vit.patch_embed.grid_size))
    return patches
