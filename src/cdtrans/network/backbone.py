"""Any timm model by name, and its weights: from the hub, from a file or folder, or none."""

import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import timm
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import PretrainedCfg, VisionTransformer
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.models._registry import _deprecated_models
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from cdtrans.backbone_names import SHORT_NAMES, expand_short
from cdtrans.config import require_weights
from cdtrans.errors import CdtransError, WeightsUnavailable
from cdtrans.network.blocks import why_no_shared_attention
from cdtrans.network.head import Head
from cdtrans.network.misfit import State, drop_heads, misfit_error
from cdtrans.network.network import Network, feature_dim

MAX_NATIVE_CROP = 256  # a backbone made for larger images is run at 224, where a block costs what the paper's costs
DEFAULT_CROP = 224
HUB_SECONDS = 10.0  # a hub that has not answered by then is out of reach
LARGEST_WEIGHT = 1e12  # no trained network comes near, and its square still is a float32
LARGEST_ARGUMENT = 10_000  # of whole numbers in backbone_args, such as blocks or channels
HUB, FOLDER = "hf-hub:", "local-dir:"
HUB_FILES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
NOT_IN_ARGS = {  # arguments of timm's create_model that are set elsewhere, and where
    "img_size": "give --crop instead",
    "in_chans": "images have three channels",
    "num_classes": "the classes are those of the source",
    "drop_path_rate": "give --drop-path instead",
    "pretrained": "give --pretrained or --no-pretrained instead",
    "checkpoint_path": "give --weights instead",
    "pretrained_cfg": "give another --backbone instead",
    "pretrained_cfg_overlay": "give another --backbone instead",
    "features_only": "a backbone must give one feature vector",
}


class Recipe(NamedTuple):
    """How timm builds a backbone."""

    architecture: str  # timm's name, with the tag if there is one
    cfg: PretrainedCfg
    args: dict[str, Any]  # that a hub repository or a folder adds


def resolve_name(name: str) -> str:
    """The exact name of a backbone: architecture and tag, or where it lies ('hf-hub:...', 'local-dir:...'). Takes short
    names ('deit_small', 'ViT-B/16') and names without a tag, for which timm has a default."""
    name = expand_short(name)
    name = name.replace("hf_hub:", HUB, 1) if name.startswith("hf_hub:") else name
    if name.startswith(FOLDER):
        return name
    if name.startswith(HUB):
        in_timm = name.removeprefix(f"{HUB}timm/")
        return in_timm if in_timm in _exact_names(in_timm.split(".")[0]) else name
    name = _deprecated_models.get(name) or name
    architecture, _, tag = name.partition(".")
    if ":" in name or not timm.is_model(architecture) or _deprecated_models.get(name, "") is None:
        raise CdtransError(f"timm has no model '{name}'; {_suggestion(name)}")
    exact = _exact_names(architecture)
    if tag and name not in exact:
        close = get_close_matches(name, exact, n=1, cutoff=0.0) or [architecture]
        raise CdtransError(f"timm has no weights '{name}'; did you mean '{close[0]}'? (known: {', '.join(exact)})")
    return name if tag else exact[0]


def native_crop(name: str) -> int:
    """The image size a backbone was trained at, or 224 where that is too large to train with and the backbone can be
    run at 224."""
    size = int(_recipe(name).cfg.input_size[-1])
    if size <= MAX_NATIVE_CROP:
        return size
    with suppress(CdtransError), torch.device("meta"):
        create_backbone(name, crop=DEFAULT_CROP, drop_path=0.0, args={})
        return DEFAULT_CROP
    return size


def normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels, as the backbone's weights expect them."""
    cfg = _recipe(name).cfg
    return tuple(cfg.mean), tuple(cfg.std)


def licence(name: str) -> str | None:
    """The licence of the pretrained weights, if timm knows it."""
    return _recipe(name).cfg.license


def plain_name(name: str) -> str:
    """The sibling without a distillation token."""
    return name.replace("_distilled", "")


def timm_call(name: str, *, crop: int, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and arguments with which timm.create_model builds this backbone. Only models whose input size is fixed
    take `img_size`. A distilled DeiT gives its plain sibling: the authors drop the distillation token."""
    recipe = _recipe(name)
    size = {"img_size": crop} if recipe.cfg.fixed_input_size else {}
    return plain_name(recipe.architecture), {**recipe.args, **size, **args}


def create_backbone(name: str, *, crop: int, drop_path: float, args: dict[str, Any]) -> nn.Module:
    """The architecture with random weights, which gives one feature vector. Models without stochastic depth are built
    without it."""
    for argument in args:
        if argument in NOT_IN_ARGS:
            raise CdtransError(f"'{argument}' cannot be in backbone_args: {NOT_IN_ARGS[argument]}.")
        if _largest(args[argument]) > LARGEST_ARGUMENT:
            raise CdtransError(f"'{argument}' in backbone_args must be at most {LARGEST_ARGUMENT}.")
    architecture, kwargs = timm_call(name, crop=crop, args=args)
    if "global_pool" in kwargs and not kwargs["global_pool"]:
        raise CdtransError("'global_pool' in backbone_args must name a pooling, because a backbone gives one vector.")
    kwargs |= {"drop_path_rate": drop_path, "num_classes": 0}
    try:
        backbone = _build(architecture, kwargs)
    except Exception as error:  # timm raises almost anything for arguments and sizes that do not fit a model
        cause = " ".join(str(error).split())[:150]
        raise CdtransError(
            f"timm cannot build the backbone '{name}' with {kwargs}: {cause}; check --crop and backbone_args."
        ) from error
    _check_size(backbone, name, crop)
    if why_no_shared_attention(backbone):  # otherwise `blocks` runs it and knows what comes out
        _check_output(backbone, name, crop, (architecture, kwargs))
    return backbone


def _largest(value: Any) -> int:
    """The largest whole number in an argument such as 4 or [2, 2, 6, 2]: timm would build as many blocks."""
    if isinstance(value, dict | list | tuple):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _build(architecture: str, kwargs: dict[str, Any]) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(architecture, pretrained=False, **kwargs)
    except TypeError:  # an argument that this model does not have: stochastic depth is the one we add ourselves
        without = {key: value for key, value in kwargs.items() if key != "drop_path_rate"}
        with suppress(Exception):
            return timm.create_model(architecture, pretrained=False, **without)  # type: ignore[no-any-return]
        raise
    return model


def _check_size(backbone: Any, name: str, crop: int) -> None:
    embed = getattr(backbone, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    patch = patch if isinstance(patch, (tuple, list)) else (patch,)
    if not all(isinstance(side, int) for side in patch):
        return
    if crop < max(patch):
        raise CdtransError(f"--crop {crop} is smaller than a patch of '{name}', which is {max(patch)} pixels wide.")
    any_size = getattr(embed, "strict_img_size", True) is False and not getattr(embed, "dynamic_img_pad", False)
    if any_size and crop % max(patch):
        raise CdtransError(
            f"--crop {crop} cannot be divided into patches of {max(patch)} pixels, which 'dynamic_img_size' in "
            "backbone_args needs; give another --crop, or add 'dynamic_img_pad'."
        )


def _check_output(backbone: Any, name: str, crop: int, call: tuple[str, dict[str, Any]]) -> None:
    """Refuse a model that does not give one feature vector for an image of this size. A copy on the meta device tells,
    where a model of any size takes no memory or time; some models cannot be run there."""
    shape, on_meta = None, next(backbone.parameters()).is_meta
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        shape = (backbone if on_meta else _build(*call)).eval()(torch.zeros(2, 3, crop, crop)).shape
    if shape is None and on_meta:
        return
    try:
        if shape is None:
            with torch.no_grad():
                shape = backbone.eval()(torch.zeros(2, 3, crop, crop)).shape
            backbone.train()
    except Exception as error:  # almost anything, from somewhere within the model
        cause = " ".join(str(error).split())[:150]
        raise CdtransError(f"The backbone '{name}' cannot be run with --crop {crop}: {cause}.") from error
    if len(shape) != 2 or shape[1] == 0:
        raise CdtransError(f"The backbone '{name}' does not give one feature vector per image; use another one.")
    if shape[1] != feature_dim(backbone):  # timm states another length, as for SAM, or for a pooling of two parts
        backbone.head_hidden_size = int(shape[1])


def load_pretrained(backbone: nn.Module, name: str) -> None:
    """timm's pretrained weights for this name and tag, through the Hugging Face hub, or those in a folder."""
    cfg = _recipe(name).cfg
    if not cfg.has_weights:
        raise CdtransError(f"timm has no pretrained weights for '{name}'; give --weights FILE, or --no-pretrained.")
    try:
        if cfg.hf_hub_id and not name.startswith(FOLDER):
            files = (cfg.hf_hub_filename,) if cfg.hf_hub_filename else HUB_FILES
            _ask_hub(cfg.hf_hub_id, files)
        reference = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the hub client raises without a network; all of it means the same to the user
        raise _unavailable(name, error) from error
    load_state(backbone, reference.state_dict(), f"the weights of '{name}'")


def _ask_hub(repository: str, files: tuple[str, ...]) -> None:
    """Raise quickly if none of the files is cached and the hub cannot be reached: a download would retry for a
    minute."""
    repository, _, revision = repository.partition("@")
    if not any(isinstance(try_to_load_from_cache(repository, f, revision=revision or None), str) for f in files):
        HfApi().model_info(repository, timeout=HUB_SECONDS)


def _unavailable(name: str, error: Exception) -> CdtransError:
    if name.startswith(FOLDER):
        return CdtransError(
            f"'{name.removeprefix(FOLDER)}' holds no timm model ({type(error).__name__}); a folder needs config.json "
            "and model.safetensors, as timm's save_for_hf writes them."
        )
    return WeightsUnavailable(
        f"The weights of '{name}' could not be downloaded ({type(error).__name__})",
        "connect to the network, or give a downloaded file with --weights FILE, or train from scratch with "
        "--no-pretrained.",
    )


def load_weights(backbone: nn.Module, file: Path) -> None:
    """Weights from a .safetensors or .pth file in timm's or the model authors' format."""
    load_state(backbone, read_state(file), f"'{file}'")


def load_classifier(network: Network, file: Path) -> None:
    """The weights of a whole timm classifier, into a network with a plain linear head."""
    backbone, head = network.backbone, network.head
    assert isinstance(head, Head), "a plain one"
    load_weights(backbone, file)
    state, layer = read_state(file), getattr(backbone, "default_cfg", {}).get("classifier")
    weight, bias = (state.get(f"{layer}.{name}") if isinstance(layer, str) else None for name in ("weight", "bias"))
    if weight is None or bias is None:
        raise CdtransError(
            f"'{file}' holds no classifier ('{layer}' in timm's model of this --backbone); give the weights of a whole "
            "classifier with one linear layer at its end."
        )
    if weight.numel() != head.classifier.weight.numel():
        raise CdtransError(
            f"The classifier in '{file}' has {len(weight)} classes of {weight[0].numel()} features, not "
            f"{len(head.classifier.weight)} of {head.classifier.in_features}; check --source-classes and --backbone."
        )
    with torch.no_grad():
        head.classifier.weight.copy_(weight.view_as(head.classifier.weight))  # a convolution in some models
        head.classifier.bias.copy_(bias)


def read_state(file: Path) -> State:
    """The tensors of a weights file, unwrapped from 'model' or 'state_dict' and freed of DataParallel's prefix."""
    require_weights(file)
    try:
        safe = file.suffix == ".safetensors"
        state: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CdtransError(
            f"'{file}' is damaged or holds more than tensors, so it was not loaded; save the model's state_dict alone."
        ) from error
    except Exception as error:  # on bytes that are no weights torch and safetensors raise almost anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".rstrip(": .")
        raise CdtransError(f"'{file}' is not a readable weights file ({cause}).") from error
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and wrapper in state:
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(_is_weight(*item) for item in state.items()):
        raise CdtransError(f"'{file}' holds no state dict of tensors; save the model's state_dict and try again.")
    for key, value in state.items():
        if value.is_floating_point() and value.numel() and not value.float().abs().max() <= LARGEST_WEIGHT:
            raise CdtransError(
                f"'{file}' is damaged, or its training diverged: '{key}' holds values that are not finite or "
                f"larger than {LARGEST_WEIGHT:g}; give other --weights."
            )
    return {
        key.removeprefix("module."): value.float() if value.is_floating_point() else value
        for key, value in state.items()
    }


def _is_weight(key: Any, value: Any) -> bool:
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return isinstance(key, str) and plain and not value.is_quantized and not value.is_complex()


def load_state(backbone: nn.Module, state: State, origin: str) -> None:
    """Load every tensor or none: heads are dropped, everything else must fit."""
    expected = backbone.state_dict()
    if isinstance(backbone, VisionTransformer):
        state = convert_for_vit(backbone, state)
    elif not fits(drop_heads(backbone, state), expected):
        with suppress(Exception):  # timm's converters take the shapes for granted; misfit_error names those that differ
            state = sys.modules[type(backbone).__module__].checkpoint_filter_fn(state, backbone)
    state = drop_heads(backbone, state)
    if not fits(state, expected):
        raise misfit_error(backbone, state, origin)
    backbone.load_state_dict(state)


def fits(state: State, expected: State) -> bool:
    return state.keys() == expected.keys() and all(state[key].shape == expected[key].shape for key in expected)


def convert_for_vit(vit: VisionTransformer, state: State) -> State:
    state = drop_heads(vit, drop_distillation(state))
    if "pos_embed" in state:
        state["pos_embed"] = resize_positions(state["pos_embed"], vit)
    with suppress(Exception):  # as above
        state = checkpoint_filter_fn(state, vit)
    return state


def drop_distillation(state: State) -> State:
    """A distilled DeiT's tensors without its distillation token, recognised by its keys."""
    if "dist_token" not in state:
        return state
    state = {key: value for key, value in state.items() if key != "dist_token" and not key.startswith("head")}
    if "pos_embed" in state:
        positions = state["pos_embed"]  # [1, 2 + patches, D]: class, distillation, patches
        state["pos_embed"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    return state


def resize_positions(positions: Tensor, vit: VisionTransformer) -> Tensor:
    """Position embedding for another patch grid, bilinear as the authors do it; the same grid is left alone."""
    if vit.pos_embed is None or positions.shape == vit.pos_embed.shape or positions.ndim != 3:
        return positions
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    patches = positions.shape[1] - prefix
    if positions.shape[2] != vit.pos_embed.shape[2] or patches < 1 or not (patches**0.5).is_integer():
        return positions  # another grid is not the cause: misfit_error names the shapes
    return resample_abs_pos_embed(  # type: ignore[no-any-return]
        positions, list(vit.patch_embed.grid_size), num_prefix_tokens=prefix, interpolation="bilinear", antialias=False
    )


def _recipe(name: str) -> Recipe:
    name = resolve_name(name)
    if not name.startswith((HUB, FOLDER)):
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None, "every model that timm knows has one"
        return Recipe(name, cfg, {})
    try:
        if name.startswith(FOLDER):
            values, architecture, args = load_model_config_from_path(name.removeprefix(FOLDER))
        else:
            _ask_hub(name.removeprefix(HUB), ("config.json",))
            values, architecture, args = load_model_config_from_hf(name.removeprefix(HUB))
        ours = timm.get_pretrained_cfg(architecture)
        fixed = ours.fixed_input_size if ours else False  # older repositories do not say it
        cfg = PretrainedCfg(**{"fixed_input_size": fixed, **values})
    except Exception as error:  # the hub client's, or a config.json that is not timm's
        if name.startswith(FOLDER):
            raise _unavailable(name, error) from error
        raise CdtransError(
            f"The description (config.json) of '{name}' could not be read from the hub ({type(error).__name__}); "
            "connect to the network, or use the name of a timm model."
        ) from error
    return Recipe(architecture, cfg, args or {})


def _exact_names(architecture: str) -> list[str]:
    """The architecture with each tag that timm has for it, its default first; none for an unknown one."""
    default = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if default is None:
        return []
    first = f"{architecture}.{default.tag}" if default.tag else architecture
    return [first, *(name for name in timm.list_models(f"{architecture}.*", include_tags=True) if name != first)]


def _suggestion(name: str) -> str:
    known = [*SHORT_NAMES, *timm.list_models()]
    close = get_close_matches(name.split(".")[0].lower(), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "use a timm model such as deit_small, dinov2_small, clip_base or resnet50."
