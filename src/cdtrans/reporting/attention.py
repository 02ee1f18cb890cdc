"""Heat maps: the attention of the source image over the target image, as in the paper's Fig. 2a."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdtrans.errors import CdtransError
from cdtrans.inputs.batches import Images
from cdtrans.network.blocks import embed, position, run_block, self_attention, why_no_shared_attention
from cdtrans.network.network import Network
from cdtrans.network.operations import Stream, queries_keys_values
from cdtrans.network.weights import load_model
from cdtrans.record.model import Card
from cdtrans.record.record import RunRecord
from cdtrans.reporting.images import heated, in_parallel, jpeg
from cdtrans.runtime.device import pick_device
from cdtrans.runtime.screen import TrackedTask

PAIRS_AT_ONCE = 16  # pairs in a pass of the model


@torch.inference_mode()
def attention_shares(model: Network, source: Tensor, target: Tensor) -> Tensor:
    """[B, 3, H, W] twice -> [B, rows, columns]: the share of its attention that the source's class token gives to each
    patch of the target in the last block, mean over the heads; without a class token, the mean of all its queries.
    Only for backbones without a reason in `why_no_shared_attention`.

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


def heat_maps(
    record: RunRecord, name: str, pairs: list[tuple[np.ndarray | None, ...]], task: TrackedTask
) -> tuple[list[str | None], str]:
    """A heat map by a model of the run for every pair whose files exist, or why there are none."""
    maps: list[str | None] = [None] * len(pairs)
    try:
        model, card = load_model(record.model_folder(name))
    except CdtransError as error:
        return maps, f"There are no heat maps: {error}"
    if why := why_no_shared_attention(model.backbone):
        return maps, f"There are no heat maps, because the backbone {why}."
    device = device_for(record)
    model.to(device)
    whole = [(n, *pair) for n, pair in enumerate(pairs) if not any(pixels is None for pixels in pair)]
    for start in range(0, len(whole), PAIRS_AT_ONCE):
        places, sources, targets = zip(*whole[start : start + PAIRS_AT_ONCE], strict=True)
        weights = look(model, card, np.stack(sources), np.stack(targets), device)
        for n, heat_map in zip(places, in_parallel(lambda *pair: jpeg(heated(*pair)), targets, weights), strict=True):
            maps[n] = heat_map
        task.advance(len(places))
    return maps, ""


def look(model: Network, card: Card, source: np.ndarray, target: np.ndarray, device: torch.device) -> np.ndarray:
    """uint8 [B, crop, crop, 3] twice -> the attention over the target's patches, [B, rows, columns]."""
    inputs = []
    for pixels in (source, target):
        rows = np.arange(len(pixels))
        images = Images(pixels, rows, crop=card.crop, mean=card.mean, std=card.std, device=device)
        inputs.append(images.centred(torch.from_numpy(rows).to(images.home)))
    weights: np.ndarray = attention_shares(model, *inputs).float().cpu().numpy()
    return weights


def device_for(record: RunRecord) -> torch.device:
    """The run's device, or the CPU if this machine does not have it."""
    try:
        return pick_device(record.config.device)
    except CdtransError:
        return torch.device("cpu")
