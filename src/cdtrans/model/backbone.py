"""Any timm VisionTransformer by name, and its weights: from the hub, from a file, or none."""

from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors.torch import load_file
from timm.layers.attention import Attention
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import PretrainedCfg, VisionTransformer
from timm.models.vision_transformer import Block, checkpoint_filter_fn
from torch import Tensor

from cdtrans.config import require_weights
from cdtrans.errors import CdtransError

EXAMPLES = (
    "deit_small_distilled_patch16_224.fb_in1k, deit3_small_patch16_224.fb_in22k_ft_in1k, "
    "vit_small_patch16_224.augreg_in21k_ft_in1k, vit_small_patch14_reg4_dinov2.lvd142m"
)
MAX_NATIVE_CROP = 256  # a backbone made for larger images is run at 224, where a block costs what the paper's costs
DEFAULT_CROP = 224
VIT_MODULES = ("timm.models.vision_transformer", "timm.models.deit")
HUB_SECONDS = 10.0  # a hub that has not answered by then is out of reach

State = dict[str, Tensor]


def native_crop(name: str) -> int:
    """The image size a backbone was trained at, or 224 where that is too large to train with."""
    size = int(_pretrained_cfg(name).input_size[-1])
    return size if size <= MAX_NATIVE_CROP else DEFAULT_CROP


def normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels, as the backbone's weights expect them."""
    cfg = _pretrained_cfg(name)
    return tuple(cfg.mean), tuple(cfg.std)


def plain_name(name: str) -> str:
    """The sibling without a distillation token."""
    return name.replace("_distilled", "")


def create_backbone(name: str, *, crop: int, drop_path: float, args: dict[str, Any]) -> VisionTransformer:
    """The architecture with random weights. A distilled DeiT gives its plain sibling: the authors drop the
    distillation token (docs/method.md, section 1.1)."""
    plain = plain_name(_known(name))
    other = CdtransError(f"The backbone '{name}' is not a timm VisionTransformer; use one such as {EXAMPLES}.")
    if not _may_be_vision_transformer(plain):
        raise other
    kwargs: dict[str, Any] = {"img_size": crop, "drop_path_rate": drop_path, "num_classes": 0, **args}
    try:
        vit: Any = timm.create_model(plain, pretrained=False, **kwargs)
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise CdtransError(
            f"timm cannot build the backbone '{name}' with {kwargs}: {error}; check --crop and backbone_args."
        ) from error
    if type(vit) is not VisionTransformer:
        raise other
    plain_blocks = all(
        type(b) is Block and type(b.attn) is Attention and getattr(b.attn, "gate", None) is None for b in vit.blocks
    )
    if not plain_blocks:
        raise CdtransError(
            f"The blocks of the backbone '{name}' are not timm's plain pre-norm Block, so its attention "
            f"cannot be shared between two images; use one such as {EXAMPLES}."
        )
    return vit  # type: ignore[no-any-return]


def load_pretrained(vit: VisionTransformer, name: str) -> None:
    """timm's pretrained weights for this name and tag, through the Hugging Face hub."""
    repository = _pretrained_cfg(name).hf_hub_id
    if not repository:
        raise CdtransError(f"timm has no pretrained weights for '{name}'; give --weights FILE, or --no-pretrained.")
    try:
        if not isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
            HfApi().model_info(repository, timeout=HUB_SECONDS)  # the download itself would retry for a minute
        reference = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the hub client raises without a network; all of it means the same to the user
        raise CdtransError(
            f"The weights of '{name}' could not be downloaded ({type(error).__name__}); connect to the network, "
            "or give a downloaded file with --weights FILE, or train from scratch with --no-pretrained."
        ) from error
    load_state(vit, reference.state_dict(), f"the weights of '{name}'")


def load_weights(vit: VisionTransformer, file: Path) -> None:
    """Weights from a .safetensors or .pth file in timm's or DeiT's format."""
    load_state(vit, read_state(file), f"'{file}'")


def read_state(file: Path) -> State:
    """The tensors of a weights file, unwrapped from 'model' or 'state_dict' and freed of DataParallel's prefix."""
    require_weights(file)
    try:
        safe = file.suffix == ".safetensors"
        state: Any = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CdtransError(
            f"'{file}' is damaged or holds more than tensors, and is not opened; save the model's state_dict alone."
        ) from error
    except Exception as error:  # on bytes that are no weights torch and safetensors raise almost anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}".rstrip(": .")
        raise CdtransError(f"'{file}' is not a readable weights file ({cause}).") from error
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and wrapper in state:
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise CdtransError(f"'{file}' holds no state dict of tensors; save the model's state_dict and try again.")
    return {key.removeprefix("module."): value.float() for key, value in state.items()}


def load_state(vit: VisionTransformer, state: State, origin: str) -> None:
    """Load every tensor or none: heads are dropped, everything else must fit."""
    state = drop_distillation(state)
    state = {key: value for key, value in state.items() if not key.startswith("head.")}
    if "pos_embed" in state:
        state["pos_embed"] = resize_positions(state["pos_embed"], vit)
    with suppress(Exception):  # timm's converters take the shapes for granted; those that differ are named below
        state = checkpoint_filter_fn(state, vit)
    state = {key: value for key, value in state.items() if not key.startswith("head.")}
    expected = vit.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    wrong = sorted(
        f"{key} {tuple(state[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in expected.keys() & state.keys()
        if state[key].shape != expected[key].shape
    )
    if missing or unexpected or wrong:
        kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        found = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in kinds if keys)
        raise CdtransError(f"{origin} does not fit the backbone and nothing was loaded ({found}); check --backbone.")
    vit.load_state_dict(state)


def drop_distillation(state: State) -> State:
    """A distilled DeiT's tensors without the distillation token, known by its key (docs/method.md, section 1.5)."""
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
        return positions  # not a matter of the grid: load_state names the shapes
    return resample_abs_pos_embed(  # type: ignore[no-any-return]
        positions, list(vit.patch_embed.grid_size), num_prefix_tokens=prefix, interpolation="bilinear", antialias=False
    )


def _pretrained_cfg(name: str) -> PretrainedCfg:
    cfg = timm.get_pretrained_cfg(_known(name))
    assert cfg is not None, "every known model has one"
    return cfg


def _known(name: str) -> str:
    if not timm.is_model(name):
        raise CdtransError(f"timm knows no model '{name}'; use a VisionTransformer such as {EXAMPLES}.")
    arch = name.split(".")[0]
    tags = [m for m in timm.list_pretrained(f"{arch}*") if m.split(".")[0] == arch]
    if "." in name and name not in tags:
        raise CdtransError(f"timm knows no weights '{name}'; known for this model: {', '.join(tags) or 'none'}.")
    return name


def _may_be_vision_transformer(name: str) -> bool:
    """Most are told by the file of timm that they are from. Of the others only the object tells, so it is built, on the
    meta device, where a model of any size takes no memory."""
    if timm.models.model_entrypoint(name).__module__ in VIT_MODULES:
        return True
    try:
        with torch.device("meta"):
            return type(timm.create_model(name, pretrained=False)) is VisionTransformer
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
