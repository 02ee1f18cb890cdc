"""A saved model: its weights, and a card that says all that is needed to run it again."""

import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from cdtrans.config import Resolved
from cdtrans.errors import CdtransError
from cdtrans.network.backbone import create_backbone, normalisation
from cdtrans.network.blocks import Transferability
from cdtrans.network.network import Network, build_head, feature_dim
from cdtrans.record.card_file import RESTORE, read_card, write_card
from cdtrans.record.files import atomic, intact, replace_folder
from cdtrans.record.shapes import Misfit

WEIGHTS = "model.safetensors"
FROM_SCRATCH = "none: trained from scratch"


@dataclass(frozen=True)
class Card:
    """The description saved with the weights."""

    classes: tuple[str, ...]
    backbone: str  # timm name and tag
    backbone_args: dict[str, Any]
    weights: str  # where training started from
    neck: str
    resize: int
    crop: int
    precision: str  # of the run on its own device
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stage: str  # "source" or "adaptation"
    epoch: int  # of that stage
    versions: dict[str, str]
    head: dict[str, Any] = field(default_factory=dict)  # of a head that is not the authors': see build_head
    method: str = "cdtrans"  # that adapted it
    taps: int = 1  # blocks that the feature is made of, from the last backwards
    target_labels: int = 0  # target images that it was trained with the labels of
    transferability: bool = False  # whether the last block weighs patches: see the module of that name
    temperature: float = 1.0  # the logits are divided by it, so that the probabilities are calibrated

    @property
    def name(self) -> str:
        """Which model of a run this is, in words."""
        return "source-only" if self.stage == "source" else f"adapted, epoch {self.epoch}"


def make_card(config: Resolved, classes: tuple[str, ...], *, stage: str, epoch: int) -> Card:
    mean, std = normalisation(config.backbone)
    return Card(
        classes=classes,
        backbone=config.backbone,
        backbone_args=config.backbone_args,
        weights=config.weights or (config.backbone if config.pretrained else FROM_SCRATCH),
        neck=config.neck,
        resize=config.resize,
        crop=config.crop,
        precision=config.precision,
        mean=mean,
        std=std,
        stage=stage,
        epoch=epoch,
        versions={p: version(p) for p in ("torch", "timm")},
        method=config.method,
        taps=config.taps,
    )


def build_model(card: Card, *, drop_path: float = 0.0) -> Network:
    """The card's architecture with random weights."""
    backbone = create_backbone(card.backbone, crop=card.crop, drop_path=drop_path, args=card.backbone_args)
    head = build_head(card.head, feature_dim(backbone, card.taps), len(card.classes), card.neck)
    return Network(backbone, head, card.taps, Transferability(backbone) if card.transferability else None)


def save_model(folder: Path, model: Network, card: Card) -> None:
    """Both files in a new folder that takes its place at once."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    with atomic(draft / WEIGHTS) as file:
        file.write(save(tensors))
    write_card(draft, asdict(card))
    replace_folder(draft, folder)


def load_model(folder: Path) -> tuple[Network, Card]:
    """A saved model in eval mode, on the CPU."""
    values, file = read_card(folder), folder / WEIGHTS
    if not file.exists():
        raise CdtransError(f"The model in '{folder}' has lost its weights ({WEIGHTS}); {RESTORE}.")
    with intact(file, RESTORE):
        tensors = load_file(file)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise Misfit("its weights are not finite")
    try:
        values.pop("first_block_residual", None)  # cards of the first version: now an option of the method
        tuples = {name: tuple(values[name]) for name in ("classes", "mean", "std")}
        card = Card(**{**values, **tuples})
        model = build_model(card)
        model.load_state_dict(tensors)
    except Exception as error:  # a field or tensor too many or too few, or arguments that timm cannot use
        cause = " ".join(str(error).split())[:100]
        raise CdtransError(f"The model in '{folder}' is damaged: its card and weights do not fit ({cause}).") from error
    return model.eval(), card
