"""Small members of every family of timm models: name, arguments that shrink it, image size."""

from typing import NamedTuple

import timm
import torch
from torch import nn

from cdtrans.network.network import Head, Network, feature_dim


class Small(NamedTuple):
    name: str
    args: dict
    size: int = 32


VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
WIDE = {**VIT, "img_size": 48}  # nine patches: rotary positions differ along both axes
UNPATCHED = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}

VISION_TRANSFORMERS = {
    "deit": Small("deit_tiny_patch16_224", VIT),
    "deit3, layer scale": Small("deit3_small_patch16_224", VIT),
    "dinov2, registers": Small("vit_small_patch14_reg4_dinov2", VIT),
    "dinov2 giant, SwiGLU": Small("vit_giant_patch14_reg4_dinov2", VIT),
    "clip, norm before the blocks": Small("vit_xsmall_patch16_clip_224", VIT),
    "clip, quick GELU": Small("vit_base_patch16_clip_quickgelu_224.openai", VIT),
    "siglip, attention pooling": Small("vit_base_patch16_siglip_224", VIT),
    "siglip, average pooling": Small("vit_base_patch16_siglip_gap_224", VIT),
    "registers, average pooling": Small("vit_little_patch16_reg4_gap_256", VIT),
    "convolutional stem": Small("vit_tiny_r_s16_p8_224", {**UNPATCHED, "img_size": 64}, 64),
    "norm of attention and mlp": Small(
        "vit_tiny_patch16_224", {**VIT, "scale_attn_norm": True, "scale_mlp_norm": True}
    ),
    "norm of queries and keys": Small("vit_tiny_patch16_224", {**VIT, "qk_norm": True}),
    "no biases": Small("vit_tiny_patch16_224", {**VIT, "qkv_bias": False, "proj_bias": False}),
}
EVAS = {
    "eva, clip": Small("eva_giant_patch14_clip_224", VIT),
    "eva02, split qkv, SwiGLU": Small("eva02_tiny_patch14_224", WIDE, 48),
    "eva02, norm in attention": Small("eva02_base_patch16_clip_224", WIDE, 48),
    "dinov3": Small("vit_small_patch16_dinov3", WIDE, 48),
    "dinov3, biases": Small("vit_small_patch16_dinov3_qkvb", WIDE, 48),
    "dinov3, SwiGLU": Small("vit_small_plus_patch16_dinov3", WIDE, 48),
    "rotary positions": Small("vit_small_patch16_rope_224", WIDE, 48),
    "rotary positions of each block": Small("vit_small_patch16_rope_mixed_224", WIDE, 48),
    "registers, average pooling": Small("vit_medium_patch16_rope_reg1_gap_256", WIDE, 48),
    "perception encoder, attention pooling": Small("vit_pe_core_tiny_patch16_384", WIDE, 48),
    "sapiens2, shared keys and values": Small("vit_base_patch16_sapiens2", {**WIDE, "num_kv_heads": 1}, 48),
    "queries and keys normed": Small("vit_small_patch16_dinov3", {**WIDE, "qk_norm": True}, 48),
    "class token alone": Small("eva02_tiny_patch14_224", {**WIDE, "global_pool": "token"}, 48),
    "first patch alone": Small(
        "vit_small_patch16_dinov3", {**WIDE, "class_token": False, "num_reg_tokens": 0, "global_pool": "token"}, 48
    ),
}
CROSS = {**{f"ViT: {k}": v for k, v in VISION_TRANSFORMERS.items()}, **{f"Eva: {k}": v for k, v in EVAS.items()}}
SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}
STAGES = {"depths": (1, 1, 1, 1)}
OTHERS = {
    "resnet": Small("test_resnet", {}),
    "convnext": Small("test_convnext", {}),
    "convnext, mlp head": Small("test_convnext3", {}),
    "convnextv2": Small("convnextv2_atto", {**STAGES, "dims": (8, 16, 24, 32)}),
    "resnetv2": Small("resnetv2_18", {}),
    "regnet": Small("regnetx_002", {}),
    "nfnet": Small("test_nfnet", {}),
    "mambaout": Small("test_mambaout", {}),
    "poolformer": Small("poolformer_s12", {}),
    "pvt": Small("pvt_v2_b0", STAGES),
    "xcit": Small("xcit_nano_12_p16_224", UNPATCHED),
    "swinv2": Small("swinv2_tiny_window8_256", {**SWIN, "img_size": 64}, 64),
    "maxvit": Small(
        "maxvit_rmlp_pico_rw_256", {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1)}, 64
    ),
    "efficientnet": Small("test_efficientnet", {}),
    "efficientnet, group norm": Small("test_efficientnet_gn", {}),
    "mobilenetv3, long feature": Small("mobilenetv3_small_050", {}),
    "ghostnet, long feature": Small("ghostnet_050", {}),
    "densenet, no stochastic depth": Small("densenet121", {"block_config": (1, 1, 1, 1)}),
    "swin": Small("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 64}, 64),
    "mixer": Small("mixer_s32_224", {"img_size": 64}, 64),
    "edgenext": Small("edgenext_xx_small", {}),
    "cait": Small("cait_xxs24_224", UNPATCHED),
    "beit": Small("beit_base_patch16_224", UNPATCHED),
    "ViT, parallel blocks": Small("vit_small_patch16_18x2_224", VIT),
    "ViT, norm after": Small("vit_base_patch16_rpn_224", VIT),
    "Eva, norm after": Small("eva02_enormous_patch14_clip_224", VIT),
    "Eva, patch dropout": Small("vit_small_patch16_dinov3", {**VIT, "patch_drop_rate": 0.5}),
}


def small_network(small: Small, neck: str = "batchnorm") -> Network:
    """In float64 and eval mode, with weights that all matter: layer scale starts near 0 and biases at 0."""
    torch.manual_seed(0)
    backbone = timm.create_model(small.name, pretrained=False, num_classes=0, **small.args)
    for name, p in backbone.named_parameters():
        if p.ndim == 1 or small in CROSS.values():
            nn.init.normal_(p, mean=float("norm" in name and name.endswith("weight")), std=0.3)
    backbone.double()
    set_statistics(backbone, images(small.size, 5, count=8))
    backbone.eval()
    if getattr(backbone, "rope_mixed", False):
        backbone.rope.float()  # timm computes these in float32 and does not take anything else
    return Network(backbone, Head(feature_dim(backbone), 5, neck).double()).eval()


def images(size: int, seed: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def set_statistics(backbone: nn.Module, x: torch.Tensor) -> None:
    """Give BatchNorm layers the statistics of these images, as training would."""
    layers = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    if layers:
        backbone.train()(x)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
