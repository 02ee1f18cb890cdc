"""The three branches against the authors' vectors, an obvious slow forward, and timm, for every family of backbone."""

import pytest
import timm
import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models import VisionTransformer
from torch import nn

from cdtrans.model.cross_attention import (
    Stream,
    branch_features,
    embed,
    embed_patches,
    run_block,
    three_branches,
)
from cdtrans.model.head import Head
from cdtrans.model.network import Network

FAMILIES = {
    "deit": ("deit_tiny_patch16_224", {}),
    "deit3, layer scale": ("deit3_small_patch16_224", {}),
    "augreg": ("vit_tiny_patch16_224", {}),
    "dino": ("vit_small_patch16_224.dino", {}),
    "dinov2, registers": ("vit_small_patch14_reg4_dinov2", {"patch_size": 16}),
    "clip, norm before the blocks": ("vit_xsmall_patch16_clip_224", {}),
    "siglip, attention pooling": ("vit_base_patch16_siglip_224", {}),
    "norm of attention and mlp": ("vit_tiny_patch16_224", {"scale_attn_norm": True, "scale_mlp_norm": True}),
}


def small_backbone(name: str, args: dict) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    vit = timm.create_model(name, pretrained=False, **size, **args).double()
    for p in vit.parameters():  # layer scale starts near 0 and biases at 0: every weight should matter here
        nn.init.normal_(p, std=0.4)
    return vit


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Network:
    vit = small_backbone(*request.param)
    return Network(vit, Head(vit.num_features, 5, "batchnorm").double())


def images(seed: int) -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_features(
    model: Network, source: torch.Tensor, target: torch.Tensor, *, first_block_residual: bool = True
) -> tuple[torch.Tensor, ...]:
    """The three branches as the paper tells them: one stream after the other, attention written out."""
    vit = model.backbone
    s, t = embed(vit, source), embed(vit, target)
    c = t if first_block_residual else torch.zeros_like(t)
    for block in vit.blocks:
        a, heads = block.attn, block.attn.num_heads

        def qkv(x: torch.Tensor, block: nn.Module = block, a: nn.Module = a, heads: int = heads) -> list[torch.Tensor]:
            parts = a.qkv(block.norm1(x)).chunk(3, dim=-1)
            q, k, v = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts)
            return [a.q_norm(q), a.k_norm(k), v]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: nn.Module = a) -> torch.Tensor:
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return a.proj(a.norm((weights @ v).transpose(1, 2).flatten(2)))

        (qs, ks, vs), (qt, kt, vt) = qkv(s), qkv(t)
        s, t, c = (
            s + block.ls1(attend(qs, ks, vs)),
            t + block.ls1(attend(qt, kt, vt)),
            c + block.ls1(attend(qs, kt, vt)),
        )
        s, t, c = (x + block.ls2(block.mlp(block.norm2(x))) for x in (s, t, c))
    return tuple(vit.forward_head(vit.norm(x), pre_logits=True) for x in (s, t, c))


def test_equal_images_give_three_equal_branches(family: Network) -> None:
    x = images(0)
    out = three_branches(family.eval(), x, x)
    torch.testing.assert_close(out.source.logits, out.target.logits, atol=1e-10, rtol=0)
    torch.testing.assert_close(out.source_target.logits, out.target.logits, atol=1e-10, rtol=0)


def test_target_branch_is_timms_own_forward(family: Network) -> None:
    family.eval()
    source, target = images(0), images(1)
    _, ours, _ = branch_features(family, source, target)
    theirs = family.backbone(target)
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    weight = torch.randn_like(theirs)
    grads_ours = torch.autograd.grad((ours * weight).sum(), family.backbone.parameters(), allow_unused=True)
    grads_theirs = torch.autograd.grad((theirs * weight).sum(), family.backbone.parameters(), allow_unused=True)
    for a, b in zip(grads_ours, grads_theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("first_block_residual", [True, False])
def test_one_batch_equals_the_slow_forward(family: Network, first_block_residual: bool) -> None:
    source, target = images(0), images(1)
    how = {"first_block_residual": first_block_residual}
    fast = torch.cat(branch_features(family, source, target, **how))
    slow = torch.cat(slow_features(family, source, target, **how))
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    weight = torch.randn_like(slow)
    parameters = list(family.backbone.parameters())
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), parameters, allow_unused=True),
        torch.autograd.grad((slow * weight).sum(), parameters, allow_unused=True),
        strict=True,
    ):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_encoding_is_timms_own_forward(family: Network) -> None:
    family.eval()
    x = images(1)
    torch.testing.assert_close(family.encode(x).feature, family.head(family.backbone(x)).feature, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("size", "patch"), [(32, 16), (32, 7), (30, (5, 15)), (33, 16)])
def test_patches_are_embedded_as_timm_does(size: int, patch: int | tuple[int, int]) -> None:
    """Also where the patches do not fill the image."""
    torch.manual_seed(0)
    embedding = PatchEmbed(img_size=size, patch_size=patch, embed_dim=8).double()
    x = torch.randn(2, 3, size, size, dtype=torch.double)
    torch.testing.assert_close(embed_patches(embedding, x), embedding(x), atol=1e-12, rtol=0)


def test_only_what_the_pooling_reads_is_computed_in_the_last_block(family: Network) -> None:
    seen = []
    family.backbone.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    branch_features(family, images(0), images(1))
    tokens = embed(family.backbone, images(0)).shape[1]
    class_token_alone = family.backbone.global_pool == "token"
    assert seen == [1 if class_token_alone else tokens]


def test_the_source_target_branch_is_neither_of_the_others(family: Network) -> None:
    s, t, c = branch_features(family, images(0), images(1))
    assert (c - s).abs().max() > 1e-6
    assert (c - t).abs().max() > 1e-6


class TestStochasticDepth:
    """Each image of each branch is dropped on its own, in each of a block's two uses (docs/method.md, section 1.2)."""

    @staticmethod
    def model() -> Network:
        torch.manual_seed(0)
        vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=3, num_heads=2, drop_path_rate=0.4)
        return Network(vit, Head(16, 5, "batchnorm"))

    def test_scales_are_kept_as_often_as_the_block_says_and_keep_the_mean(self) -> None:
        scales = self.model().train().drop_path_scales(torch.zeros(20_000, 1, 1))
        assert scales.shape == (3, 2, 20_000)
        for block, keep in zip(scales, (1.0, 0.8, 0.6), strict=True):
            assert block.unique().tolist() == pytest.approx(sorted({1 / keep} | ({0.0} if keep < 1 else set())))
            assert block.mean() == pytest.approx(1, abs=0.03)

    def test_uses_and_images_are_drawn_apart(self) -> None:
        drawn = self.model().train().drop_path_scales(torch.zeros(20_000, 1, 1))[1:].flatten(2).bool().double()
        rows = torch.cat([drawn.flatten(0, 1), drawn.flatten(0, 1).roll(1, dims=1)])  # beside their neighbours
        correlation = torch.corrcoef(rows)
        assert (correlation - torch.eye(8)).abs().max() < 0.03

    def test_a_scale_is_what_the_attention_and_the_mlp_count_for(self) -> None:
        model = self.model()
        block, x = model.backbone.blocks[1].double(), torch.randn(6, 5, 16, dtype=torch.double)
        both = run_block(block, Stream(x), None, rows=None, cross=True).sum()
        neither = run_block(block, Stream(x), torch.zeros(2, 6), rows=None, cross=True).sum()
        ones = run_block(block, Stream(x), torch.ones(2, 6), rows=None, cross=True).sum()
        assert torch.equal(neither, x)
        assert torch.equal(ones, both)
        only_image_4 = torch.zeros(2, 6)
        only_image_4[:, 4] = 1
        out = run_block(block, Stream(x), only_image_4, rows=None, cross=True).sum()
        torch.testing.assert_close(out[4], both[4], atol=1e-12, rtol=0)
        assert torch.equal(out[[0, 1, 2, 3, 5]], x[[0, 1, 2, 3, 5]])

    def test_nothing_is_dropped_outside_training(self) -> None:
        assert self.model().eval().drop_path_scales(torch.zeros(4, 1, 1)) is None


def test_blocks_equal_the_authors(tiny: tuple) -> None:
    model, g = tiny
    s, t = embed(model.backbone, g["x_s"]), embed(model.backbone, g["x_t"])
    x = torch.stack([s, t, t], dim=1).flatten(0, 1)  # pair by pair: source, source-target, target
    for i, block in enumerate(model.backbone.blocks):
        for stream, part in zip(("s", "st", "t"), (x[0::3], x[1::3], x[2::3]), strict=True):
            torch.testing.assert_close(part, g[f"train/block{i}/in_{stream}"], atol=1e-10, rtol=0)
        x = run_block(block, Stream(x), None, rows=None, cross=True).sum()
        for stream, part in zip(("s", "st", "t"), (x[0::3], x[1::3], x[2::3]), strict=True):
            torch.testing.assert_close(part, g[f"train/block{i}/out_{stream}"], atol=1e-10, rtol=0)


def test_training_forward_equals_the_authors(tiny: tuple) -> None:
    model, g = tiny
    out = three_branches(model.train(), g["x_s"], g["x_t"])
    for stream, part in (("s", out.source), ("t", out.target), ("st", out.source_target)):
        torch.testing.assert_close(part.feature, g[f"train/bn_{stream}"], atol=1e-10, rtol=0)
        torch.testing.assert_close(part.logits, g[f"train/logits_{stream}"], atol=1e-10, rtol=0)
    neck = model.head.neck
    torch.testing.assert_close(neck.running_mean, g["train/running_mean_after"], atol=1e-10, rtol=0)
    torch.testing.assert_close(neck.running_var, g["train/running_var_after"], atol=1e-10, rtol=0)
    assert int(neck.num_batches_tracked) == 3


def test_inference_equals_the_authors(tiny: tuple) -> None:
    model, g = tiny
    model.eval()
    for stream in ("s", "t"):
        out = model.encode(g[f"x_{stream}"])
        torch.testing.assert_close(out.feature, g[f"eval/bn_{stream}"], atol=1e-10, rtol=0)
        torch.testing.assert_close(out.logits, g[f"eval/logits_{stream}"], atol=1e-10, rtol=0)
