"""The network: any timm model as the backbone, a head, the kernels that run it, and its saved weights. Here is what is
known of backbones without torch and timm."""

from pathlib import Path

from cdtrans.config import read_yaml

HUB_TIMEOUT = 10.0  # a hub that has not answered by then is out of reach
_NAMES = read_yaml(Path(__file__).with_name("backbones.yaml"))
SHORT_NAMES: dict[str, str] = _NAMES["short_names"]
SET_ELSEWHERE: dict[str, str] = _NAMES["set_elsewhere"]  # arguments of timm's create_model
