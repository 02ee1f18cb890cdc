"""Weights of a backbone: all of them, or an error that says why not."""

import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled

from cdtrans.errors import CdtransError, WeightsUnavailable
from cdtrans.network import backbone
from cdtrans.network.backbone import create_backbone
from cdtrans.network.weights import load_pretrained, load_state, load_weights, read_state

REAL = Path(__file__).parents[3] / "shared" / "real" / "deit_tiny_patch16_224.safetensors"
SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
GRID = 4  # patches on a side of a 32-pixel image


def create(name: str = "vit_tiny_patch16_224", crop: int = 32, **args: object) -> Any:
    return create_backbone(name, crop=crop, drop_path=0.0, args=args)


def vit(crop: int = 32, **args: object) -> VisionTransformer:
    return create(crop=crop, **{**SMALL, **args})


def filled(model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict of the model's shapes in which every number is another."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) for name, t in model.state_dict().items()}


def plain_file_state() -> dict[str, torch.Tensor]:
    """The content of a timm or DeiT file of the small model, with a head of 1,000 classes."""
    return filled(timm.create_model("vit_tiny_patch16_224", img_size=32, **SMALL))


def distilled_state(positions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    state = filled(VisionTransformerDistilled(img_size=32, num_classes=10, **SMALL))
    assert {"dist_token", "head_dist.weight"} <= state.keys()
    return state if positions is None else state | {"pos_embed": positions}


def assert_holds(model: Any, state: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    for name, tensor in model.state_dict().items():
        assert name in but or torch.equal(tensor, state[name]), name


def refused(code: str, model: VisionTransformer, load: Callable[[], None]) -> str:
    """The text and details of the error, after making sure that nothing was loaded."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CdtransError) as error:
        load()
    assert_holds(model, before)
    assert error.value.code in code.split(" or "), str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 320
    return f"{error.value}\n{error.value.details}"


def refused_file(code: str, file: Path) -> None:
    model = vit()
    assert str(file) in refused(code, model, lambda: load_weights(model, file))


def refused_state(state: dict[str, torch.Tensor]) -> str:
    model = vit()
    return refused("weights-misfit", model, lambda: load_state(model, state, "it"))


class TestFiles:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda state: state,
            lambda state: {"model": state},
            lambda state: {"state_dict": state, "epoch": 3},
            lambda state: {"module." + name: value for name, value in state.items()},
            lambda state: {"model": {"module." + name: value for name, value in state.items()}},
        ],
        ids=["timm", "deit", "state_dict", "data parallel", "both"],
    )
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

    @pytest.mark.parametrize("suffix", ["pth", "safetensors"])
    def test_bytes_that_are_no_weights(self, tmp_path: Path, suffix: str) -> None:
        for content in (b"", b"hello world", b"PK\x03\x04 not a zip", b"\x80\x02junk"):
            file = tmp_path / f"weights.{suffix}"
            file.write_bytes(content)
            refused_file("weights-unreadable or weights-unsafe", file)
        torch.save(plain_file_state(), file) if suffix == "pth" else save_file(plain_file_state(), file)
        os.truncate(file, file.stat().st_size // 2)
        refused_file("weights-unreadable", file)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
    def test_weights_of_a_training_that_diverged(self, tmp_path: Path, value: float) -> None:
        """Else the run would end as if its own training had, and advise a lower learning rate."""
        state, file = plain_file_state(), tmp_path / "weights.safetensors"
        state["blocks.0.norm1.weight"][2] = value
        save_file(state, file)
        refused_file("weights-not-finite", file)

    @pytest.mark.parametrize(
        "content",
        [
            *({}, [], 3, {"model": 3}, {"epoch": 3}, {"model": {"a": "text"}}, {1: torch.zeros(2)}),
            *({"a": torch.zeros(2).to_sparse()}, {"a": torch.zeros(2, device="meta")}, {"a": torch.zeros(2).cfloat()}),
        ],
        ids=str,
    )
    def test_a_file_without_a_state_dict(self, tmp_path: Path, content: object) -> None:
        torch.save(content, tmp_path / "weights.pth")
        refused_file("no-state-dict", tmp_path / "weights.pth")

    def test_a_pickle_that_would_run_something_is_not_opened(self, tmp_path: Path) -> None:
        class Malicious:
            def __reduce__(self) -> tuple:
                return os.mkdir, (str(tmp_path / "pwned"),)

        for extra in (Malicious(), Namespace(lr=1)):  # the second is a whole training checkpoint
            torch.save({"model": plain_file_state(), "extra": extra}, tmp_path / "weights.pth")
            refused_file("weights-unsafe", tmp_path / "weights.pth")
        assert not (tmp_path / "pwned").exists()


class TestMisfits:
    def test_every_missing_unexpected_and_misshapen_tensor_is_in_the_details(self) -> None:
        state = plain_file_state()
        del state["norm.weight"], state["blocks.1.mlp.fc1.bias"]
        state |= {"surprise": torch.zeros(1), "norm_pre.weight": torch.zeros(32), "norm.bias": torch.zeros(7)}
        state["blocks.0.attn.qkv.weight"] = torch.zeros(96, 31)
        _, missing, unexpected, misshapen = refused_state(state).splitlines()
        assert missing == "missing: blocks.1.mlp.fc1.bias, norm.weight"
        assert unexpected == "unexpected: norm_pre.weight, surprise"
        assert "blocks.0.attn.qkv.weight (96, 31), expected (96, 32)" in misshapen
        assert "norm.bias (7,), expected (32,)" in misshapen

    @pytest.mark.slow
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
            state, model = timm.create_model(file).state_dict(), create(name, 224)
        with pytest.raises(CdtransError, match=f"did you mean --backbone {meant}") as error:
            load_state(model, state, "'some-file.pth'")
        assert len(str(error.value)) < 320

    @pytest.mark.parametrize("shape", [(1, 1 + 15, 32), (1, 17, 31), (17, 32), (32,), (1, 1, 32), (1, 0, 32)], ids=str)
    def test_positions_that_no_resizing_makes_fit(self, shape: tuple[int, ...]) -> None:
        said = refused_state(plain_file_state() | {"pos_embed": torch.zeros(shape)})
        assert f"pos_embed {shape}, expected (1, 17, 32)" in said


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
        model = create(name, crop, **args)
        size = {"img_size": crop} if timm.get_pretrained_cfg(name).fixed_input_size else {}
        state = filled(timm.create_model(name, num_classes=7, **size, **args))
        assert state.keys() > model.state_dict().keys()
        save_file(state, tmp_path / "weights.safetensors")
        load_weights(model, tmp_path / "weights.safetensors")
        assert_holds(model, {k: v.to(model.state_dict().get(k, v).dtype) for k, v in state.items()})

    def test_timms_converter_is_used(self) -> None:
        """The authors of ConvNeXt name its layers in another way."""
        model = create("convnext_atto", 64)
        state = filled(model)
        names = {"stem.": "downsample_layers.0.", "head.norm.": "norm.", "conv_dw": "dwconv"}
        names |= {"mlp.fc1": "pwconv1", "mlp.fc2": "pwconv2"}
        names |= {f"stages.{n}.downsample": f"downsample_layers.{n}" for n in range(4)}
        names |= {f"stages.{n}.blocks": f"stages.{n}" for n in range(4)}
        theirs = {}
        for name, value in state.items():
            for ours, authors in names.items():
                name = name.replace(ours, authors)
            theirs[name] = value
        assert theirs.keys() != state.keys()
        load_state(model, theirs, "it")
        assert_holds(model, state)


class TestDistilled:
    """Recognised by their tensors; the authors' code goes by the file's name and crashes when that lies."""

    def test_the_distillation_token_and_heads_are_dropped(self, tmp_path: Path) -> None:
        state, model = distilled_state(), vit()
        torch.save({"model": state}, tmp_path / "deit.pth")
        load_weights(model, tmp_path / "deit.pth")
        assert_holds(model, state, but=("pos_embed",))
        assert torch.equal(model.pos_embed[:, 0], state["pos_embed"][:, 0])
        assert torch.equal(model.pos_embed[:, 1:], state["pos_embed"][:, 2:])
        del state["pos_embed"]
        assert "missing: pos_embed" in refused_state(state)

    @pytest.mark.parametrize(("size", "grid"), [((32, 32), "same_grid"), ((48, 24), "6x3_grid")])
    def test_positions_are_the_authors(self, golden, size: tuple[int, int], grid: str) -> None:
        g = golden("cdtrans_tiny")
        model = timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=0, **SMALL)
        load_state(model, distilled_state(g["ckpt/pos_embed_in"]), "it")
        tolerance = 0 if grid == "same_grid" else 1e-6
        torch.testing.assert_close(model.pos_embed.detach(), g[f"ckpt/pos_embed_{grid}"], rtol=0, atol=tolerance)


class TestPositions:
    @pytest.mark.parametrize(("name", "prefix"), [("vit_small_patch14_reg4_dinov2", 0), ("eva02_tiny_patch14_224", 1)])
    def test_of_registers_and_of_another_class_of_timm(self, name: str, prefix: int) -> None:
        state, large = filled(create(name, 32, **SMALL)), create(name, 48, **SMALL)
        assert state["pos_embed"].shape == (1, prefix + GRID * GRID, 32)
        load_state(large, state, "it")
        assert large.pos_embed.shape == (1, prefix + 6 * 6, 32)
        assert_holds(large, state, but=("pos_embed",))


class TestHub:
    NAME = "deit_tiny_distilled_patch16_224.fb_in1k"

    @pytest.fixture(autouse=True)
    def _empty_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    @pytest.mark.parametrize("hub", ["offline", "refuses", "does not answer"])
    def test_that_cannot_be_reached(self, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert backbone.HUB_TIMEOUT <= 15
        monkeypatch.setattr(backbone, "HUB_TIMEOUT", 0.2)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", hub == "offline")
        model, began = vit(), time.monotonic()
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            if hub == "does not answer":
                port.listen()
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port.getsockname()[1]}")
            said = refused("weights-unavailable", model, lambda: load_pretrained(model, self.NAME))
            with pytest.raises(WeightsUnavailable):
                load_pretrained(model, self.NAME)
        assert time.monotonic() - began < 8
        assert all(word in said for word in (self.NAME, "--weights", "--no-pretrained")), said

    def test_weights_in_the_hub_s_cache_need_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        repository = tmp_path / "hub" / f"models--{timm.get_pretrained_cfg(self.NAME).hf_hub_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        state = filled(timm.create_model(self.NAME))
        save_file(state, snapshot / "model.safetensors")
        model = create(self.NAME, 224)
        load_pretrained(model, self.NAME)
        assert_holds(model, state, but=("pos_embed",))
        assert torch.equal(model.pos_embed[:, 1:], state["pos_embed"][:, 2:])

    def test_a_model_without_pretrained_weights(self) -> None:
        model = vit()
        refused("no-pretrained-weights", model, lambda: load_pretrained(model, "vit_small_patch16_18x2_224"))


@pytest.mark.skipif(not REAL.exists(), reason="../shared/real is not here")
def test_real_deit_weights_load_strictly() -> None:
    model, state = create("deit_tiny_patch16_224", 224), read_state(REAL)
    load_weights(model, REAL)
    assert_holds(model, state)
    assert set(state) - set(model.state_dict()) == {"head.weight", "head.bias"}
    assert all(t.dtype == torch.float32 for t in model.state_dict().values())
