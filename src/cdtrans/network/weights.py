"""Saved weights: of a backbone, from the hub, a folder or a file in the format of timm or of a model's authors; and of
a whole network, with the card that describes it."""

import re
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import timm
import torch
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import VisionTransformer
from torch import Tensor, nn

from cdtrans.config import Resolved, require_weights
from cdtrans.errors import CdtransError, DataError, RunError, SettingsError
from cdtrans.network.backbone import (
    FOLDER,
    WEIGHTS_FILES,
    ask_hub,
    config_of,
    create_backbone,
    normalisation,
    unavailable,
)
from cdtrans.network.blocks import Transferability
from cdtrans.network.network import Head, Network, build_head, feature_dim
from cdtrans.record.model import FROM_SCRATCH, Card, read_card, read_weights

LARGEST_WEIGHT = 1e12  # no trained network comes near, and its square still is a float32
SIZES = "tiny", "small", "base", "large", "huge"  # vision transformers
DEPTHS = 18, 34, 50, 101, 152  # ResNets

StateDict = dict[str, Tensor]


def load_pretrained(backbone: nn.Module, name: str) -> None:
    """timm's pretrained weights for this name and tag, through the Hugging Face hub, or those in a folder."""
    cfg = config_of(name)
    if not cfg.has_weights:
        raise SettingsError(
            "no-pretrained-weights",
            f"timm has no pretrained weights for '{name}'; give --weights FILE, or --no-pretrained.",
        )
    try:
        if cfg.hf_hub_id and not name.startswith(FOLDER):
            ask_hub(cfg.hf_hub_id, (cfg.hf_hub_filename,) if cfg.hf_hub_filename else WEIGHTS_FILES)
        reference = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the hub client raises without a network; all of it means the same to the user
        raise unavailable(name, error) from error
    load_state(backbone, reference.state_dict(), f"the weights of '{name}'")


def load_weights(backbone: nn.Module, file: Path) -> None:
    """Weights from a .safetensors or .pth file."""
    load_state(backbone, read_state(file), f"'{file}'")


def load_classifier(network: Network, file: Path) -> None:
    """The weights of a whole timm classifier, into a network with a plain linear head."""
    backbone, head = network.backbone, network.head
    assert isinstance(head, Head), "a plain one"
    load_weights(backbone, file)
    state, layer = read_state(file), getattr(backbone, "default_cfg", {}).get("classifier")
    weight, bias = (state.get(f"{layer}.{name}") if isinstance(layer, str) else None for name in ("weight", "bias"))
    if weight is None or bias is None:
        raise DataError(
            "no-classifier",
            f"'{file}' holds no classifier ('{layer}' in timm's model of this --backbone); give the weights of a whole "
            "classifier with one linear layer at its end.",
        )
    if weight.numel() != head.classifier.weight.numel():
        raise DataError(
            "classifier-misfit",
            f"The classifier in '{file}' has {len(weight)} classes of {weight[0].numel()} features, not "
            f"{len(head.classifier.weight)} of {head.classifier.in_features}; check --source-classes and --backbone.",
        )
    with torch.no_grad():
        head.classifier.weight.copy_(weight.view_as(head.classifier.weight))  # a convolution in some models
        head.classifier.bias.copy_(bias)


def read_state(file: Path) -> StateDict:
    """The tensors of a weights file, unwrapped from 'model' or 'state_dict' and freed of DataParallel's prefix."""
    require_weights(file)
    try:
        safe = file.suffix == ".safetensors"
        state: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise DataError(
            "weights-unsafe",
            f"'{file}' is damaged or holds more than tensors, so it was not loaded; save the model's state_dict alone.",
        ) from error
    except Exception as error:  # on bytes that are no weights torch and safetensors raise almost anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".rstrip(": .")
        raise DataError("weights-unreadable", f"'{file}' is not a readable weights file ({cause}).") from error
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and wrapper in state:
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(_is_weight(*item) for item in state.items()):
        raise DataError(
            "no-state-dict", f"'{file}' holds no state dict of tensors; save the model's state_dict and try again."
        )
    for name, value in state.items():
        if value.is_floating_point() and value.numel() and not value.float().abs().max() <= LARGEST_WEIGHT:
            raise DataError(
                "weights-not-finite",
                f"'{file}' is damaged, or its training diverged: '{name}' holds values that are not finite or "
                f"larger than {LARGEST_WEIGHT:g}; give other --weights.",
            )
    return {
        name.removeprefix("module."): value.float() if value.is_floating_point() else value
        for name, value in state.items()
    }


def _is_weight(name: Any, value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return isinstance(name, str) and plain and not value.is_quantized and not value.is_complex()


def load_state(backbone: nn.Module, state: StateDict, origin: str) -> None:
    """Load every tensor or none: heads are dropped, everything else must fit."""
    expected = backbone.state_dict()
    if isinstance(backbone, VisionTransformer):
        state = prepare_for_vit(backbone, state)
    if not fits(drop_heads(backbone, state), expected):
        with suppress(Exception):  # timm's converters take the shapes for granted; misfit_error names what differs
            state = sys.modules[type(backbone).__module__].checkpoint_filter_fn(state, backbone)
    state = drop_heads(backbone, state)
    if not fits(state, expected):
        raise misfit_error(backbone, state, origin)
    backbone.load_state_dict(state)


def fits(state: StateDict, expected: StateDict) -> bool:
    return state.keys() == expected.keys() and all(state[name].shape == expected[name].shape for name in expected)


def drop_heads(backbone: Any, state: StateDict) -> StateDict:
    """Without the classifier, which lies in the modules that timm names. Other layers in them are the backbone's, such
    as ConvNeXt's last norm."""
    classifier = getattr(backbone, "default_cfg", {}).get("classifier") or "head"
    names = (classifier,) if isinstance(classifier, str) else classifier
    heads = {name.split(".")[0] for name in names}
    expected = backbone.state_dict().keys()
    return {name: value for name, value in state.items() if name in expected or name.split(".")[0] not in heads}


def prepare_for_vit(vit: VisionTransformer, state: StateDict) -> StateDict:
    """Without heads and without the distillation token of a DeiT, which is recognised by its name. Positions for
    another patch grid are resized, bilinearly as the authors do it."""
    state = drop_heads(vit, state)
    positions = state.get("pos_embed")
    if state.pop("dist_token", None) is not None:
        state = {name: value for name, value in state.items() if not name.startswith("head")}
        if positions is not None:  # rows for class, distillation, patches: [1, 2 + patches, D]
            positions = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    if positions is not None:
        state["pos_embed"] = positions
        prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
        how: Any = {"num_prefix_tokens": prefix, "interpolation": "bilinear", "antialias": False}
        with suppress(Exception):  # not positions of a square grid: as above
            state["pos_embed"] = resample_abs_pos_embed(positions, list(vit.patch_embed.grid_size), **how)
    return state


def misfit_error(backbone: nn.Module, state: StateDict, origin: str) -> CdtransError:
    """Why weights without a head do not fit, and the backbone that they do fit. The sentence has the first tensor that
    is missing, unexpected or of another shape, and the error's `details` have all."""
    expected = backbone.state_dict()
    differences = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in sorted(expected.items())
            if name in state and state[name].shape != tensor.shape
        ],
    }
    kinds = {kind: names for kind, names in differences.items() if names}
    cause = "; ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in kinds.items())
    name = getattr(backbone, "default_cfg", {}).get("architecture") or type(backbone).__name__
    meant = next((other for other in likely_architectures(name) if other != name and is_of(other, state)), None)
    advice = f"did you mean --backbone {meant}?" if meant else "check --backbone and --weights."
    error = DataError("weights-misfit", f"{origin} does not fit '{name}', so nothing was loaded: {cause}; {advice}")
    error.details = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    return error


def likely_architectures(name: str) -> list[str]:
    """The model's own family in every size, the DeiTs and the ResNets."""
    siblings = [re.sub(rf"_({'|'.join(SIZES)})(?=_)", f"_{size}", name, count=1) for size in SIZES]
    return [*siblings, *(f"deit_{size}_patch16_224" for size in SIZES), *(f"resnet{depth}" for depth in DEPTHS)]


def is_of(architecture: str, state: StateDict) -> bool:
    """Whether a model has these tensors, apart from its head and its position embedding. It is built on the meta
    device, where it takes no memory."""
    if not timm.is_model(architecture):
        return False
    with torch.device("meta"):
        model: Any = timm.create_model(architecture, num_classes=0)
    ours, theirs = (
        {name: value.shape for name, value in tensors.items() if name != "pos_embed"}
        for tensors in (model.state_dict(), drop_heads(model, state))
    )
    return ours == theirs


def make_card(
    config: Resolved, classes: tuple[str, ...], *, stage: Literal["source", "adaptation"], epoch: int
) -> Card:
    mean, std = normalisation(config.backbone)
    same = ("backbone", "backbone_args", "neck", "resize", "crop", "precision", "method", "taps")
    return Card(
        classes=classes,
        weights=config.weights or (config.backbone if config.pretrained else FROM_SCRATCH),
        mean=mean,
        std=std,
        stage=stage,
        epoch=epoch,
        versions={p: version(p) for p in ("torch", "timm")},
        **{name: getattr(config, name) for name in same},
    )


def build_model(card: Card, *, drop_path: float = 0.0) -> Network:
    """The card's architecture with random weights."""
    backbone = create_backbone(card.backbone, crop=card.crop, drop_path=drop_path, args=card.backbone_args)
    head = build_head(card.head, feature_dim(backbone, card.taps), len(card.classes), card.neck)
    return Network(backbone, head, card.taps, Transferability(backbone) if card.transferability else None)


def load_model(folder: Path) -> tuple[Network, Card]:
    """A saved model in eval mode, on the CPU."""
    card, tensors = read_card(folder), read_weights(folder)
    try:
        model = build_model(card)
        model.load_state_dict(tensors)
    except Exception as error:  # a tensor too many or too few, or arguments that timm cannot use
        cause = " ".join(str(error).split())[:100]
        raise RunError(
            "run-damaged", f"The model in '{folder}' is damaged: its card and weights do not fit ({cause})."
        ) from error
    return model.eval(), card
