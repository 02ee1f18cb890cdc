"""Any timm model by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from timm.models import VisionTransformer, save_for_hf

from cdtrans.errors import CdtransError
from cdtrans.network import SHORT_NAMES
from cdtrans.network.backbone import create_backbone, native_crop, normalisation, resolve_name
from cdtrans.network.blocks import why_no_shared_attention
from cdtrans.network.network import feature_dim
from cdtrans.network.weights import load_pretrained, read_state
from support import raises

SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def create(name: str = "vit_tiny_patch16_224", crop: int = 32, drop_path: float = 0.0, **args: object) -> Any:
    return create_backbone(name, crop=crop, drop_path=drop_path, args=args)


class TestNames:
    def test_every_short_name_has_weights_and_is_no_name_of_timm(self) -> None:
        for short, exact in SHORT_NAMES.items():
            assert not timm.is_model(short), short
            assert resolve_name(short) == resolve_name(exact) == exact
            assert "." in exact
            assert timm.get_pretrained_cfg(exact).has_weights, exact

    @pytest.mark.parametrize(
        ("name", "exact"),
        [
            ("DeiT-small", "deit_small_distilled_patch16_224.fb_in1k"),
            ("ViT-B/16", "vit_base_patch16_224.augreg_in21k_ft_in1k"),
            ("vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
            ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
            ("resnet50", "resnet50.a1_in1k"),
            ("vit_small_patch16_18x2_224", "vit_small_patch16_18x2_224.untrained"),
            ("vit_tiny_patch16_224_in21k", "vit_tiny_patch16_224.augreg_in21k"),  # its name in older versions of timm
            ("hf_hub:someone/something", "hf-hub:someone/something"),
            ("hf-hub:someone/something@v1", "hf-hub:someone/something@v1"),
            ("hf-hub:timm/resnet18.a1_in1k", "resnet18.a1_in1k"),
            ("local-dir:/some/where", "local-dir:/some/where"),
        ],
    )
    def test_a_name_is_resolved_to_an_exact_one(self, name: str, exact: str) -> None:
        assert resolve_name(name) == resolve_name(exact) == exact

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("deit_smal", "did you mean 'deit_small'"),
            ("resnet_50", "did you mean 'resnet50'"),
            ("deit3_small_patch16_224x", "did you mean 'deit3_small_patch16_224'"),
            *((name, "deit_small") for name in ("qqqqqq", "", "some/where", "http://x.y/z")),
        ],
    )
    def test_an_unknown_name_names_the_nearest_or_examples(self, name: str, meant: str) -> None:
        for function in (resolve_name, native_crop, normalisation):
            with pytest.raises(CdtransError, match=meant) as error:
                function(name)
            assert error.value.code == "backbone-unknown"
            assert len(str(error.value)) < 200

    def test_an_unknown_tag_lists_the_known_ones(self) -> None:
        with raises("backbone-tag-unknown"):
            create("deit_tiny_patch16_224.mine", 224)


class TestFolders:
    """`local-dir:` and the hub's repositories hold a config.json and the weights."""

    def test_a_folder_says_how_to_build_the_model_and_holds_its_weights(self, tmp_path: Path) -> None:
        args, folder = {**SMALL, "img_size": 32}, tmp_path / "mine"
        save_for_hf(timm.create_model("vit_tiny_patch16_224", **args), folder, model_args=args, safe_serialization=True)
        name = f"local-dir:{folder}"
        described = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
        assert native_crop(name) == described["input_size"][-1]
        assert normalisation(name)[0] == (0.5, 0.5, 0.5)
        model = create(name, 48, 0.1)
        assert (model.embed_dim, len(model.blocks), model.patch_embed.img_size) == (32, 2, (48, 48))
        load_pretrained(model, name)
        state = read_state(folder / "model.safetensors")
        assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items() if key != "pos_embed")

    def test_a_folder_or_repository_without_a_model(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with raises("no-timm-folder"):
            native_crop(f"local-dir:{tmp_path}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with raises("hub-unreachable"):
            native_crop("hf_hub:someone/something")


@pytest.mark.slow
class TestArchitecture:
    @pytest.mark.parametrize("name", ["deit_small", "dinov2_small", "dinov3_small"])
    def test_those_that_the_error_names_have_cross_attention(self, name: str) -> None:
        with torch.device("meta"):
            assert not why_no_shared_attention(create(name, 224))

    def test_image_size_and_stochastic_depth_go_to_models_that_have_them(self) -> None:
        assert create("test_resnet", 64, 0.2).num_classes == 0
        assert create("densenet121", 64, 0.2, block_config=(1, 1, 1, 1)) is not None
        swin = create("swin_tiny_patch4_window7_224", 64, 0.2, depths=(1, 1))
        assert swin.patch_embed.img_size == (64, 64)
        assert swin.layers[1].blocks[0].drop_path1.drop_prob == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("name", "args"), [("samvit_base_patch16", {}), ("test_resnet", {"global_pool": "catavgmax"})]
    )
    def test_a_length_that_timm_does_not_state(self, name: str, args: dict) -> None:
        with torch.device("meta"):
            model = create(name, 64, **args)
            assert model.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, feature_dim(model))

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_a_model_without_one_feature_vector_is_refused(self) -> None:
        with raises("backbone-output"), torch.device("meta"):
            create("inception_next_atto", 224)

    def test_the_checks_leave_the_random_numbers_alone(self) -> None:
        torch.manual_seed(0)
        timm.create_model("test_resnet", num_classes=0)
        expected = torch.rand(1)
        torch.manual_seed(0)
        model = create("test_resnet", 64)
        assert torch.equal(torch.rand(1), expected)
        assert model.training

    def test_a_distilled_name_gives_its_plain_sibling(self) -> None:
        model = create("deit_tiny_distilled_patch16_224.fb_in1k", 32, 0.1, **SMALL)
        assert type(model) is VisionTransformer
        assert model.num_prefix_tokens == 1
        assert isinstance(model.head, torch.nn.Identity)
        assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)

    @pytest.mark.parametrize(
        ("name", "crop"),
        [
            ("deit_small_distilled_patch16_224", 224),
            ("vit_small_patch14_dinov2", 224),
            ("vit_base_patch16_384", 224),
            ("vit_small_patch16_dinov3", 256),
            ("resnet50", 224),
            ("efficientnet_b4", 224),
            ("swinv2_tiny_window8_256", 256),
            ("test_resnet", 160),
        ],
    )
    def test_the_size_it_is_run_at(self, name: str, crop: int) -> None:
        assert native_crop(name) == crop

    def test_the_normalisation_is_the_weights_own(self) -> None:
        assert normalisation("vit_tiny_patch16_224") == ((0.5,) * 3, (0.5,) * 3)
        assert normalisation("deit_tiny_patch16_224")[0] == (0.485, 0.456, 0.406)
        assert normalisation("vit_base_patch16_clip_224.openai")[0] == pytest.approx((0.4815, 0.4578, 0.4082), abs=1e-4)


@pytest.mark.parametrize(
    "args",
    [{"img_size": 64}, {"in_chans": 1}, {"num_classes": 10}, {"drop_path_rate": 0.3}, {"pretrained": True},
     {"features_only": True}, {"global_pool": ""}, {"checkpoint_path": "x"},
     {"depth": 10**9}, {"embed_dim": 10**400}, {"depth": [2, [10**9]]}],
    ids=lambda args: str(args)[:30],
)  # fmt: skip
def test_arguments_that_are_set_elsewhere_or_too_large_are_refused_before_anything_is_built(args: dict) -> None:
    with raises("backbone-args"):
        create(**SMALL | args)


@pytest.mark.parametrize("args", [{"depht": 3}, {"embed_dim": 32}, {"num_heads": 0}, {"norm_layer": "x"}], ids=str)
def test_arguments_that_timm_refuses(args: dict) -> None:
    with raises("backbone-fails"):
        create(**args)


@pytest.mark.parametrize(
    ("crop", "args"), [(7, {}), (16, {"patch_size": 64}), (33, {"dynamic_img_size": True})], ids=str
)
def test_a_crop_that_cannot_be_divided_into_patches(crop: int, args: dict[str, object]) -> None:
    with raises("crop-misfit"):
        create(crop=crop, **SMALL | args)
    with pytest.raises(CdtransError):
        create("swin_tiny_patch4_window7_224", 2)


def test_a_crop_of_any_size_can_be_padded() -> None:
    model = create(crop=33, **SMALL, dynamic_img_size=True, dynamic_img_pad=True)
    assert model(torch.zeros(1, 3, 33, 33)).shape == (1, 32)
