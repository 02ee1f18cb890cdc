"""The three branches against the authors' vectors, and their gradients; test_architectures.py has every family."""

import pytest
import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models import VisionTransformer

from architectures import CROSS, images, small_network
from cdtrans.methods.cdtrans import branch_features, cross_attention, three_branches
from cdtrans.network.blocks import embed, embed_patches, run_block
from cdtrans.network.network import Head, Network
from cdtrans.network.operations import Stream
from slow_attention import slow_features

FAMILIES = (
    "ViT: deit",
    "ViT: deit3, layer scale",
    "ViT: dinov2, registers",
    "ViT: siglip, attention pooling",
    "ViT: norm of queries and keys",
    "Eva: eva02, split qkv, SwiGLU",
    "Eva: dinov3, biases",
    "Eva: sapiens2, shared keys and values",
    "Eva: class token alone",
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Network, int]:
    """A small network and its image size."""
    small = CROSS[request.param]
    return small_network(small), small.size


@pytest.mark.slow
@pytest.mark.parametrize("first_block_residual", [True, False])
def test_gradients_of_one_batch_are_those_of_attention_written_out(
    family: tuple[Network, int], first_block_residual: bool
) -> None:
    network, size = family
    source, target = images(size, 0, count=1), images(size, 1, count=1)
    fast = torch.cat(branch_features(network, source, target, first_block_residual=first_block_residual))
    slow = torch.cat(slow_features(network.backbone, source, target, first_block_residual))
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    parameters, weight = list(network.backbone.parameters()), torch.randn_like(slow)
    for a, b in zip(
        torch.autograd.grad((fast * weight).sum(), parameters, allow_unused=True),
        torch.autograd.grad((slow * weight).sum(), parameters, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("size", "patch"), [(32, 16), (32, 7), (30, (5, 15)), (33, 16)])
def test_patches_are_embedded_as_timm_does(size: int, patch: int | tuple[int, int]) -> None:
    """Also where the patches do not fill the image."""
    torch.manual_seed(0)
    embedding = PatchEmbed(img_size=size, patch_size=patch, embed_dim=8).double()
    x = torch.randn(2, 3, size, size, dtype=torch.double)
    torch.testing.assert_close(embed_patches(embedding, x), embedding(x), atol=1e-12, rtol=0)


def test_only_what_the_pooling_reads_is_computed_in_the_last_block(family: tuple[Network, int]) -> None:
    network, size = family
    backbone, rows = network.backbone, []
    backbone.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    branch_features(network, images(size, 0), images(size, 1))
    class_token_alone = backbone.global_pool == "token"
    assert rows == [1 if class_token_alone else embed(backbone, images(size, 0)).x.shape[1]]


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
