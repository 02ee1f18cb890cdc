"""The part of `cdtrans check` that looks through the backbone."""

import numpy as np
import torch

from cdtrans.config import Config
from cdtrans.data.domains import LabelledDomain, UnlabelledDomain
from cdtrans.errors import CdtransError
from cdtrans.model.card import Card, build_model, make_card
from cdtrans.model.encoding import Encoder
from cdtrans.model.network import Network
from cdtrans.run.prepare import DomainPixels
from cdtrans.run.session import initial_model, make_images
from cdtrans.runtime.screen import Screen
from cdtrans.trust.findings import Finding
from cdtrans.trust.probes import Sample, enough, probe

PROBED = 4000  # images of a domain that the backbone looks at: a minute of a CPU with DeiT-tiny, and shares to 1 %


def look(
    source: LabelledDomain,
    source_pixels: DomainPixels,
    target: UnlabelledDomain,
    target_pixels: DomainPixels,
    config: Config,
    screen: Screen,
) -> tuple[list[Finding], str]:
    """What it sees with its weights as they are before any training, and why nothing if so."""
    if not config.weights and not config.pretrained:
        return [], "a backbone without pretrained weights sees nothing"
    card = make_card(config, source.classes, stage="source", epoch=0)
    try:
        model = pretrained_model(config, card)
    except NoWeights as error:
        found = str(error).split(";")[0].removesuffix(".")
        advice = "Connect to the network, or give --weights FILE or --no-pretrained: a run cannot begin otherwise."
        return [Finding("warning", "weights", found, advice)], "there are no weights"
    if not enough(np.array(source.labels), len(target)):
        return [], "there are too few images for it"
    device = torch.device(config.device)
    model.to(device)
    seen, samples = [], []
    for name, domain, pixels in (("source", source, source_pixels), ("target", target, target_pixels)):
        sample = draw_sample(len(domain), config.seed)
        if len(sample) < len(domain):
            screen.say(f"The backbone looks at {len(sample)} of the {len(domain)} {name} images, drawn at random.")
        encoded = Encoder(model, config, screen)(make_images(pixels.keep(sample), card, device), name)
        seen.append(Sample(encoded.features.cpu().numpy(), [domain.paths[n] for n in sample]))
        samples.append(sample)
    labels = np.array(source.labels)[samples[0]]
    return probe(seen[0], labels, source.classes, seen[1], config.seed), ""


class NoWeights(CdtransError):
    """The hub does not answer."""


def pretrained_model(config: Config, card: Card) -> Network:
    """The model with its weights. A file that was asked for must be there and fit."""
    if config.weights:
        return initial_model(config, card)
    build_model(card)  # so that a wrong name is an error, and only missing weights a reason to skip
    try:
        return initial_model(config, card)
    except CdtransError as error:
        raise NoWeights(str(error)) from error


def draw_sample(count: int, seed: int) -> list[int]:
    if count <= PROBED:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, PROBED, replace=False).tolist())
