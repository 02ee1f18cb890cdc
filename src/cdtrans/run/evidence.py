"""What the pretrained backbone knows of both domains, before stage 1 trains it: the guard's evidence (trust.support).

Where stage 1 leaves the backbone as it is, stage 2 has the same features at its start, and nothing is done here. Where
stage 1 is another run's, its card says which weights that began with; if they are not here, the guard has to judge by
the features of the source-only model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdtrans.config import Config, read_recipe
from cdtrans.errors import CdtransError
from cdtrans.inputs.batches import Images
from cdtrans.network.encoding import Encoder, Frozen
from cdtrans.network.network import Head, Network, feature_dim
from cdtrans.pairing.pairs import Domains
from cdtrans.record.files import intact
from cdtrans.record.model import FROM_SCRATCH, Card
from cdtrans.record.run import Run
from cdtrans.run.stage_1 import initial_network
from cdtrans.runtime.ranks import from_main
from cdtrans.runtime.screen import Screen
from cdtrans.trust.support import Evidence

FILE = "evidence.npz"  # in the run folder, for a resumed run
AGAIN = "start again in another --out"


def trains_backbone(network: Network | None, card: Card, config: Config) -> bool:
    """Whether stage 1 trains the backbone or has trained it. `network` is the run's until stage 1 starts."""
    return config.source_fit == "train" if network is not None else card.epoch > 0


def left_untouched(network: Network | None, card: Card, config: Config) -> bool:
    """Whether the source-only model has the backbone's pretrained weights."""
    return card.weights != FROM_SCRATCH and not trains_backbone(network, card, config)


def evidence_network(
    run: Run, network: Network | None, card: Card, config: Config, device: torch.device, screen: Screen
) -> Network | None:
    """The pretrained backbone, if both domains must be encoded with it now: not if that has been done, if stage 1 does
    not train the backbone, or if there are no pretrained weights or no source images."""
    if (run.folder / FILE).exists() or not config.source:
        return None
    if card.weights == FROM_SCRATCH or not trains_backbone(network, card, config):
        return None
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):  # the run's own random numbers stay as they are
        network = network or pretrained_network(card, config, device)
        if not from_main(network is not None):
            screen.warn(
                f"{card.weights} is missing, so the guard judges by features trained on the source: trust it less."
            )
            return None
        if network is None:
            raise CdtransError(f"'{card.weights}' must be on every machine or on none; copy it, or remove it.")
        backbone, taps = network.backbone, read_recipe("best")["taps"]
        return Network(backbone, Head(feature_dim(backbone, taps), 1, "none"), taps).to(device)


def pretrained_evidence(
    run: Run,
    network: Network | None,
    classes: int,
    config: Config,
    source: Images,
    labels: Tensor,
    target: Images,
    screen: Screen,
) -> Evidence | None:
    """Evidence from the `evidence_network`, or that of an earlier session if there is any."""
    file = run.folder / FILE
    if network is None:
        if not file.exists():
            return None
        with intact(file, AGAIN), np.load(file) as arrays:
            if {*arrays.files} != {*Evidence._fields} - {"pretrained"}:
                raise CdtransError(f"'{file}' was written by another version of cdtrans; {AGAIN}.")
            return Evidence(**{name: torch.from_numpy(arrays[name]) for name in arrays.files}, pretrained=True)
    encode = Encoder(network, config, screen, Frozen())
    with run.timed("evidence"):
        domains = Domains(encode(source, "source"), labels, encode(target, "target"))
        evidence = Evidence.of(domains, classes, network.leading, pretrained=True)
    arrays = {name: x.numpy() for name, x in evidence._asdict().items() if name != "pretrained"}
    run.write_arrays(FILE, arrays)
    return evidence


def pretrained_network(card: Card, config: Config, device: torch.device) -> Network | None:
    """The network of a card before any training; None if its weights are missing."""
    file = card.weights if Path(card.weights).is_file() else None
    if file is None and card.weights != card.backbone:
        return None
    try:
        return initial_network(replace(config, weights=file, pretrained=file is None), card).to(device)
    except CdtransError:
        return None
