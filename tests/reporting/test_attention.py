"""The heat maps against attention written out, for backbones with and without a class token or registers."""

import pytest
import timm
import torch
from torch import nn

from cdtrans.network.blocks import embed
from cdtrans.network.network import Head, Network
from cdtrans.reporting.attention import attention_shares
from slow_attention import slow_projections, slow_rotation

NO_CLASS_TOKEN = {"class_token": False, "global_pool": "avg"}
FAMILIES = {
    "a class token": ("deit_tiny_patch16_224", {"patch_size": 8}, 1),
    "a class token and registers": ("vit_small_patch14_reg4_dinov2", {"patch_size": 8}, 5),
    "no class token": ("vit_base_patch16_siglip_224", {"patch_size": 8}, 0),
    "norms of queries and keys": ("vit_tiny_patch16_224", {"patch_size": 8, "qk_norm": True}, 1),
    "rotary positions, no class token": ("vit_small_patch16_rope_224", {"patch_size": 8, **NO_CLASS_TOKEN}, 0),
    "dinov3": ("vit_small_patch16_dinov3", {"patch_size": 8}, 5),
    "eva02, split queries, keys and values": ("eva02_tiny_patch14_224", {"patch_size": 8}, 1),
    "shared keys": ("vit_base_patch16_sapiens2", {"patch_size": 8, "num_kv_heads": 1}, 9),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> tuple[Network, int]:
    """A small model in float64 whose every weight matters, and how many tokens come before its patches."""
    name, args, prefix = request.param
    torch.manual_seed(0)
    size = {"img_size": (24, 32), "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    vit = timm.create_model(name, pretrained=False, **size, **args).double().eval()
    for p in vit.parameters():
        nn.init.normal_(p, std=0.4)
    return Network(vit, Head(vit.num_features, 5, "batchnorm").double()).eval(), prefix


def images(seed: int) -> torch.Tensor:
    return torch.randn(3, 3, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_map(model: Network, prefix: int, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One pair: timm's own blocks up to the last, then a loop over heads and queries."""
    vit = model.backbone
    (s, ropes), (t, _) = embed(vit, source[None]), embed(vit, target[None])
    rope = ropes[-1]
    for block in list(vit.blocks)[:-1]:
        positions = {} if rope is None else {"rope": rope[:, 0]}
        s, t = block(s, **positions), block(t, **positions)
    block = vit.blocks[-1]
    attn = block.attn
    queries, keys = slow_projections(attn, block.norm1(s)[0])[0], slow_projections(attn, block.norm1(t)[0])[1]
    shares = []
    for head in range(attn.num_heads):
        q, k = attn.q_norm(queries[:, head]), attn.k_norm(keys[:, head * keys.shape[1] // attn.num_heads])
        if rope is not None:
            q, k = slow_rotation(attn, q, rope[:, 0]), slow_rotation(attn, k, rope[:, 0])
        for query in q[:1] if prefix else q:
            shares.append(torch.softmax(torch.stack([query @ key / q.shape[1] ** 0.5 for key in k]), dim=0))
    patches = torch.stack(shares).mean(dim=0)[prefix:]
    return torch.stack([patches[:4], patches[4:8], patches[8:]])  # 3 rows of 4


def test_the_map_is_the_last_block_s_attention_of_source_over_target(family: tuple[Network, int]) -> None:
    model, prefix = family
    source, target = images(0), images(1)
    maps = attention_shares(model, source, target)
    assert maps.shape == (3, 3, 4)
    for n in range(3):
        torch.testing.assert_close(maps[n], slow_map(model, prefix, source[n], target[n]), atol=1e-12, rtol=0)
