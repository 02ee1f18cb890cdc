"""Backbones: any timm model by name."""

import copy
from contextlib import suppress
from typing import Any

import timm
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from timm.models import PretrainedCfg
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.models._registry import _deprecated_models
from torch import nn

from cdtrans.errors import CdtransError, DataError, DeviceError, SettingsError, WeightsUnavailable, closest
from cdtrans.network import HUB_TIMEOUT, SET_ELSEWHERE, SHORT_NAMES
from cdtrans.network.blocks import why_no_shared_attention
from cdtrans.network.network import feature_dim
from cdtrans.record.model import Channels

MAX_NATIVE_CROP = 256  # a backbone made for larger images is run at 224, where a block costs what the paper's costs
DEFAULT_CROP = 224
LARGEST_ARGUMENT = 10_000  # limit of whole numbers in backbone_args, such as blocks or channels
HUB, FOLDER = "hf-hub:", "local-dir:"
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def resolve_name(name: str) -> str:
    """The exact name of a backbone: architecture and tag, or where it lies ('hf-hub:...', 'local-dir:...'). Takes short
    names in any spelling ('DeiT-small', 'ViT-B/16') and names without a tag, for which timm has a default."""
    name = SHORT_NAMES.get(name.strip().lower().replace("-", "_").replace("/", "_"), name.strip())
    name = name.replace("hf_hub:", HUB, 1) if name.startswith("hf_hub:") else name
    if name.startswith(FOLDER):
        return name
    if name.startswith(HUB):
        in_timm = name.removeprefix(f"{HUB}timm/")
        return in_timm if in_timm in _exact_names(in_timm.split(".")[0]) else name
    name = _deprecated_models.get(name) or name
    architecture, _, tag = name.partition(".")
    if ":" in name or not timm.is_model(architecture) or _deprecated_models.get(name, "") is None:
        close = closest(architecture, [*SHORT_NAMES, *timm.list_models()])
        hint = f"did you mean '{close}'?" if close else "use one such as deit_small, dinov2_small or resnet50."
        raise SettingsError("backbone-unknown", f"timm has no model '{name}'; {hint}")
    exact = _exact_names(architecture)
    if tag and name not in exact:
        raise SettingsError(
            "backbone-tag-unknown",
            f"timm has no weights '{name}' (known: {', '.join(exact)}); "
            f"did you mean '{closest(name, exact) or architecture}'?",
        )
    return name if tag else exact[0]


def _exact_names(architecture: str) -> list[str]:
    """The architecture with each tag that timm has for it, its default first; none for an unknown one."""
    default = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if default is None:
        return []
    first = f"{architecture}.{default.tag}" if default.tag else architecture
    return [first, *(name for name in timm.list_models(f"{architecture}.*", include_tags=True) if name != first)]


def native_crop(name: str) -> int:
    """The image size a backbone was trained at, or 224 where that is too large to train with and the backbone can be
    run at 224."""
    size = int(config_of(name).input_size[-1])
    if size <= MAX_NATIVE_CROP:
        return size
    with suppress(CdtransError), torch.device("meta"):
        create_backbone(name, crop=DEFAULT_CROP, drop_path=0.0, args={})
        return DEFAULT_CROP
    return size


def normalisation(name: str) -> tuple[Channels, Channels]:
    """Mean and standard deviation of the pixels, as the backbone's weights expect them."""
    cfg = config_of(name)
    (r, g, b), (dr, dg, db) = cfg.mean, cfg.std
    return (r, g, b), (dr, dg, db)


def config_of(name: str) -> PretrainedCfg:
    """timm's description of a backbone and its weights."""
    return _recipe(name)[1]


def timm_call(name: str, *, crop: int, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and arguments with which timm.create_model builds this backbone. Only models whose input size is fixed
    take `img_size`. A distilled DeiT gives its plain sibling: the authors drop the distillation token."""
    architecture, cfg, additions = _recipe(name)
    size = {"img_size": crop} if cfg.fixed_input_size else {}
    return architecture.replace("_distilled", ""), {**additions, **size, **args}


def _recipe(name: str) -> tuple[str, PretrainedCfg, dict[str, Any]]:
    """How timm builds a backbone: its architecture, with the tag if there is one, its description, and the arguments
    that a hub repository or a folder adds."""
    name = resolve_name(name)
    if not name.startswith((HUB, FOLDER)):
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None, "every model that timm knows has one"
        return name, cfg, {}
    try:
        if name.startswith(FOLDER):
            values, architecture, args = load_model_config_from_path(name.removeprefix(FOLDER))
        else:
            ask_hub(name.removeprefix(HUB), ("config.json",))
            values, architecture, args = load_model_config_from_hf(name.removeprefix(HUB))
        ours = timm.get_pretrained_cfg(architecture)
        fixed = ours.fixed_input_size if ours else False  # absent in some repositories
        cfg = PretrainedCfg(**{"fixed_input_size": fixed, **values})
    except Exception as error:  # the hub client's, or a config.json that is not timm's
        if name.startswith(FOLDER):
            raise unavailable(name, error) from error
        raise DeviceError(
            "hub-unreachable",
            f"The description (config.json) of '{name}' could not be read from the hub ({type(error).__name__}); "
            "connect to the network, or use the name of a timm model.",
        ) from error
    return architecture, cfg, args or {}


def ask_hub(repository: str, files: tuple[str, ...]) -> None:
    """Raise quickly if none of the files is cached and the hub cannot be reached: a download would retry for a
    minute."""
    repository, _, revision = repository.partition("@")
    if not any(isinstance(try_to_load_from_cache(repository, f, revision=revision or None), str) for f in files):
        HfApi().model_info(repository, timeout=HUB_TIMEOUT)


def unavailable(name: str, error: Exception) -> CdtransError:
    """The error for weights that timm or the hub client could not fetch."""
    if name.startswith(FOLDER):
        return DataError(
            "no-timm-folder",
            f"'{name.removeprefix(FOLDER)}' holds no timm model ({type(error).__name__}); a folder needs config.json "
            "and model.safetensors, as timm's save_for_hf writes them.",
        )
    return WeightsUnavailable(
        f"The weights of '{name}' could not be downloaded ({type(error).__name__})",
        "connect to the network, or give a downloaded file with --weights FILE, or train from scratch with "
        "--no-pretrained.",
    )


def create_backbone(name: str, *, crop: int, drop_path: float, args: dict[str, Any]) -> nn.Module:
    """The architecture with random weights, which gives one feature vector. Models without stochastic depth are built
    without it."""
    for argument in args:
        if argument in SET_ELSEWHERE:
            raise _unusable(f"'{argument}' cannot be in backbone_args: {SET_ELSEWHERE[argument]}.")
        if _largest(args[argument]) > LARGEST_ARGUMENT:
            raise _unusable(f"'{argument}' in backbone_args must be at most {LARGEST_ARGUMENT}.")
    architecture, kwargs = timm_call(name, crop=crop, args=args)
    if "global_pool" in kwargs and not kwargs["global_pool"]:
        raise _unusable("'global_pool' in backbone_args must name a pooling, because a backbone gives one vector.")
    kwargs |= {"num_classes": 0, "pretrained": False}
    try:
        try:
            backbone = timm.create_model(architecture, drop_path_rate=drop_path, **kwargs)
        except TypeError:  # an argument that this model does not have: stochastic depth is the one we add ourselves
            backbone = timm.create_model(architecture, **kwargs)
    except Exception as error:  # timm raises almost anything for arguments and sizes that do not fit a model
        raise _failure(f"timm cannot build the backbone '{name}' with {kwargs}", error) from error
    _check_size(backbone, name, crop)
    if why_no_shared_attention(backbone):  # otherwise `blocks` runs it and knows what comes out
        _check_output(backbone, name, crop)
    return backbone  # type: ignore[no-any-return]


def _unusable(sentence: str) -> SettingsError:
    return SettingsError("backbone-args", sentence)


def _failure(sentence: str, error: Exception) -> SettingsError:
    cause = " ".join(str(error).split())[:150]
    return SettingsError("backbone-fails", f"{sentence}: {cause}; check --crop and backbone_args.")


def _largest(value: Any) -> int:
    """The largest whole number in an argument such as 4 or [2, 2, 6, 2]: timm would build as many blocks."""
    if isinstance(value, dict | list | tuple):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _check_size(backbone: Any, name: str, crop: int) -> None:
    embed = getattr(backbone, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    patch = patch if isinstance(patch, (tuple, list)) else (patch,)
    if not all(isinstance(side, int) for side in patch):
        return
    if crop < max(patch):
        raise SettingsError(
            "crop-misfit", f"--crop {crop} is smaller than a patch of '{name}', which is {max(patch)} pixels wide."
        )
    any_size = getattr(embed, "strict_img_size", True) is False and not getattr(embed, "dynamic_img_pad", False)
    if any_size and crop % max(patch):
        raise SettingsError(
            "crop-misfit",
            f"--crop {crop} cannot be divided into patches of {max(patch)} pixels, which 'dynamic_img_size' in "
            "backbone_args needs; give another --crop, or add 'dynamic_img_pad'.",
        )


def _check_output(backbone: Any, name: str, crop: int) -> None:
    """Refuse a model that does not give one feature vector for an image of this size. A copy on the meta device tells,
    where a model of any size takes no memory or time; some models cannot be run there."""

    @torch.no_grad()
    def shape_of(model: Any) -> torch.Size:
        return model.eval()(torch.zeros(2, 3, crop, crop)).shape  # type: ignore[no-any-return]

    shape, tensors = None, (*backbone.parameters(), *backbone.buffers())
    with suppress(Exception), torch.device("meta"):
        shape = shape_of(copy.deepcopy(backbone, {id(x): x.detach().to("meta") for x in tensors}))
    if shape is None and next(backbone.parameters()).is_meta:
        return
    try:
        shape = shape or shape_of(backbone)
        backbone.train()
    except Exception as error:  # almost anything, from somewhere within the model
        raise _failure(f"The backbone '{name}' cannot be run with --crop {crop}", error) from error
    if len(shape) != 2 or shape[1] == 0:
        raise SettingsError(
            "backbone-output", f"The backbone '{name}' does not give one feature vector per image; use another one."
        )
    if shape[1] != feature_dim(backbone):  # timm states another length, as for SAM, or for a pooling of two parts
        backbone.head_hidden_size = int(shape[1])
