"""Short names of backbones. Needs neither torch nor timm."""

# Only names that timm itself does not have: `resnet50` or `convnext_tiny` mean what timm means by them. The DeiTs are
# those of the paper, which start from the distilled weights.
SHORT_NAMES = {
    "deit_tiny": "deit_tiny_distilled_patch16_224.fb_in1k",
    "deit_small": "deit_small_distilled_patch16_224.fb_in1k",
    "deit_base": "deit_base_distilled_patch16_224.fb_in1k",
    "deit3_small": "deit3_small_patch16_224.fb_in22k_ft_in1k",
    "deit3_base": "deit3_base_patch16_224.fb_in22k_ft_in1k",
    "deit3_large": "deit3_large_patch16_224.fb_in22k_ft_in1k",
    "vit_tiny": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small": "vit_small_patch16_224.augreg_in21k_ft_in1k",
    "vit_base": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit_large": "vit_large_patch16_224.augreg_in21k_ft_in1k",
    "vit_ti_16": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_s_16": "vit_small_patch16_224.augreg_in21k_ft_in1k",
    "vit_s_32": "vit_small_patch32_224.augreg_in21k_ft_in1k",
    "vit_b_16": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit_b_32": "vit_base_patch32_224.augreg_in21k_ft_in1k",
    "vit_l_16": "vit_large_patch16_224.augreg_in21k_ft_in1k",
    "vit_h_14": "vit_huge_patch14_224.orig_in21k",
    "dino_small": "vit_small_patch16_224.dino",
    "dino_base": "vit_base_patch16_224.dino",
    "dinov2_small": "vit_small_patch14_reg4_dinov2.lvd142m",
    "dinov2_base": "vit_base_patch14_reg4_dinov2.lvd142m",
    "dinov2_large": "vit_large_patch14_reg4_dinov2.lvd142m",
    "dinov3_small": "vit_small_patch16_dinov3.lvd1689m",
    "dinov3_base": "vit_base_patch16_dinov3.lvd1689m",
    "dinov3_large": "vit_large_patch16_dinov3.lvd1689m",
    "mae_base": "vit_base_patch16_224.mae",
    "mae_large": "vit_large_patch16_224.mae",
    "clip_base": "vit_base_patch16_clip_224.openai",
    "clip_large": "vit_large_patch14_clip_224.openai",
    "siglip_base": "vit_base_patch16_siglip_224.v2_webli",
    "siglip2_base": "vit_base_patch16_siglip_224.v2_webli",
    "eva02_tiny": "eva02_tiny_patch14_224.mim_in22k",
    "eva02_small": "eva02_small_patch14_224.mim_in22k",
    "eva02_base": "eva02_base_patch14_224.mim_in22k",
    "eva02_large": "eva02_large_patch14_224.mim_in22k",
    "pe_core_base": "vit_pe_core_base_patch16_224.fb",
    "pe_core_large": "vit_pe_core_large_patch14_336.fb",
    "swin_tiny": "swin_tiny_patch4_window7_224.ms_in1k",
    "swin_small": "swin_small_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_base": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_large": "swin_large_patch4_window7_224.ms_in22k_ft_in1k",
    "beit_base": "beit_base_patch16_224.in22k_ft_in22k_in1k",
    "mixer_base": "mixer_b16_224.goog_in21k_ft_in1k",
    "mobilenetv3": "mobilenetv3_large_100.ra_in1k",
}


def expand_short(name: str) -> str:
    """The exact name of a short one, whose spelling may vary: 'ViT-B/16', 'DeiT-small'. Other names stay."""
    return SHORT_NAMES.get(name.strip().lower().replace("-", "_").replace("/", "_"), name.strip())


def may_mean(name: str, exact: str) -> bool:
    """Whether a name as it was typed may mean this exact one. Which tag timm takes where none is given is known only
    once timm is imported, so that a name without tag may mean every tag."""
    expanded = expand_short(name)
    return exact == expanded or ("." not in expanded and exact.split(".")[0] == expanded)
