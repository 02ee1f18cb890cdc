"""Any timm model by name, and its weights: all of them or an error that says why not."""

import json
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import VisionTransformer, save_for_hf
from timm.models.deit import VisionTransformerDistilled

import cdtrans.network.backbone as backbone
from cdtrans.backbone_names import SHORT_NAMES, expand_short, may_mean
from cdtrans.errors import CdtransError, WeightsUnavailable
from cdtrans.network.backbone import (
    create_backbone,
    load_pretrained,
    load_state,
    load_weights,
    native_crop,
    normalisation,
    resolve_name,
)
from cdtrans.network.cross_attention import require_cross_attention
from cdtrans.network.network import feature_dim
from support import error_says, says

REAL = Path(__file__).parents[3] / "shared" / "real" / "deit_tiny_patch16_224.safetensors"
SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
GRID = 4  # patches on a side of a 32-pixel image


def vit(crop: int = 32, **args: object) -> VisionTransformer:
    return create_backbone("vit_tiny_patch16_224", crop=crop, drop_path=0.0, args=SMALL | args)


def filled(model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict of the model's shapes in which every number is another."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) for name, t in model.state_dict().items()}


def plain_file_state() -> dict[str, torch.Tensor]:
    """What a timm or DeiT file of the small model holds: a head of 1,000 classes too."""
    return filled(timm.create_model("vit_tiny_patch16_224", img_size=32, **SMALL))


def distilled_state(positions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    state = filled(VisionTransformerDistilled(img_size=32, num_classes=10, **SMALL))
    assert {"dist_token", "head_dist.weight"} <= state.keys()
    return state if positions is None else state | {"pos_embed": positions}


def assert_holds(model: VisionTransformer, state: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    for name, tensor in model.state_dict().items():
        assert name in but or torch.equal(tensor, state[name]), name


def complaint(model: VisionTransformer, load: Callable[[], None]) -> str:
    """The error, after making sure that nothing was loaded."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CdtransError) as error:
        load()
    assert_holds(model, before)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 320
    return f"{error.value} {error.value.details}"


WRAPPINGS = {
    "timm": lambda state: state,
    "deit": lambda state: {"model": state},
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "data parallel": lambda state: {"module." + key: value for key, value in state.items()},
    "both": lambda state: {"model": {"module." + key: value for key, value in state.items()}},
}


class TestFiles:
    @pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
    def test_pth_in_every_wrapping(self, tmp_path: Path, wrap: Callable[[dict], dict]) -> None:
        state, model = plain_file_state(), vit()
        torch.save(wrap(state), tmp_path / "weights.pth")
        load_weights(model, tmp_path / "weights.pth")
        assert_holds(model, state)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_safetensors(self, tmp_path: Path, dtype: torch.dtype) -> None:
        state, model = {k: v.to(dtype) for k, v in plain_file_state().items()}, vit()
        save_file(state, tmp_path / "weights.safetensors")
        load_weights(model, tmp_path / "weights.safetensors")
        assert_holds(model, {k: v.float() for k, v in state.items()})
        assert model.pos_embed.dtype == torch.float32

    def test_a_missing_file(self, tmp_path: Path) -> None:
        model = vit()
        assert "There is no weights file" in complaint(model, lambda: load_weights(model, tmp_path / "nowhere.pth"))
        assert "There is no weights file" in complaint(model, lambda: load_weights(model, tmp_path))  # a folder

    @pytest.mark.parametrize("suffix", ["pth", "safetensors"])
    @pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04 not a zip", b"\x80\x02junk"])
    def test_bytes_that_are_no_weights(self, tmp_path: Path, suffix: str, content: bytes) -> None:
        file, model = tmp_path / f"weights.{suffix}", vit()
        file.write_bytes(content)
        assert str(file) in complaint(model, lambda: load_weights(model, file))

    @pytest.mark.parametrize("suffix", ["pth", "safetensors"])
    def test_half_a_file(self, tmp_path: Path, suffix: str) -> None:
        file, model = tmp_path / f"weights.{suffix}", vit()
        torch.save(plain_file_state(), file) if suffix == "pth" else save_file(plain_file_state(), file)
        os.truncate(file, file.stat().st_size // 2)
        assert "not a readable weights file" in complaint(model, lambda: load_weights(model, file))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
    def test_weights_of_a_training_that_diverged(self, tmp_path: Path, value: float) -> None:
        """Else the run would end as if its own training had, and advise a lower learning rate."""
        state, file, model = plain_file_state(), tmp_path / "weights.safetensors", vit()
        state["blocks.0.norm1.weight"][2] = value
        save_file(state, file)
        told = complaint(model, lambda: load_weights(model, file))
        assert says(told, str(file), "'blocks.0.norm1.weight'", "not finite or larger", "--weights")

    @pytest.mark.parametrize(
        "content",
        [
            *({}, [], 3, {"model": 3}, {"epoch": 3}, {"model": {"a": "text"}}, {1: torch.zeros(2)}),
            *({"a": torch.zeros(2).to_sparse()}, {"a": torch.zeros(2, device="meta")}, {"a": torch.zeros(2).cfloat()}),
        ],
        ids=str,
    )
    def test_a_file_without_a_state_dict(self, tmp_path: Path, content: object) -> None:
        file, model = tmp_path / "weights.pth", vit()
        torch.save(content, file)
        assert "no state dict of tensors" in complaint(model, lambda: load_weights(model, file))

    def test_a_pickle_that_would_run_something_is_not_opened(self, tmp_path: Path) -> None:
        class Malicious:
            def __reduce__(self) -> tuple:
                return os.mkdir, (str(tmp_path / "pwned"),)

        file, model = tmp_path / "weights.pth", vit()
        torch.save({"model": plain_file_state(), "extra": Malicious()}, file)
        assert "more than tensors" in complaint(model, lambda: load_weights(model, file))
        assert not (tmp_path / "pwned").exists()

    def test_a_whole_training_checkpoint_is_told_apart(self, tmp_path: Path) -> None:
        file, model = tmp_path / "weights.pth", vit()
        torch.save({"model": plain_file_state(), "args": Namespace(lr=1)}, file)
        assert "state_dict alone" in complaint(model, lambda: load_weights(model, file))


@pytest.mark.slow
class TestNeverPartly:
    def test_every_missing_unexpected_and_misshapen_key_is_in_the_details(self) -> None:
        model, state = vit(), plain_file_state()
        del state["norm.weight"], state["blocks.1.mlp.fc1.bias"]
        state |= {"surprise": torch.zeros(1), "norm_pre.weight": torch.zeros(32)}
        state["blocks.0.attn.qkv.weight"] = torch.zeros(96, 31)
        state["norm.bias"] = torch.zeros(7)
        with pytest.raises(CdtransError) as error:
            load_state(model, state, "'x.pth'")
        sentence, details = str(error.value), error.value.details
        for word in ("'x.pth'", "'vit_tiny_patch16_224'", "nothing was loaded", "and 1 more", "--backbone"):
            assert word in sentence
        missing, unexpected, misshapen = details.split("\n")
        assert missing == "missing: blocks.1.mlp.fc1.bias, norm.weight"
        assert unexpected == "unexpected: norm_pre.weight, surprise"
        for words in ("blocks.0.attn.qkv.weight (96, 31), expected (96, 32)", "norm.bias (7,), expected (32,)"):
            assert words in misshapen

    @pytest.mark.parametrize("name", ["cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.bias"])
    def test_one_missing_key(self, name: str) -> None:
        model, state = vit(), plain_file_state()
        del state[name]
        said = complaint(model, lambda: load_state(model, state, "it"))
        assert f"it lacks '{name}'" in said
        assert said.endswith(f"missing: {name}")

    def test_a_deeper_model_is_not_cut_to_size(self) -> None:
        deep = filled(vit(depth=3))
        model = vit()
        said = complaint(model, lambda: load_state(model, deep, "it"))
        assert "3 blocks" in said
        assert "2" in said
        assert "unexpected: blocks.2.attn.proj.bias" in said

    def test_a_wider_model(self) -> None:
        model, wide = vit(), filled(vit(embed_dim=64))
        said = complaint(model, lambda: load_state(model, wide, "it"))
        assert "width is 64, the model's is 32" in said
        for name in ("cls_token", "pos_embed", "blocks.1.mlp.fc2.weight", "norm.bias"):
            assert name in said

    @pytest.mark.parametrize(
        ("file", "name", "meant"),
        [
            ("deit_tiny_patch16_224", "deit_small_distilled_patch16_224.fb_in1k", "deit_tiny_patch16_224"),
            ("deit_tiny_distilled_patch16_224", "deit_small_patch16_224", "deit_tiny_patch16_224"),
            ("resnet18", "deit_tiny_patch16_224", "resnet18"),
            ("deit_tiny_patch16_224", "resnet18", "deit_tiny_patch16_224"),
            ("vit_small_patch16_dinov3", "vit_base_patch16_dinov3", "vit_small_patch16_dinov3"),
        ],
    )
    def test_the_model_that_the_weights_are_of_is_named(self, file: str, name: str, meant: str) -> None:
        with torch.device("meta"):
            state = timm.create_model(file).state_dict()
            model = create_backbone(name, crop=224, drop_path=0.0, args={})
        with pytest.raises(CdtransError, match=f"did you mean --backbone {meant}") as error:
            load_state(model, state, "'some-file.pth'")
        assert len(str(error.value)) < 320

    @pytest.mark.parametrize("shape", [(1, 1 + 15, 32), (1, 17, 31), (17, 32), (32,), (1, 1, 32), (1, 0, 32)], ids=str)
    def test_positions_that_no_resizing_makes_fit(self, shape: tuple[int, ...]) -> None:
        model, state = vit(), plain_file_state() | {"pos_embed": torch.zeros(shape)}
        assert f"pos_embed {shape}, expected (1, 17, 32)" in complaint(model, lambda: load_state(model, state, "it"))

    def test_a_distilled_file_without_positions(self) -> None:
        model, state = vit(), distilled_state()
        del state["pos_embed"]
        assert "missing: pos_embed" in complaint(model, lambda: load_state(model, state, "it"))

    def test_another_architecture(self) -> None:
        model, state = vit(), filled(timm.create_model("resnet18"))
        said = complaint(model, lambda: load_state(model, state, "it"))
        assert "another architecture" in said
        assert "missing: blocks.0.attn.proj.bias" in said
        assert "unexpected: bn1.bias" in said


@pytest.mark.slow
class TestOtherFamilies:
    @pytest.mark.parametrize(
        ("name", "args", "crop"),
        [
            ("test_resnet", {}, 64),
            ("test_convnext", {}, 64),
            ("test_efficientnet", {}, 64),
            ("levit_128s", {"depth": (1, 1, 1), "embed_dim": (32, 64, 96)}, 224),
            ("swin_tiny_patch4_window7_224", {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}, 64),
            ("mixer_s32_224", {}, 64),
            ("eva02_tiny_patch14_224", SMALL, 32),
            ("vit_small_patch16_dinov3", SMALL, 32),
        ],
    )
    def test_a_file_of_timm_s_model_loads_without_its_head(
        self, tmp_path: Path, name: str, args: dict, crop: int
    ) -> None:
        backbone = create_backbone(name, crop=crop, drop_path=0.0, args=args)
        size = {"img_size": crop} if timm.get_pretrained_cfg(name).fixed_input_size else {}
        state = filled(timm.create_model(name, num_classes=7, **size, **args))
        assert state.keys() > backbone.state_dict().keys()
        save_file(state, tmp_path / "weights.safetensors")
        load_weights(backbone, tmp_path / "weights.safetensors")
        assert_holds(backbone, {k: v.to(backbone.state_dict().get(k, v).dtype) for k, v in state.items()})

    def test_timms_converter_is_used(self) -> None:
        """The authors of ConvNeXt name its layers in another way."""
        backbone = create_backbone("convnext_atto", crop=64, drop_path=0.0, args={})
        state = filled(backbone)
        theirs = {
            key.replace("stem.", "downsample_layers.0.")
            .replace("head.norm.", "norm.")
            .replace("conv_dw", "dwconv")
            .replace("mlp.fc1", "pwconv1")
            .replace("mlp.fc2", "pwconv2"): value
            for key, value in state.items()
        }
        for stage in range(4):
            theirs = {
                k.replace(f"stages.{stage}.downsample", f"downsample_layers.{stage}"): v for k, v in theirs.items()
            }
            theirs = {k.replace(f"stages.{stage}.blocks", f"stages.{stage}"): v for k, v in theirs.items()}
        assert theirs.keys() != state.keys()
        load_state(backbone, theirs, "it")
        assert_holds(backbone, state)

    def test_evas_positions_are_resized(self) -> None:
        small = create_backbone("eva02_tiny_patch14_224", crop=32, drop_path=0.0, args=SMALL)
        large = create_backbone("eva02_tiny_patch14_224", crop=48, drop_path=0.0, args=SMALL)
        state = filled(small)
        load_state(large, state, "it")
        assert large.pos_embed.shape == (1, 1 + 6 * 6, 32)
        assert_holds(large, state, but=("pos_embed",))


class TestDistilled:
    """Recognised by their keys; the authors' code goes by the file's name and crashes when that lies."""

    def test_the_distillation_token_and_heads_are_dropped(self, tmp_path: Path) -> None:
        state, model = distilled_state(), vit()
        torch.save({"model": state}, tmp_path / "deit.pth")
        load_weights(model, tmp_path / "deit.pth")
        assert_holds(model, state, but=("pos_embed",))
        assert torch.equal(model.pos_embed[:, 0], state["pos_embed"][:, 0])
        assert torch.equal(model.pos_embed[:, 1:], state["pos_embed"][:, 2:])

    def test_positions_of_the_same_grid_are_the_authors(self, golden) -> None:
        g, model = golden("cdtrans_tiny"), vit()
        load_state(model, distilled_state(g["ckpt/pos_embed_in"]), "it")
        torch.testing.assert_close(model.pos_embed.detach(), g["ckpt/pos_embed_same_grid"], rtol=0, atol=0)

    def test_positions_of_another_grid_are_the_authors(self, golden) -> None:
        g, model = (
            golden("cdtrans_tiny"),
            timm.create_model("vit_tiny_patch16_224", img_size=(48, 24), num_classes=0, **SMALL),
        )
        load_state(model, distilled_state(g["ckpt/pos_embed_in"]), "it")
        torch.testing.assert_close(model.pos_embed.detach(), g["ckpt/pos_embed_6x3_grid"], rtol=0, atol=1e-6)


class TestPositions:
    def test_they_are_resized_bilinearly_for_a_larger_image(self) -> None:
        model, state = vit(crop=48), plain_file_state()
        load_state(model, state, "it")
        assert model.pos_embed.shape == (1, 1 + 6 * 6, 32)
        grid = state["pos_embed"][:, 1:].reshape(1, GRID, GRID, 32).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(grid, (6, 6), mode="bilinear", align_corners=False)
        torch.testing.assert_close(model.pos_embed[:, 1:].detach(), resized.flatten(2).mT, rtol=0, atol=1e-6)
        assert torch.equal(model.pos_embed[:, 0], state["pos_embed"][:, 0])
        assert_holds(model, state, but=("pos_embed",))

    def test_a_backbone_whose_class_token_has_no_position(self) -> None:
        name, args = "vit_small_patch14_reg4_dinov2", SMALL
        small = create_backbone(name, crop=32, drop_path=0.0, args=args)
        large = create_backbone(name, crop=48, drop_path=0.0, args=args)
        assert small.pos_embed.shape == (1, GRID * GRID, 32)
        state = filled(small)
        load_state(large, state, "it")
        assert large.pos_embed.shape == (1, 36, 32)
        assert_holds(large, state, but=("pos_embed",))


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
            ("deit_small", "deit_small_distilled_patch16_224.fb_in1k"),
            ("DeiT-small", "deit_small_distilled_patch16_224.fb_in1k"),
            ("ViT-B/16", "vit_base_patch16_224.augreg_in21k_ft_in1k"),
            ("vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
            ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
            ("resnet50", "resnet50.a1_in1k"),
            ("convnext_tiny", "convnext_tiny.in12k_ft_in1k"),
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
            ("deit_smal", "deit_small"),
            ("resnet_50", "resnet50"),
            ("deit3_small_patch16_224x", "deit3_small_patch16_224"),
        ],
    )
    def test_an_unknown_name_names_the_nearest(self, name: str, meant: str) -> None:
        with pytest.raises(CdtransError, match=f"'{name}'.*did you mean '{meant}'"):
            resolve_name(name)

    @pytest.mark.parametrize("name", ["qqqqqq", "", "some/where", "http://x.y/z"])
    def test_a_name_like_no_other_names_examples(self, name: str) -> None:
        with pytest.raises(CdtransError, match="deit_small") as error:
            resolve_name(name)
        assert len(str(error.value)) < 200

    @pytest.mark.parametrize("function", [native_crop, normalisation])
    def test_an_unknown_name_is_refused_everywhere(self, function: Callable[[str], object]) -> None:
        with pytest.raises(CdtransError, match="vit_tinny"):
            function("vit_tinny")

    def test_an_unknown_tag_lists_the_known_ones(self) -> None:
        with pytest.raises(CdtransError, match=r"'deit_tiny_patch16_224\.mine'.*fb_in1k"):
            create_backbone("deit_tiny_patch16_224.mine", crop=224, drop_path=0.0, args={})

    def test_what_a_name_may_mean_before_timm_is_imported(self) -> None:
        assert may_mean("deit_small", expand_short("deit_small"))
        assert may_mean("resnet50", "resnet50.tv_in1k")
        assert not may_mean("resnet50.a1_in1k", "resnet50.tv_in1k")
        assert not may_mean("resnet5", "resnet50.tv_in1k")


class TestFolders:
    """`local-dir:` and the hub's repositories hold a config.json and the weights."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        args = {**SMALL, "img_size": 32}
        model = timm.create_model("vit_tiny_patch16_224", **args)
        save_for_hf(model, tmp_path / "mine", model_args=args, safe_serialization=True)
        return tmp_path / "mine"

    def test_a_folder_says_how_to_build_the_model_and_holds_its_weights(self, folder: Path) -> None:
        name = f"local-dir:{folder}"
        described = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
        assert native_crop(name) == described["input_size"][-1]
        assert normalisation(name)[0] == (0.5, 0.5, 0.5)
        model = create_backbone(name, crop=48, drop_path=0.1, args={})
        assert (model.embed_dim, len(model.blocks), model.patch_embed.img_size) == (32, 2, (48, 48))
        load_pretrained(model, name)
        assert_holds(model, backbone.read_state(folder / "model.safetensors"), but=("pos_embed",))

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(CdtransError, match=r"config\.json") as error:
            native_crop(f"local-dir:{tmp_path}")
        assert not isinstance(error.value, WeightsUnavailable)

    def test_a_repository_that_cannot_be_reached(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with error_says("hf-hub:someone/something", "config.json", "network"):
            native_crop("hf_hub:someone/something")


@pytest.mark.slow
class TestArchitecture:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("test_resnet", "no self-attention"),
            ("test_convnext", "no self-attention"),
            ("swin_tiny_patch4_window7_224", "self-attention"),
            ("beit_base_patch16_224", "self-attention"),
            ("vit_small_patch16_18x2_224", "blocks"),
            ("vit_base_patch16_rpn_224", "blocks"),
        ],
    )
    def test_it_is_built_and_cross_attention_refuses_it(self, name: str, why: str) -> None:
        with torch.device("meta"):
            model = create_backbone(name, crop=224, drop_path=0.0, args={})
        with pytest.raises(CdtransError, match=rf"'{name}'.*{why}.*--method dann.*deit_small"):
            require_cross_attention(model, name)

    @pytest.mark.parametrize("name", ["deit_small", "dinov2_small", "dinov3_small"])
    def test_those_that_the_error_names_have_cross_attention(self, name: str) -> None:
        with torch.device("meta"):
            require_cross_attention(create_backbone(name, crop=224, drop_path=0.0, args={}), name)

    def test_image_size_and_stochastic_depth_go_to_models_that_have_them(self) -> None:
        assert create_backbone("test_resnet", crop=64, drop_path=0.2, args={}).num_classes == 0
        assert create_backbone("densenet121", crop=64, drop_path=0.2, args={"block_config": (1, 1, 1, 1)}) is not None
        swin = create_backbone("swin_tiny_patch4_window7_224", crop=64, drop_path=0.2, args={"depths": (1, 1)})
        assert swin.patch_embed.img_size == (64, 64)
        assert swin.layers[1].blocks[0].drop_path1.drop_prob == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("name", "args"),
        [("samvit_base_patch16", {}), ("test_resnet", {"global_pool": "catavgmax"})],
    )
    def test_a_length_that_timm_does_not_state(self, name: str, args: dict) -> None:
        with torch.device("meta"):
            model = create_backbone(name, crop=64, drop_path=0.0, args=args)
            assert model.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, feature_dim(model))

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    def test_a_model_without_one_feature_vector_is_refused(self) -> None:
        with pytest.raises(CdtransError, match=r"'inception_next_atto'.*feature vector"), torch.device("meta"):
            create_backbone("inception_next_atto", crop=224, drop_path=0.0, args={})

    @pytest.mark.parametrize(("name", "crop"), [("vit_tiny_patch16_224", 8), ("swin_tiny_patch4_window7_224", 2)])
    def test_a_crop_smaller_than_a_patch(self, name: str, crop: int) -> None:
        with pytest.raises(CdtransError, match=f"{crop}"):
            create_backbone(name, crop=crop, drop_path=0.0, args={})

    @pytest.mark.parametrize(
        "args",
        [{"img_size": 64}, {"in_chans": 1}, {"num_classes": 10}, {"drop_path_rate": 0.3}, {"pretrained": True},
         {"features_only": True}, {"global_pool": ""}, {"checkpoint_path": "x"}],
        ids=str,
    )  # fmt: skip
    def test_arguments_that_are_set_elsewhere(self, args: dict) -> None:
        with pytest.raises(CdtransError, match=f"'{next(iter(args))}'.*backbone_args"):
            create_backbone("vit_tiny_patch16_224", crop=32, drop_path=0.0, args=args)

    def test_the_checks_leave_the_random_numbers_alone(self) -> None:
        torch.manual_seed(0)
        timm.create_model("test_resnet", num_classes=0)
        expected = torch.rand(1)
        torch.manual_seed(0)
        model = create_backbone("test_resnet", crop=64, drop_path=0.0, args={})
        assert torch.equal(torch.rand(1), expected)
        assert model.training

    @pytest.mark.parametrize("args", [{"depht": 3}, {"embed_dim": 32}, {"num_heads": 0}, {"norm_layer": "x"}], ids=str)
    def test_arguments_that_timm_refuses(self, args: dict) -> None:
        with pytest.raises(CdtransError, match="backbone_args"):
            create_backbone("vit_tiny_patch16_224", crop=32, drop_path=0.0, args=args)

    def test_a_distilled_name_gives_its_plain_sibling(self) -> None:
        model = create_backbone("deit_tiny_distilled_patch16_224.fb_in1k", crop=32, drop_path=0.1, args=SMALL)
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


class TestHub:
    NAME = "deit_tiny_distilled_patch16_224.fb_in1k"

    @pytest.fixture(autouse=True)
    def _empty_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    def assert_both_ways_out(self) -> None:
        model = vit()
        began = time.monotonic()
        with pytest.raises(WeightsUnavailable):
            load_pretrained(model, self.NAME)
        said = complaint(model, lambda: load_pretrained(model, self.NAME))
        assert time.monotonic() - began < 8
        assert f"'{self.NAME}' could not be downloaded" in said
        assert "--weights FILE" in said
        assert "--no-pretrained" in said

    def test_offline_by_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        self.assert_both_ways_out()

    def test_a_hub_that_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        self.assert_both_ways_out()

    def test_a_hub_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert backbone.HUB_SECONDS <= 15
        monkeypatch.setattr(backbone, "HUB_SECONDS", 0.2)
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
            self.assert_both_ways_out()

    def test_weights_in_the_hub_s_cache_need_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        repository = tmp_path / "hub" / f"models--{timm.get_pretrained_cfg(self.NAME).hf_hub_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        state = filled(timm.create_model(self.NAME))
        save_file(state, snapshot / "model.safetensors")
        model = create_backbone(self.NAME, crop=224, drop_path=0.0, args={})
        load_pretrained(model, self.NAME)
        assert_holds(model, state, but=("pos_embed",))
        assert torch.equal(model.pos_embed[:, 1:], state["pos_embed"][:, 2:])

    def test_a_model_that_has_none_says_so(self) -> None:
        with pytest.raises(CdtransError, match=r"has no pretrained weights.*--weights FILE.*--no-pretrained"):
            load_pretrained(vit(), "vit_small_patch16_18x2_224")


@pytest.mark.skipif(not REAL.exists(), reason="../shared/real is not here")
def test_real_deit_weights_load_strictly() -> None:
    model = create_backbone("deit_tiny_patch16_224", crop=224, drop_path=0.0, args={})
    load_weights(model, REAL)
    state = backbone.read_state(REAL)
    assert_holds(model, state)
    assert set(state) - set(model.state_dict()) == {"head.weight", "head.bias"}
    assert all(t.dtype == torch.float32 for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("crop", "args", "words"),
    [
        (7, {}, ["--crop 7", "smaller than a patch"]),
        (16, {"patch_size": 64}, ["--crop 16", "64 pixels"]),
        (33, {"dynamic_img_size": True}, ["--crop 33", "patches of 8", "dynamic_img_size"]),
        (32, {"depth": 10**9}, ["'depth'", "at most 10000"]),
        (32, {"embed_dim": 10**400}, ["'embed_dim'", "at most 10000"]),
        (32, {"depth": [2, [10**9]]}, ["'depth'", "at most 10000"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[:30],
)
def test_sizes_that_cannot_work_are_refused_before_anything_is_built(
    crop: int, args: dict[str, object], words: list[str]
) -> None:
    with error_says(*words):
        vit(crop, **args)


def test_a_crop_of_any_size_can_be_padded() -> None:
    assert vit(33, dynamic_img_size=True, dynamic_img_pad=True)(torch.zeros(1, 3, 33, 33)).shape == (1, 32)
