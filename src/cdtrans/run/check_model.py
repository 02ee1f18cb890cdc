"""The part of `cdtrans check` that uses the backbone."""

import numpy as np
import torch

from cdtrans.config import Resolved
from cdtrans.errors import WeightsUnavailable
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.domains import LabelledDomain, UnlabelledDomain
from cdtrans.network.encoding import Encoder
from cdtrans.network.weights import make_card
from cdtrans.run.stage_1 import initial_network
from cdtrans.runtime.screen import Screen
from cdtrans.trust.findings import Finding
from cdtrans.trust.probes import Sample, enough, probe

PROBED = 4000  # images of a domain that the backbone encodes: a minute of a CPU with DeiT-tiny, and shares to 1 %


def look(
    source: Decoded[LabelledDomain],
    target: Decoded[UnlabelledDomain],
    config: Resolved,
    screen: Screen,
) -> tuple[list[Finding], str]:
    """Findings with the weights as they are before any training; or the reason why there are none."""
    if not config.weights and not config.pretrained:
        return [], "that needs pretrained weights"
    card = make_card(config, source.domain.classes, stage="source", epoch=0)
    try:
        network = initial_network(config, card)
    except WeightsUnavailable as error:
        advice = "Connect to the network, or give --weights FILE or --no-pretrained: a run needs one of these."
        return [Finding("warning", "weights", error.cause, advice)], "there are no weights"
    if not enough(np.array(source.domain.labels), len(target)):
        return [], "there are too few images for it"
    device = torch.device(config.device)
    network.to(device)
    encodings, samples = [], []
    for name, decoded in (("source", source), ("target", target)):
        sample = draw_sample(len(decoded), config.seed)
        if len(sample) < len(decoded):
            screen.say(f"The backbone checks {len(sample)} of the {len(decoded)} {name} images, chosen at random.")
        encoded = Encoder(network, config, screen)(decoded.keep(sample).images(card, device), name)
        encodings.append(Sample(encoded.features.cpu().numpy(), [decoded.domain.paths[n] for n in sample]))
        samples.append(sample)
    labels = np.array(source.domain.labels)[samples[0]]
    return probe(encodings[0], labels, source.domain.classes, encodings[1], config.seed), ""


def draw_sample(count: int, seed: int) -> list[int]:
    if count <= PROBED:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, PROBED, replace=False).tolist())
