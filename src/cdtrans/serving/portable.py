"""The target branch for other programs: a graph with its preprocessing, the weights of a plain timm model, or a folder
as the Hugging Face hub keeps it, which timm and transformers read. A model with several taps is none of timm's: its
folder also has the code with which transformers runs it."""

import copy
import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from cdtrans.errors import RunError, SettingsError
from cdtrans.network.backbone import FOLDER, timm_call
from cdtrans.network.network import Head, Network, feature_dim
from cdtrans.network.weights import build_model, load_classifier
from cdtrans.record.files import intact
from cdtrans.record.layout import WEIGHTS
from cdtrans.record.model import Card, card_from
from cdtrans.runtime import package_version
from cdtrans.schema import Misfit
from cdtrans.serving.hub import CODE
from cdtrans.serving.tapped_vit import tapped_logits, widen_head

Read = Callable[[np.ndarray], np.ndarray]  # uint8 [B, resize, resize, 3] -> logits [B, K]
EXPORT_AGAIN = "export it again with 'cdtrans export'"
HUB_CONFIG = "config.json"
REMOTE_CODE = {  # transformers runs the code of the folder by it
    "model_type": "cdtrans",
    "architectures": ["CdtransForImageClassification"],
    "auto_map": {
        "AutoConfig": "modeling_cdtrans.CdtransConfig",
        "AutoModelForImageClassification": "modeling_cdtrans.CdtransForImageClassification",
    },
}


class Portable(nn.Module):
    """uint8 RGB images [B, resize, resize, 3], decoded and resized by PIL -> logits, divided by the temperature, and
    probabilities, [B, K] each. `logits` is what `model` computes of normalised images [B, 3, crop, crop]."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, logits: Callable[[Tensor], Tensor], card: Card) -> None:
        super().__init__()
        self.model, self.logits, self.crop, self.temperature = model, logits, card.crop, card.temperature
        self.edge = round((card.resize - card.crop) / 2)
        self.register_buffer("mean", torch.tensor(card.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(3, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        middle = slice(self.edge, self.edge + self.crop)
        pixels = images[:, middle, middle].permute(0, 3, 1, 2).float() / 255  # [B, 3, crop, crop]
        logits = self.logits((pixels - self.mean) / self.std) / self.temperature
        return logits, logits.softmax(dim=1)


def onnx_file(model: Network, card: Card) -> bytes:
    """An ONNX graph for any batch size, with the metadata of `card_entries`."""
    example = torch.zeros(2, card.resize, card.resize, 3, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        program = torch.onnx.export(
            Portable(model, lambda images: model.encode(images).logits, card),
            (example,),
            input_names=["images"],
            output_names=["logits", "probabilities"],
            dynamic_shapes=({0: "count"},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None, "the exporter without TorchScript gives one"
    for node in program.model.graph.all_nodes():  # remove paths of this machine's source code
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    program.model.metadata_props.update(card_entries(model, card))
    content: bytes = program.model_proto.SerializeToString()
    return content


def open_onnx(file: Path) -> tuple[Read, Card]:
    """A file of `onnx_file`, run by onnxruntime, and the card in its metadata."""
    import onnxruntime

    with intact(file, EXPORT_AGAIN):
        session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
        card = read_card_entry(session.get_modelmeta().custom_metadata_map, file)
        sizes = [x.shape[1:] for x in (*session.get_inputs(), *session.get_outputs())]
        if sizes != [[card.resize, card.resize, 3], [len(card.classes)], [len(card.classes)]]:
            raise Misfit("kind", "", f"its graph is for {sizes}, not for images of {card.resize} pixels")
    return lambda images: np.asarray(session.run(["logits"], {"images": images})[0]), card


def timm_file(model: Network, card: Card) -> bytes:
    """Weights for `timm.create_model(architecture, **arguments)`, both in the file's metadata."""
    if why := why_no_weights(model, card):
        raise SettingsError("no-timm-model", f"{why}; export .onnx instead.")
    if model.taps > 1:
        advice = "export .onnx or a hub folder (--to hub-folder) instead, or train with --taps 1"
        raise SettingsError("no-timm-model", f"timm's models cannot classify by {model.taps} blocks; {advice}.")
    return weights_file(model, card)


def weights_file(model: Network, card: Card) -> bytes:
    """The backbone as it is, and as timm's head the classifier with the bottleneck norm and the temperature folded into
    it. With several taps it reads more features than timm's own."""
    assert isinstance(model.head, Head), "why_no_weights refuses others"
    weights = {name: x.contiguous() for name, x in model.backbone.state_dict().items()}
    layer, (weight, bias) = model.backbone.default_cfg["classifier"], one_layer(model.head)
    in_timm = _timm_state(card)[f"{layer}.weight"]  # [K, D], or [K, D, 1, 1]: a convolution in some models
    weights[f"{layer}.weight"] = (weight / card.temperature).view(*weight.shape, *in_timm.shape[2:])
    weights[f"{layer}.bias"] = bias / card.temperature
    return save(weights, metadata={"format": "pt", **card_entries(model, card)})  # transformers 4 asks for the format


def why_no_weights(model: Network, card: Card) -> str:
    """Why this model is not one of timm's with one linear layer as its head; empty if it is."""
    if not isinstance(model.head, Head):
        return f"The head that '{card.method}' trains is not linear, so timm's models cannot hold it"
    if model.transferability is not None:
        return f"The critic of patches that '{card.method}' trains is part of this model, and timm's cannot hold it"
    layer = model.backbone.default_cfg["classifier"]
    expected = {*model.backbone.state_dict(), f"{layer}.weight", f"{layer}.bias"}
    if not isinstance(layer, str) or _timm_state(card).keys() != expected:
        return f"The head of '{card.backbone}' is not one linear layer in timm"
    return ""


def _timm_state(card: Card) -> dict[str, Tensor]:
    """Shapes of the tensors that timm's own model has."""
    architecture, arguments = timm_call(card.backbone, crop=card.crop, args=card.backbone_args)
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=len(card.classes), **arguments)
    return dict(model.state_dict())


def one_layer(head: Head) -> tuple[Tensor, Tensor]:
    """Neck and classifier as one linear layer, [K, D] and [K]: in eval mode they are one affine map."""
    exact = copy.deepcopy(head).cpu().double().eval()
    dim = head.classifier.in_features
    with torch.no_grad():
        bias = exact.classify(torch.zeros(1, dim, dtype=torch.double)).logits  # [1, K]
        weight = exact.classify(torch.eye(dim, dtype=torch.double)).logits - bias  # [D, K]
    return weight.T.float().contiguous(), bias[0].float()


def read_timm(place: Path) -> Read:
    """An exported file or a hub folder, run by timm alone; with several taps by timm and the folder's code. Sizes and
    normalisation are those that other programs find, not our card's."""
    file = place / WEIGHTS if place.is_dir() else place
    entries = metadata(file)
    card = read_card_entry(entries, file)
    if place.is_dir():
        config = json.loads((place / HUB_CONFIG).read_text(encoding="utf-8"))
        told = config["pretrained_cfg"] | {"crop": config["pretrained_cfg"]["input_size"][-1]}
        call = config["architecture"], {"num_classes": config["num_classes"], **config["model_args"]}
    else:
        told = {name: json.loads(entries[name]) for name in ("crop", "mean", "std")}
        call = entries["architecture"], json.loads(entries["arguments"])
    card = replace(card, **{name: told[name] for name in ("crop", "mean", "std")})
    if place.is_dir() and card.taps == 1:
        vit = timm.create_model(f"{FOLDER}{place}", pretrained=True)
    else:
        vit = timm.create_model(call[0], **call[1])
        if card.taps > 1:
            widen_head(vit, card.taps)
        vit.load_state_dict(load_file(file))
    portable = Portable(vit, vit if card.taps == 1 else partial(tapped_logits, vit, taps=card.taps), card)

    @torch.inference_mode()
    def logits(images: np.ndarray) -> np.ndarray:
        return np.asarray(portable(torch.from_numpy(images))[0].numpy())

    return logits


def hub_config(model: Network, card: Card) -> dict[str, Any]:
    """Settings to build and feed the model in timm and transformers. `squash` resizes images to a square, as here."""
    backbone = model.backbone.default_cfg
    architecture, arguments = timm_call(card.backbone, crop=card.crop, args=card.backbone_args)
    kept = {name: backbone[name] for name in ("fixed_input_size", "first_conv", "classifier") if backbone.get(name)}
    return {
        "architecture": architecture.partition(".")[0],
        "num_classes": len(card.classes),
        "num_features": feature_dim(model.backbone),
        "label_names": list(card.classes),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "cdtrans",
            "custom_load": False,
            "input_size": [3, card.crop, card.crop],
            "interpolation": "bilinear",
            "crop_pct": crop_share(card.crop, card.resize),
            "crop_mode": "squash",
            "mean": list(card.mean),
            "std": list(card.std),
            "num_classes": len(card.classes),
            **kept,
        },
        **(REMOTE_CODE | {"taps": model.taps} if model.taps > 1 else {}),
    }


def crop_share(crop: int, resize: int) -> float:
    """crop / resize, so that timm, which rounds crop / share down, comes to `resize`."""
    share = crop / resize
    return share if math.floor(crop / share) == resize else math.nextafter(share, 0)


def write_folder(folder: Path, model: Network, card: Card) -> None:
    (folder / WEIGHTS).write_bytes(weights_file(model, card))
    (folder / HUB_CONFIG).write_text(json.dumps(hub_config(model, card), indent=2) + "\n", encoding="utf-8")
    for name in CODE if model.taps > 1 else ():
        shutil.copyfile(Path(__file__).with_name(name), folder / name)


def open_timm(file: Path) -> tuple[Network, Card]:
    """A file of `weights_file` as a network with a plain head, and the card in its metadata."""
    with intact(file, EXPORT_AGAIN):
        card = read_card_entry(metadata(file), file)
        network = build_model(card)
        load_classifier(network, file)
    return network.eval(), card


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as weights:
        return weights.metadata() or {}


def card_entries(model: Network, card: Card) -> dict[str, str]:
    """The metadata of an exported file, as text; lists and mappings are JSON. `card` is for `open_timm` and
    `open_onnx`: the card without what lies in the weights (neck, temperature) or names a path of this machine, and with
    the taps that the backbone has."""
    architecture, arguments = timm_call(card.backbone, crop=card.crop, args=card.backbone_args)
    others = {name: value for name, value in arguments.items() if name != "img_size"}  # it follows from the crop
    named = replace(card, backbone=architecture, backbone_args=others, method=PurePath(card.method).name)
    plain = replace(named, taps=model.taps, neck="none", head={}, transferability=False, temperature=1.0)
    plain = replace(plain, weights="exported", versions={})
    return {
        "classes": json.dumps(card.classes),
        "architecture": architecture,
        "arguments": json.dumps({"num_classes": len(card.classes), **arguments}),
        **{name: json.dumps(getattr(card, name)) for name in ("resize", "crop", "mean", "std")},
        "model": card.name,
        "card": json.dumps(asdict(plain)),
        "cdtrans": package_version("cdtrans"),
    }


def read_card_entry(entries: dict[str, str], file: Path) -> Card:
    """The card in the metadata of an exported file."""
    if "card" not in entries:
        raise RunError("not-exported", f"'{file}' was not written by 'cdtrans export': its metadata has no card.")
    card = card_from(json.loads(entries["card"]))
    if not card.classes:
        raise Misfit("range", "classes", "it has no classes")
    return card
