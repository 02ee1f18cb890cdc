"""One pass over a domain: everything that pairs, pseudo labels, predictions and scores are made from."""

from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.data.batches import Images
from cdtrans.model.branches import CDTrans
from cdtrans.screen import Screen


class Encoded(NamedTuple):
    """A domain as the target branch sees it."""

    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]


@torch.inference_mode()
def encode(model: CDTrans, images: Images, *, batch: int, screen: Screen, name: str) -> Encoded:
    """In eval mode and float32, whatever training runs in: the order of similarities decides the pairs."""
    model.eval()
    features, logits = [], []
    with screen.track(f"encoding {name}", len(images)) as task:
        for x in images.in_order(batch):
            out = model.encode(x)
            features.append(out.feature)
            logits.append(out.logits)
            task.advance(len(x))
    return Encoded(torch.cat(features), torch.cat(logits))
