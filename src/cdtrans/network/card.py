"""A network and its card: the network that a card describes, and the card of a new one."""

from importlib.metadata import version
from pathlib import Path

from cdtrans.config import Resolved
from cdtrans.errors import RunError
from cdtrans.network.backbone import create_backbone, normalisation
from cdtrans.network.blocks import Transferability
from cdtrans.network.network import Network, build_head, feature_dim
from cdtrans.record.model import FROM_SCRATCH, Card, read_card, read_weights


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


def load_model(folder: Path) -> tuple[Network, Card]:
    """A saved model in eval mode, on the CPU."""
    card, tensors = read_card(folder), read_weights(folder)
    try:
        model = build_model(card)
        model.load_state_dict(tensors)
    except Exception as error:  # a tensor too many or too few, or arguments that timm cannot use
        cause = " ".join(str(error).split())[:100]
        raise RunError(
            "run-damaged", f"The model in '{folder}' is damaged: its card and weights do not fit ({cause})."
        ) from error
    return model.eval(), card
