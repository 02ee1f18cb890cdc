"""Weights that do not fit a backbone: one sentence that says why, and the backbone that they do fit."""

import re
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn

from cdtrans.backbone_names import SHORT_NAMES
from cdtrans.errors import CdtransError

SIZES = ("tiny", "small", "medium", "base", "large", "huge", "giant")
State = dict[str, Tensor]


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
    close = next(fitting(name, state), None)
    advice = f"did you mean --backbone {close}?" if close else "check --backbone and --weights."
    error = CdtransError(f"{origin} does not fit '{name}', so nothing was loaded: {cause}; {advice}")
    shapes = [f"{key} {tuple(state[key].shape)}, expected {tuple(expected[key].shape)}" for key in misshapen]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    error.details = "\n".join(f"{kind}: {', '.join(keys)}" for kind, keys in kinds if keys)
    return error


def width_or_depth(state: State, expected: State) -> str:
    """Of vision transformers."""
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


def fitting(name: str, state: State) -> Iterator[str]:
    """Architectures that the weights fit: the model's own in another size, then those with a short name. They are built
    on the meta device, where they take no memory."""
    own = (re.sub(rf"_({'|'.join(SIZES)})(?=_|$)", f"_{size}", name) for size in SIZES)
    others = (exact.split(".")[0].replace("_distilled", "") for exact in SHORT_NAMES.values())
    common = ("resnet18", "resnet34", "resnet50", "resnet101", "convnext_tiny", "convnext_small", "convnext_base")
    for candidate in dict.fromkeys((*own, *others, *common)):
        if candidate != name and timm.is_model(candidate) and is_of(candidate, state):
            yield candidate


def is_of(architecture: str, state: State) -> bool:
    """Whether a model has these tensors, apart from its head and its position embedding."""
    with torch.device("meta"):
        model: Any = timm.create_model(architecture, num_classes=0)
    expected = {key: value.shape for key, value in model.state_dict().items() if key != "pos_embed"}
    return expected == {key: value.shape for key, value in state.items() if key != "pos_embed"}
