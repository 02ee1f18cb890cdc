"""What the pretrained backbone knows of both domains, before stage 1 trains it: the guard's evidence (trust.support).

Where stage 1 leaves the backbone as it is, stage 2 has the same features at its start, and nothing is done here."""

import numpy as np
import torch
from torch import Tensor

from cdtrans.config import BEST, Config
from cdtrans.data.batches import Images
from cdtrans.errors import CdtransError
from cdtrans.model.card import Card
from cdtrans.model.encoding import Encoder, Frozen
from cdtrans.model.head import Head
from cdtrans.model.network import Network, feature_dim
from cdtrans.pairing.pairs import Domains
from cdtrans.run.stage_1 import initial_network
from cdtrans.runtime.screen import Screen
from cdtrans.storage.run import Run
from cdtrans.trust.support import Evidence

FILE = "evidence.npz"  # in the run folder, for a resumed run


def pretrained_evidence(
    run: Run,
    network: Network | None,
    card: Card,
    config: Config,
    source: Images,
    labels: Tensor,
    target: Images,
    screen: Screen,
) -> Evidence | None:
    """`network` is that of the run as long as its backbone is the pretrained one. None if stage 1 leaves the backbone
    as it is, or if there are no pretrained weights or no source images."""
    if config.source_fit == "probe" or not (config.weights or config.pretrained) or not len(labels):
        return None
    file = run.folder / FILE
    if file.exists():
        with np.load(file) as arrays:
            return Evidence(*(torch.from_numpy(arrays[name]) for name in Evidence._fields))
    gpus = [source.device] if source.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):  # the run's own random numbers stay as they are
        try:
            backbone = (network or initial_network(config, card).to(source.device)).backbone
        except CdtransError:  # stage 1 is another run's, and its weights are not here
            return None
        taps = BEST["taps"]
        fixed = Network(backbone, Head(feature_dim(backbone, taps), 1, "none"), taps).to(source.device)
    encode = Encoder(fixed, config, screen, Frozen())
    with run.timed("evidence"):
        domains = Domains(encode(source, "source"), labels, encode(target, "target"))
        evidence = Evidence.of(domains, len(card.classes))
    run.write_arrays(FILE, {name: x.numpy() for name, x in evidence._asdict().items()})
    return evidence
