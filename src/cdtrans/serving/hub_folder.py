"""A model as the Hugging Face hub keeps it: config.json beside model.safetensors. timm and transformers read both. A
model with several taps is none of timm's: its folder also has the code with which transformers runs it."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file
from torch import Tensor

from cdtrans.network.backbone import FOLDER
from cdtrans.network.network import Network, feature_dim
from cdtrans.record.layout import WEIGHTS
from cdtrans.record.model import Card
from cdtrans.serving.exported import CODE
from cdtrans.serving.portable import Read, facts, logits_by_timm, weights_file
from cdtrans.serving.tapped_vit import tapped_logits, widen_head

HUB_CONFIG = "config.json"


def hub_config(model: Network, card: Card) -> dict[str, Any]:
    """What timm and transformers need to build and feed the model. `squash` is how images are resized here: to a
    square."""
    told, backbone = facts(card), model.backbone.default_cfg
    arguments = json.loads(told["arguments"])
    kept = {name: backbone[name] for name in ("fixed_input_size", "first_conv", "classifier") if backbone.get(name)}
    return {
        "architecture": told["architecture"].partition(".")[0],
        "num_classes": arguments.pop("num_classes"),
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
        **(remote_code(model.taps) if model.taps > 1 else {}),
    }


def remote_code(taps: int) -> dict[str, Any]:
    """What transformers needs to run the code of the folder."""
    names = {"AutoConfig": "CdtransConfig", "AutoModelForImageClassification": "CdtransForImageClassification"}
    return {
        "model_type": "cdtrans",
        "architectures": [names["AutoModelForImageClassification"]],
        "auto_map": {auto: f"modeling_cdtrans.{name}" for auto, name in names.items()},
        "taps": taps,
    }


def crop_share(crop: int, resize: int) -> float:
    """crop / resize, so that timm, which rounds crop / share down, comes to `resize`."""
    share = crop / resize
    return share if math.floor(crop / share) == resize else math.nextafter(share, 0)


def read_folder(folder: Path) -> Read:
    """Read the folder with timm and its own code alone, without the rest of cdtrans."""
    config = json.loads((folder / HUB_CONFIG).read_text(encoding="utf-8"))
    data, taps = config["pretrained_cfg"], config.get("taps", 1)
    run: Callable[[Tensor], Tensor]
    if taps == 1:
        run = timm.create_model(f"{FOLDER}{folder}", pretrained=True).eval()
    else:  # as transformers does
        vit = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"])
        widen_head(vit, taps)
        vit.load_state_dict(load_file(folder / WEIGHTS))
        run = partial(tapped_logits, vit.eval(), taps=taps)
    return logits_by_timm(run, data["input_size"][-1], data["mean"], data["std"])


def write_folder(folder: Path, model: Network, card: Card) -> None:
    (folder / WEIGHTS).write_bytes(weights_file(model, card))
    (folder / HUB_CONFIG).write_text(json.dumps(hub_config(model, card), indent=2) + "\n", encoding="utf-8")
    for name in CODE if model.taps > 1 else ():
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
