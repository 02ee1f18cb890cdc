"""Any backbone with a head: lengths of features, BatchNorm, and stochastic depth on several ranks."""

import pytest
import timm
import torch
from timm.models import VisionTransformer

import cdtrans.network.network as network_module
from cdtrans.errors import CdtransError
from cdtrans.network.network import Head, Network, feature_dim, has_batchnorm, require_no_batchnorm_on_ranks


def network_of(name: str, **args: object) -> Network:
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=0, **args)
    return Network(backbone, Head(feature_dim(backbone), 3, "batchnorm"))


def images(count: int, seed: int, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator) + seed  # domains of different means


class TestBatchNorm:
    """BatchNorm layers of the backbone, not the head's neck."""

    @staticmethod
    def statistics(batch: torch.Tensor) -> torch.Tensor:
        """The running mean of the first BatchNorm after one batch, from its input."""
        network = network_of("test_resnet")
        first = network.backbone.conv1(batch).mean(dim=(0, 2, 3))
        return network.backbone.bn1.momentum * first.detach()

    def test_stage_2_has_those_of_source_and_target_together(self) -> None:
        network, source, target = network_of("test_resnet").train(), images(4, 0), images(4, 3)
        outputs = network.encode_each(source, target)
        together = self.statistics(torch.cat([source, target]))
        torch.testing.assert_close(network.backbone.bn1.running_mean, together)
        assert not torch.allclose(together, self.statistics(target))
        assert int(network.backbone.bn1.num_batches_tracked) == 1
        assert int(network.head.neck.num_batches_tracked) == 2, "the head gets the domains one by one"
        alone = network_of("test_resnet").train().encode(source)
        assert not torch.allclose(outputs[0].feature, alone.feature)

    def test_several_ranks_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resnet, convnext = network_of("test_resnet").backbone, network_of("test_convnext").backbone
        assert (has_batchnorm(resnet), has_batchnorm(convnext)) == (True, False)
        require_no_batchnorm_on_ranks(resnet, "test_resnet")
        monkeypatch.setattr(network_module, "world", lambda: 2)
        require_no_batchnorm_on_ranks(convnext, "test_convnext")
        with pytest.raises(CdtransError, match=r"'test_resnet'.*BatchNorm.*2 processes"):
            require_no_batchnorm_on_ranks(resnet, "test_resnet")


def test_in_eval_mode_a_training_step_leaves_no_trace() -> None:
    network = network_of("test_resnet").train()
    before = {name: x.clone() for name, x in network.state_dict().items()}
    out = network.encode_in_eval_mode(images(4, 3))
    assert network.training
    assert not out.logits.requires_grad
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    torch.testing.assert_close(out.logits, network.eval().encode(images(4, 3)).logits)


class TestStochasticDepthOnRanks:
    @staticmethod
    def network() -> Network:
        size = {"img_size": 32, "embed_dim": 16, "depth": 3, "num_heads": 2}
        return network_of("vit_tiny_patch16_224", **size, drop_path_rate=0.5).train()

    @pytest.mark.parametrize("batches", [[6], [4, 8], [2, 2, 4]], ids=str)
    @pytest.mark.parametrize("world", [2, 1])
    def test_ranks_with_equal_shares_drop_what_one_rank_drops(
        self, batches: list[int], world: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        network = self.network()

        def scales(sizes: list[int]) -> tuple[torch.Tensor, ...]:
            torch.manual_seed(1)
            drawn = network.drop_path_scales(torch.zeros(sum(sizes), 1, 1), sizes)
            assert drawn is not None
            return drawn.split(sizes, dim=2)

        whole = scales(batches)
        assert whole[0].unique().numel() > 2
        parts = []
        for rank in range(world):
            monkeypatch.setattr(network_module, "world", lambda: world)
            monkeypatch.setattr(network_module, "rank", lambda rank=rank: rank)
            parts.append(scales([size // world for size in batches]))
        for n, batch in enumerate(whole):
            assert torch.equal(torch.cat([part[n] for part in parts], dim=2), batch)

    def test_encoding_several_batches_says_how_long_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network, told = self.network(), []

        def spy(x: torch.Tensor, sizes: list[int] | None = None) -> None:
            told.append((len(x), sizes))

        monkeypatch.setattr(network, "drop_path_scales", spy)
        network.encode_each(images(2, 0), images(3, 1))
        network.encode(images(2, 0))
        assert told == [(5, [2, 3]), (2, None)]


def make_vit(depth: int, pool: str = "token") -> VisionTransformer:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 0}
    return VisionTransformer(**size, depth=depth, global_pool=pool)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_taps_are_the_pooled_tokens_of_the_last_blocks_the_later_ones_first(pool: str) -> None:
    vit, images = make_vit(4, pool).eval(), torch.randn(3, 3, 16, 16)
    model = Network(vit, Head(48, 5, "none"), taps=3).eval()
    assert model.dim == 48
    _, tokens = vit.forward_intermediates(images, indices=[1, 2], output_fmt="NLC", return_prefix_tokens=True)
    pooled = [prefix[:, 0] if pool == "token" else patches.mean(dim=1) for patches, prefix in tokens]
    expected = torch.cat([vit(images), pooled[1], pooled[0]], dim=1)
    torch.testing.assert_close(model.features(images), expected, atol=1e-5, rtol=1e-5)


def test_there_are_no_more_taps_than_blocks_that_can_be_tapped() -> None:
    backbones = timm.create_model("resnet18", num_classes=0), make_vit(2), make_vit(2, "map")
    assert [Network(backbone, Head(16, 3, "none"), taps=9).taps for backbone in backbones] == [1, 2, 1]
