"""The folder of a saved model: its weights, and a card with all that is needed to run it again. Reading the card needs
no torch."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cdtrans.config import LARGEST_SIDE
from cdtrans.errors import RunError
from cdtrans.record.files import atomic, intact, replace_folder
from cdtrans.record.layout import CARD, RESTORE, WEIGHTS
from cdtrans.schema import Misfit, Range, build

if TYPE_CHECKING:
    from torch import Tensor, nn

FROM_SCRATCH = "none: trained from scratch"
Side = Annotated[int, Range(1, LARGEST_SIDE)]
Channels = tuple[float, float, float]
Temperature = Annotated[float, Range(0.001, 1000)]  # beyond, probabilities are all 0 and 1, or all equal


@dataclass(frozen=True)
class Card:
    """The description saved with the weights."""

    classes: tuple[str, ...]
    backbone: str  # timm name and tag
    backbone_args: dict[str, Any]
    weights: str  # start of the training
    neck: Literal["batchnorm", "none"]
    resize: Side
    crop: Side
    precision: Literal["fp32", "bf16", "fp16"]  # the run's, on its own device
    mean: Channels
    std: Channels
    stage: Literal["source", "adaptation"]
    epoch: int  # the last of that stage
    versions: dict[str, str]
    head: dict[str, Any] = field(default_factory=dict)  # empty for the authors' head; see build_head
    method: str = "cdtrans"
    taps: Annotated[int, Range(1, 999)] = 1  # blocks that the feature is made of, from the last backwards
    target_labels: int = 0  # target images that it was trained with the labels of
    transferability: bool = False  # whether the last block weighs patches: see the module of that name
    temperature: Temperature = 1.0  # divisor of the logits, so that the probabilities are calibrated

    @property
    def name(self) -> str:
        """The model in words."""
        return "source-only" if self.stage == "source" else f"adapted, epoch {self.epoch}"


def card_from(values: Any) -> Card:
    """A card from JSON, or Misfit."""
    card = build(Card, values)
    if card.resize < card.crop or min(card.std) <= 0:
        raise Misfit("range", "", f"resize is {card.resize}, crop {card.crop} and std {card.std}")
    return card


def read_card(folder: Path) -> Card:
    file = folder / CARD
    if not file.exists():
        raise RunError("model-missing", f"'{folder}' holds no finished model; {RESTORE}.")
    with intact(file, RESTORE):
        return card_from(json.loads(file.read_text(encoding="utf-8")))


def write_card(folder: Path, card: Card) -> None:
    with atomic(folder / CARD) as file:
        file.write((json.dumps(asdict(card), indent=2) + "\n").encode())


def save_model(folder: Path, network: "nn.Module", card: Card) -> None:
    """Both files in a new folder that takes its place at once."""
    from safetensors.torch import save

    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with atomic(draft / WEIGHTS) as file:
        file.write(save({name: tensor.contiguous().cpu() for name, tensor in network.state_dict().items()}))
    write_card(draft, card)
    replace_folder(draft, folder)


def read_weights(folder: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    if not file.exists():
        raise RunError("model-missing", f"The model in '{folder}' has lost its weights ({WEIGHTS}); {RESTORE}.")
    with intact(file, RESTORE):
        tensors: dict[str, Tensor] = load_file(file)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise Misfit("range", "", "its weights are not finite")
    return tensors
