"""Exported files say what the model says, for every kind of backbone and head."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cdtrans.config import Config
from cdtrans.network.network import Network
from cdtrans.network.weights import build_model, make_card
from cdtrans.record.model import Card
from cdtrans.serving import portable
from cdtrans.serving.classifier import Classifier
from cdtrans.serving.export import largest_difference
from cdtrans.serving.portable import read_timm, write_folder
from support import raises

KINDS = {
    "distilled DeiT": ("deit_tiny_distilled_patch16_224", {"depth": 1, "embed_dim": 48}, 32, "batchnorm"),
    "no class token": ("vit_tiny_patch16_224", {"depth": 1, "class_token": False, "global_pool": "avg"}, 48, "none"),
    "registers": ("vit_small_patch14_reg4_dinov2.lvd142m", {"depth": 1, "embed_dim": 48}, 28, "batchnorm"),
    "rotary positions": ("vit_small_patch16_dinov3", {"depth": 1, "embed_dim": 48}, 32, "batchnorm"),
    "ResNet": ("test_resnet", {}, 64, "batchnorm"),
    "ConvNeXt": ("test_convnext", {}, 64, "none"),
}
TAPPED = {  # those that can have several taps, and more of them
    **{kind: KINDS[kind] for kind in ("distilled DeiT", "no class token", "registers", "rotary positions")},
    "EVA-02": ("eva02_tiny_patch14_224", {"embed_dim": 48}, 28, "none"),
    "average of the patches": ("vit_tiny_patch16_224", {"embed_dim": 48, "global_pool": "avg"}, 32, "batchnorm"),
    "any image size": ("vit_tiny_patch16_224", {"embed_dim": 48, "dynamic_img_size": True}, 48, "none"),
}
NOT_ONE_LAYER = {  # heads that are no linear layer on the feature, which ONNX does not mind
    "LeViT": ("levit_128s", {"depth": (1, 1, 1), "embed_dim": (32, 64, 96)}, 224, "batchnorm")
}


def model_of(kind: str, *, taps: int = 1, **more: int) -> tuple[Network, Card]:
    """With weights and statistics that all matter."""
    backbone, args, crop, neck = {**KINDS, **TAPPED, **NOT_ONE_LAYER}[kind]
    sizes: dict[str, Any] = {"backbone_args": args | more, "crop": crop, "resize": crop + 5}
    config = Config(backbone=backbone, neck=neck, pretrained=False, taps=taps, **sizes)
    card = make_card(dataclasses.replace(config, precision="fp32"), ("a", "b", "c", "é d"), stage="source", epoch=3)
    card = dataclasses.replace(card, temperature=2.5)
    torch.manual_seed(0)
    model = build_model(card).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x += 0.1 * torch.randn_like(x) if "norm" in name or "neck" in name else 0.02 * torch.randn_like(x)
        nn.init.normal_(model.head.classifier.weight)
        if isinstance(model.head.neck, nn.BatchNorm1d):
            model.head.neck.running_mean.normal_()
            model.head.neck.running_var.uniform_(0.5, 2)
    return model, card


def images_for(card: Card, count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, card.resize, card.resize, 3), dtype=np.uint8)


def logits_of(model: Network, card: Card, images: np.ndarray) -> np.ndarray:
    """The centre crop, scaled and normalised by hand; divided by the temperature."""
    edge = round((card.resize - card.crop) / 2)
    cut = images[:, edge : edge + card.crop, edge : edge + card.crop].astype(np.float32) / 255
    images = (cut - np.array(card.mean, np.float32)) / np.array(card.std, np.float32)
    with torch.inference_mode():
        return model.encode(torch.from_numpy(images).permute(0, 3, 1, 2)).logits.numpy() / 2.5


@pytest.mark.slow  # an ordinary ViT is in test_export
@pytest.mark.parametrize("kind", ["rotary positions", "ResNet", "ConvNeXt"])
def test_the_graph_says_the_same_for_any_number_of_images(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, card = model_of(kind)
    content, file = portable.onnx_file(model, card), tmp_path / "model.onnx"
    file.write_bytes(content)
    read = portable.open_onnx(file)[0]
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for count in (1, 2, 5):
        images = images_for(card, count)
        logits, probabilities = session.run(None, {"images": images})
        expected = logits_of(model, card, images)
        np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_allclose(probabilities, torch.from_numpy(expected).softmax(1).numpy(), atol=1e-4)
        np.testing.assert_array_equal(read(images), logits)
    assert largest_difference(Classifier(model, card, torch.device("cpu")), read) < 1e-4
    assert b'File "' not in content, "the paths of this machine"
    assert b"site-packages" not in content
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["a", "b", "c", "é d"]


@pytest.mark.parametrize("kind", NOT_ONE_LAYER)
def test_a_head_that_timm_cannot_hold_is_refused(kind: str) -> None:
    with raises("no-timm-model"):
        portable.timm_file(*model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_timm_with_the_weights_says_the_same(kind: str, tmp_path: Path) -> None:
    model, card = model_of(kind)
    file = tmp_path / "model.safetensors"
    file.write_bytes(portable.timm_file(model, card))
    images = images_for(card, 4)
    expected = logits_of(model, card, images)
    np.testing.assert_allclose(read_timm(file)(images), expected, atol=1e-4 * np.abs(expected).max())
    assert largest_difference(Classifier(model, card, torch.device("cpu")), read_timm(file)) < 1e-4
    facts = portable.metadata(file)
    assert "distilled" not in facts["architecture"]
    assert (facts["model"], facts["crop"], facts["resize"]) == ("source-only", str(card.crop), str(card.resize))


def test_a_file_is_computed_in_the_precision_of_its_run(tmp_path: Path) -> None:
    """On a GPU float32 takes several times as long."""
    model, card = model_of("ResNet")
    file = tmp_path / "model.safetensors"
    file.write_bytes(portable.timm_file(model, dataclasses.replace(card, precision="bf16")))
    assert portable.open_timm(file)[1].precision == "bf16"


def test_a_backbone_without_taps_is_exported_as_timm_s_own(tmp_path: Path) -> None:
    """The card may ask for several, as the recipe does."""
    model, card = model_of("ResNet", taps=4)
    write_folder(tmp_path, model, card)
    images = images_for(card, 4)
    expected = logits_of(model, card, images)
    np.testing.assert_allclose(read_timm(tmp_path)(images), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("key", "value"), [("mean", [0.3, 0.4, 0.5]), ("std", [0.3, 0.4, 0.5]), ("input_size", [3, 60, 60])]
)
def test_a_hub_folder_that_other_programs_would_misread_is_noticed(tmp_path: Path, key: str, value: list) -> None:
    """The card in the weights' metadata, which only cdtrans reads, is right."""
    model, card = model_of("ResNet")
    write_folder(tmp_path, model, card)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises("export-differs"):
        largest_difference(Classifier(model, card, torch.device("cpu")), read_timm(tmp_path))


@pytest.mark.parametrize("kind", TAPPED)
def test_the_code_of_a_hub_folder_says_the_same_with_several_taps(kind: str, tmp_path: Path) -> None:
    model, card = model_of(kind, taps=3, depth=4)
    assert model.taps == 3
    write_folder(tmp_path, model, card)
    images = images_for(card, 4)
    expected = logits_of(model, card, images)
    np.testing.assert_allclose(read_timm(tmp_path)(images), expected, atol=1e-5 * np.abs(expected).max())
    network, read = portable.open_timm(tmp_path / "model.safetensors")
    again = Classifier(network, read, torch.device("cpu")).logits(images)
    np.testing.assert_allclose(again, expected, atol=1e-5 * np.abs(expected).max())
