"""Any timm VisionTransformer by name, and its weights: all of them or an error that says why not."""

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
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled

import cdtrans.model.backbone as backbone
from cdtrans.errors import CdtransError
from cdtrans.model.backbone import (
    create_backbone,
    load_pretrained,
    load_state,
    load_weights,
    native_crop,
    normalisation,
)

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
    return str(error.value)


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

    @pytest.mark.parametrize("content", [{}, [], 3, {"model": 3}, {"epoch": 3}, {"model": {"a": "text"}}], ids=str)
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


class TestNeverPartly:
    def test_every_missing_unexpected_and_misshapen_key_is_listed(self) -> None:
        model, state = vit(), plain_file_state()
        del state["norm.weight"], state["blocks.1.mlp.fc1.bias"]
        state |= {"surprise": torch.zeros(1), "blocks.2.norm1.weight": torch.zeros(32)}
        state["blocks.0.attn.qkv.weight"] = torch.zeros(96, 31)
        state["norm.bias"] = torch.zeros(7)
        said = complaint(model, lambda: load_state(model, state, "'x.pth'"))
        assert said.startswith("'x.pth' does not fit the backbone and nothing was loaded")
        assert "missing: blocks.1.mlp.fc1.bias, norm.weight;" in said
        assert "unexpected: blocks.2.norm1.weight, surprise;" in said
        assert "blocks.0.attn.qkv.weight (96, 31), expected (96, 32), norm.bias (7,), expected (32,)" in said
        assert "--backbone" in said

    @pytest.mark.parametrize("name", ["cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.bias"])
    def test_one_missing_key(self, name: str) -> None:
        model, state = vit(), plain_file_state()
        del state[name]
        assert f"(missing: {name});" in complaint(model, lambda: load_state(model, state, "it"))

    def test_a_deeper_model_is_not_cut_to_size(self) -> None:
        deep = filled(vit(depth=3))
        model = vit()
        said = complaint(model, lambda: load_state(model, deep, "it"))
        assert "unexpected: blocks.2.attn.proj.bias" in said
        assert "missing" not in said

    def test_a_wider_model(self) -> None:
        model, wide = vit(), filled(vit(embed_dim=64))
        said = complaint(model, lambda: load_state(model, wide, "it"))
        for name in ("cls_token", "pos_embed", "blocks.1.mlp.fc2.weight", "norm.bias"):
            assert name in said

    @pytest.mark.parametrize("shape", [(1, 1 + 15, 32), (1, 17, 31), (17, 32), (32,), (1, 1, 32), (1, 0, 32)], ids=str)
    def test_positions_that_no_resizing_makes_fit(self, shape: tuple[int, ...]) -> None:
        model, state = vit(), plain_file_state() | {"pos_embed": torch.zeros(shape)}
        assert f"pos_embed {shape}, expected (1, 17, 32)" in complaint(model, lambda: load_state(model, state, "it"))

    def test_a_distilled_file_without_positions(self) -> None:
        model, state = vit(), distilled_state()
        del state["pos_embed"]
        assert "(missing: pos_embed);" in complaint(model, lambda: load_state(model, state, "it"))

    def test_another_architecture(self) -> None:
        model, state = vit(), filled(timm.create_model("resnet18"))
        said = complaint(model, lambda: load_state(model, state, "it"))
        assert "missing: blocks.0.attn.proj.bias" in said
        assert "unexpected: bn1.bias" in said


class TestDistilled:
    """Recognised by their keys; the authors' code goes by the file's name and may crash (docs/method.md 1.5)."""

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
        g, model = golden("cdtrans_tiny"), vit(img_size=(48, 24))
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


class TestArchitecture:
    @pytest.mark.parametrize("name", ["resnet50", "swin_tiny_patch4_window7_224", "deit3_small_patch16_224x"])
    def test_what_is_no_vision_transformer_names_some_that_are(self, name: str) -> None:
        with pytest.raises(CdtransError) as error:
            create_backbone(name, crop=224, drop_path=0.0, args={})
        assert f"'{name}'" in str(error.value)
        assert "VisionTransformer" in str(error.value)
        assert "deit_small_distilled_patch16_224.fb_in1k" in str(error.value)

    def test_a_giant_is_refused_without_memory_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []

        def create(*names: str, **settings: object) -> object:
            made.append(torch.get_default_device().type)
            return create_model(*names, **settings)

        create_model = timm.create_model
        monkeypatch.setattr(timm, "create_model", create)
        with pytest.raises(CdtransError, match="is not a timm VisionTransformer"):
            create_backbone("eva_giant_patch14_224", crop=224, drop_path=0.0, args={})
        assert made == ["meta"]

    def test_those_that_the_error_names_are_vision_transformers(self) -> None:
        for name in backbone.EXAMPLES.split(", "):
            with torch.device("meta"):
                create_backbone(name, crop=224, drop_path=0.0, args={})
            assert timm.get_pretrained_cfg(name).hf_hub_id, name

    @pytest.mark.parametrize(
        "name", ["vit_small_patch16_18x2_224", "vit_base_patch16_rpn_224", "beit_base_patch16_224"]
    )
    def test_other_blocks_are_refused(self, name: str) -> None:
        with pytest.raises(CdtransError, match="deit_small_distilled"):
            create_backbone(name, crop=224, drop_path=0.0, args={})

    @pytest.mark.parametrize("function", [native_crop, normalisation])
    def test_an_unknown_name(self, function: Callable[[str], object]) -> None:
        with pytest.raises(CdtransError, match="timm knows no model 'vit_tinny'"):
            function("vit_tinny")

    def test_an_unknown_tag_lists_the_known_ones(self) -> None:
        with pytest.raises(CdtransError, match=r"knows no weights 'deit_tiny_patch16_224\.mine'.*fb_in1k"):
            create_backbone("deit_tiny_patch16_224.mine", crop=224, drop_path=0.0, args={})

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
        [("deit_small_distilled_patch16_224", 224), ("vit_small_patch14_dinov2", 224), ("vit_base_patch16_384", 224)],
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
