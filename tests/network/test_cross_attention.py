"""The three branches against the authors' vectors; test_architectures.py has every family."""

import pytest
import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models import VisionTransformer

from cdtrans.methods.cdtrans import cross_attention, three_branches
from cdtrans.network.blocks import embed, embed_patches, run_block
from cdtrans.network.network import Head, Network
from cdtrans.network.operations import Stream


@pytest.mark.parametrize(("size", "patch"), [(32, 16), (32, 7), (30, (5, 15)), (33, 16)])
def test_patches_are_embedded_as_timm_does(size: int, patch: int | tuple[int, int]) -> None:
    """Also where the patches do not fill the image."""
    torch.manual_seed(0)
    embedding = PatchEmbed(img_size=size, patch_size=patch, embed_dim=8).double()
    x = torch.randn(2, 3, size, size, dtype=torch.double)
    torch.testing.assert_close(embed_patches(embedding, x), embedding(x), atol=1e-12, rtol=0)


class TestStochasticDepth:
    """Each image of each branch is dropped on its own, in each of a block's two uses (docs/method.md)."""

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
        drawn = scales[1:].bool().double()  # uses and images are drawn apart:
        rows = torch.cat([drawn.flatten(0, 1), drawn.flatten(0, 1).roll(1, dims=1)])  # beside their neighbours
        correlation = torch.corrcoef(rows)
        assert (correlation - torch.eye(8)).abs().max() < 0.03

    def test_a_scale_is_what_the_attention_and_the_mlp_count_for(self) -> None:
        model = self.model()
        block, x = model.backbone.blocks[1].double(), torch.randn(6, 5, 16, dtype=torch.double)

        def run(scales: torch.Tensor | None) -> torch.Tensor:
            return run_block(block, Stream(x), scales, None, None, cross_attention).sum()

        both, neither, ones = run(None), run(torch.zeros(2, 6)), run(torch.ones(2, 6))
        assert torch.equal(neither, x)
        assert torch.equal(ones, both)
        only_image_4 = torch.zeros(2, 6)
        only_image_4[:, 4] = 1
        out = run(only_image_4)
        torch.testing.assert_close(out[4], both[4], atol=1e-12, rtol=0)
        assert torch.equal(out[[0, 1, 2, 3, 5]], x[[0, 1, 2, 3, 5]])


def test_blocks_equal_the_authors(tiny: tuple) -> None:
    model, g = tiny
    s, t = embed(model.backbone, g["x_s"]).x, embed(model.backbone, g["x_t"]).x
    x = torch.stack([s, t, t], dim=1).flatten(0, 1)  # pair by pair: source, source-target, target
    for i, block in enumerate(model.backbone.blocks):
        for stream, part in zip(("s", "st", "t"), (x[0::3], x[1::3], x[2::3]), strict=True):
            torch.testing.assert_close(part, g[f"train/block{i}/in_{stream}"], atol=1e-10, rtol=0)
        x = run_block(block, Stream(x), None, None, None, cross_attention).sum()
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
