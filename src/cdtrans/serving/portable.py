"""The target branch for other programs: a graph with its preprocessing, or the weights of a plain timm model."""

import io
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from cdtrans.errors import CdtransError
from cdtrans.model.backbone import timm_call
from cdtrans.model.card import Card
from cdtrans.model.head import Head
from cdtrans.model.network import Network
from cdtrans.runtime.environment import package_version

Read = Callable[[np.ndarray], np.ndarray]  # uint8 [B, resize, resize, 3] -> logits [B, K]


class Portable(nn.Module):
    """uint8 RGB images [B, resize, resize, 3], decoded and resized by PIL -> logits, divided by the temperature, and
    probabilities, [B, K] each."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Network, card: Card) -> None:
        super().__init__()
        self.model, self.crop, self.temperature = model, card.crop, card.temperature
        self.edge = round((card.resize - card.crop) / 2)
        self.register_buffer("mean", torch.tensor(card.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(3, 1, 1))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        middle = slice(self.edge, self.edge + self.crop)
        images = pictures[:, middle, middle].permute(0, 3, 1, 2).float() / 255  # [B, 3, crop, crop]
        logits = self.model.encode((images - self.mean) / self.std).logits / self.temperature
        return logits, logits.softmax(dim=1)


def onnx_file(model: Network, card: Card) -> bytes:
    """An ONNX graph for any batch size, with the metadata of `facts`."""
    example = torch.zeros(2, card.resize, card.resize, 3, dtype=torch.uint8)
    with warnings.catch_warnings(action="ignore"):  # torch warns about its own code
        program = torch.onnx.export(
            Portable(model, card).eval(),
            (example,),
            input_names=["pictures"],
            output_names=["logits", "probabilities"],
            dynamic_shapes=({0: torch.export.Dim("images", min=1)},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None, "the exporter without TorchScript gives one"
    for node in program.model.graph.all_nodes():  # remove paths of this machine's source code
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    program.model.metadata_props.update(facts(card))
    content: bytes = program.model_proto.SerializeToString()
    return content


def read_onnx(content: bytes) -> Read:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda pictures: np.asarray(session.run(["logits"], {"pictures": pictures})[0])


def timm_file(model: Network, card: Card) -> bytes:
    """What `timm.create_model(architecture, **arguments)` loads, both from the file's metadata: the backbone as it is,
    and as its head the classifier with the bottleneck norm and the temperature folded into it."""
    if not isinstance(model.head, Head):
        raise CdtransError(
            f"The head that '{card.method}' trains is not linear, so timm's models cannot hold it; export "
            ".onnx instead."
        )
    if model.transferability is not None:
        raise CdtransError(
            f"The critic of patches that '{card.method}' trains is part of this model, and timm's models cannot hold "
            "it; export .onnx instead."
        )
    if model.taps > 1:
        raise CdtransError(
            f"This model classifies the features of its last {model.taps} blocks together, which timm's models cannot; "
            "export .onnx instead, or train with --taps 1."
        )
    weights = {name: x.contiguous() for name, x in model.backbone.state_dict().items()}
    layer, (weight, bias) = model.backbone.default_cfg["classifier"], folded(model.head)
    metadata = facts(card)
    with torch.device("meta"):
        shapes = timm.create_model(metadata["architecture"], **json.loads(metadata["arguments"])).state_dict()
    if not isinstance(layer, str) or shapes.keys() != {*weights, f"{layer}.weight", f"{layer}.bias"}:
        raise CdtransError(f"The head of '{card.backbone}' is not one linear layer in timm; export it as .onnx.")
    weight, bias = weight / card.temperature, bias / card.temperature
    weights[f"{layer}.weight"] = weight.view(shapes[f"{layer}.weight"].shape)  # a convolution in some models
    weights[f"{layer}.bias"] = bias
    return save(weights, metadata=metadata)


def folded(head: Head) -> tuple[Tensor, Tensor]:
    """Neck and classifier as one linear layer: [K, D] and [K]. In eval mode the norm is a factor and a shift."""
    weight, neck = head.classifier.weight.detach(), head.neck
    if not isinstance(neck, nn.BatchNorm1d):
        return weight.clone(), head.classifier.bias.detach().clone()
    assert neck.running_mean is not None, "a bottleneck norm keeps statistics"
    assert neck.running_var is not None, "a bottleneck norm keeps statistics"
    factor = 1 / (neck.running_var.double() + neck.eps).sqrt()  # [D]
    factor = factor if neck.weight is None else neck.weight.detach().double() * factor
    shift = -neck.running_mean.double() * factor
    shift = shift if neck.bias is None else neck.bias.detach().double() + shift
    bias = 0.0 if head.classifier.bias is None else head.classifier.bias.detach().double()
    return (weight.double() * factor).float(), (weight.double() @ shift + bias).float()


def read_timm(content: bytes) -> Read:
    """Read the file with timm alone, without cdtrans."""
    facts = metadata(content)
    mean, std = (torch.tensor(json.loads(facts[name])).view(3, 1, 1) for name in ("mean", "std"))
    vit = timm.create_model(facts["architecture"], **json.loads(facts["arguments"])).eval()
    vit.load_state_dict(load(content))
    crop = int(facts["crop"])

    @torch.inference_mode()
    def logits(images: np.ndarray) -> np.ndarray:
        edge = round((images.shape[1] - crop) / 2)
        cut = torch.from_numpy(images[:, edge : edge + crop, edge : edge + crop])
        array: np.ndarray = vit((cut.permute(0, 3, 1, 2).float() / 255 - mean) / std).numpy()
        return array

    return logits


def metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, which starts with a length and a JSON header."""
    file = io.BytesIO(content)
    header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    facts: dict[str, str] = header["__metadata__"]
    return facts


def facts(card: Card) -> dict[str, str]:
    """What a user of the file must know, as text, which is all that metadata can hold; lists and mappings are JSON."""
    architecture, arguments = timm_call(card.backbone, crop=card.crop, args=card.backbone_args)
    return {
        "classes": json.dumps(card.classes),
        "architecture": architecture,
        "arguments": json.dumps({"num_classes": len(card.classes), **arguments}),
        "resize": str(card.resize),
        "crop": str(card.crop),
        "mean": json.dumps(card.mean),
        "std": json.dumps(card.std),
        "model": card.name,
        "cdtrans": package_version("cdtrans"),
    }
