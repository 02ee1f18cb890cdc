"""One pass over a domain: everything that pairs, pseudo labels, predictions and scores are made from."""

from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.data.batches import Images
from cdtrans.device import autocast
from cdtrans.errors import CdtransError
from cdtrans.model.branches import CDTrans
from cdtrans.ranks import gather
from cdtrans.screen import Screen


class Encoded(NamedTuple):
    """A domain as the target branch sees it."""

    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]


@torch.inference_mode()
def encode(model: CDTrans, images: Images, config: Config, screen: Screen, name: str) -> Encoded:
    """In eval mode and in the precision of training; what comes out is float32. Several ranks share the work, and
    each has the whole of it in the end."""
    model.eval()
    features, logits = [], []
    with screen.track(f"encoding {name}", len(images)) as task, autocast(images.device, config.precision):
        for x in images.in_order(config.encode_batch):
            out = model.encode(x)
            features.append(out.feature.float())
            logits.append(out.logits.float())
            task.advance(len(x))
    encoded = Encoded(gather(torch.cat(features)), gather(torch.cat(logits)))
    if not encoded.logits.isfinite().all():
        raise CdtransError(
            f"The model's scores of the {name} images are not finite: training has diverged. Start again in another "
            "--out with a lower learning rate (--lr, --source-lr) or --precision fp32."
        )
    return encoded
