"""Weights that do not fit a backbone: one sentence that says why, and the backbone that they do fit."""

import re
from typing import Any

import timm
import torch
from torch import Tensor, nn

from cdtrans.errors import CdtransError

WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}  # of vision transformers
RESNETS = {8: "resnet18", 16: "resnet50", 33: "resnet101", 50: "resnet152"}  # by their number of blocks
State = dict[str, Tensor]


def drop_heads(backbone: Any, state: State) -> State:
    """Without the classifier, which lies in the modules that timm names. Other layers in them are the backbone's, such
    as ConvNeXt's last norm."""
    classifier = getattr(backbone, "default_cfg", {}).get("classifier") or "head"
    names = (classifier,) if isinstance(classifier, str) else classifier
    heads = {name.split(".")[0] for name in names}
    expected = backbone.state_dict().keys()
    return {key: value for key, value in state.items() if key in expected or key.split(".")[0] not in heads}


def misfit_error(backbone: nn.Module, state: State, origin: str) -> CdtransError:
    """`state` has been converted and freed of its head as far as that goes. The error's `details` list every tensor
    that is missing, unexpected or of another shape."""
    expected = backbone.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    shared = sorted(expected.keys() & state.keys())
    misshapen = [key for key in shared if state[key].shape != expected[key].shape]
    name = getattr(backbone, "default_cfg", {}).get("architecture") or type(backbone).__name__
    cause = width_or_depth(state, expected)
    if not cause and len(shared) < len(expected) / 2:
        cause = "it is of another architecture"
    if not cause:
        cause = first_tensors(missing, unexpected, misshapen, state, expected)
    meant = likely_architecture(name, state)
    advice = f"did you mean --backbone {meant}?" if meant and is_of(meant, state) else "check --backbone and --weights."
    error = CdtransError(f"{origin} does not fit '{name}', so nothing was loaded: {cause}; {advice}")
    shapes = [f"{key} {tuple(state[key].shape)}, expected {tuple(expected[key].shape)}" for key in misshapen]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    error.details = "\n".join(f"{kind}: {', '.join(keys)}" for kind, keys in kinds if keys)
    return error


def width_or_depth(state: State, expected: State) -> str:
    """How the width or depth of a vision transformer differs."""
    widths = [s["patch_embed.proj.weight"].shape[0] for s in (state, expected) if "patch_embed.proj.weight" in s]
    if len(widths) == 2 and widths[0] != widths[1]:
        return f"its width is {widths[0]}, the model's is {widths[1]}"
    depths = [len({key.split(".")[1] for key in s if key.startswith("blocks.")}) for s in (state, expected)]
    if all(depths) and depths[0] != depths[1]:
        return f"it has {depths[0]} blocks, the model has {depths[1]}"
    return ""


def first_tensors(
    missing: list[str], unexpected: list[str], misshapen: list[str], state: State, expected: State
) -> str:
    causes = []
    if missing:
        causes.append(f"it lacks '{missing[0]}'{more(missing)}")
    if unexpected:
        causes.append(f"it has '{unexpected[0]}'{more(unexpected)}, unlike the model")
    if misshapen:
        key = misshapen[0]
        shapes = f"{tuple(state[key].shape)}, not {tuple(expected[key].shape)}"
        causes.append(f"its '{key}' is {shapes}{more(misshapen)}")
    return ", ".join(causes)


def more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def likely_architecture(name: str, state: State) -> str:
    """By the file's width, the model's own family in another size, or a DeiT; a ResNet by its number of blocks."""
    if "layer1.0.conv1.weight" in state:
        blocks = {key.rsplit(".conv1.", 1)[0] for key in state if key.endswith(".conv1.weight")}
        return RESNETS.get(len(blocks), "")
    width = state["patch_embed.proj.weight"].shape[0] if "patch_embed.proj.weight" in state else 0
    if width not in WIDTHS:
        return ""
    sibling, same_family = re.subn(r"_(tiny|small|base|large|huge)(?=_)", f"_{WIDTHS[width]}", name, count=1)
    return sibling if same_family else f"deit_{WIDTHS[width]}_patch16_224"


def is_of(architecture: str, state: State) -> bool:
    """Whether a model has these tensors, apart from its head and its position embedding. It is built on the meta
    device, where it takes no memory."""
    if not timm.is_model(architecture):
        return False
    with torch.device("meta"):
        model: Any = timm.create_model(architecture, num_classes=0)
    shapes = [
        {key: value.shape for key, value in tensors.items() if key != "pos_embed"}
        for tensors in (model.state_dict(), drop_heads(model, state))
    ]
    return shapes[0] == shapes[1]
