"""A model as timm and the Hugging Face hub keep it: config.json beside model.safetensors."""

import json
import math
from pathlib import Path
from typing import Any

import timm

from cdtrans.model.backbone import FOLDER
from cdtrans.model.card import WEIGHTS, Card
from cdtrans.model.network import Network, feature_dim
from cdtrans.serving.portable import Read, facts, logits_by_timm

HUB_CONFIG = "config.json"


def hub_config(model: Network, card: Card) -> dict[str, Any]:
    """What timm needs to build and feed the model. `squash` is how images are resized here: to a square."""
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
    }


def crop_share(crop: int, resize: int) -> float:
    """crop / resize, so that timm, which rounds crop / share down, comes to `resize`."""
    share = crop / resize
    return share if math.floor(crop / share) == resize else math.nextafter(share, 0)


def read_folder(folder: Path) -> Read:
    """Read the folder with timm alone, without cdtrans."""
    config = json.loads((folder / HUB_CONFIG).read_text(encoding="utf-8"))["pretrained_cfg"]
    model = timm.create_model(f"{FOLDER}{folder}", pretrained=True).eval()
    return logits_by_timm(model, config["input_size"][-1], config["mean"], config["std"])


def write_folder(folder: Path, weights: bytes, config: dict[str, Any]) -> None:
    (folder / WEIGHTS).write_bytes(weights)
    (folder / HUB_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
