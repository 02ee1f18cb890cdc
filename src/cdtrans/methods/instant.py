"""The frozen backbone: nothing is trained. `cdtrans.pairing.graphs` labels the target in closed form, and a last ridge
regression on the source and all of these labels is the classifier that is served."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Method, Round, Sizes
from cdtrans.network.network import Head, Network
from cdtrans.pairing.graphs import CLOSE, Probe, Statistics, fit_probe, label_target
from cdtrans.pairing.pairs import Domains, Proposals


class Instant(Method):
    """Probe and neighbour graphs on the frozen backbone."""

    title = "The start of this project's best recipe, described in docs/results/recipe.md"
    trains = False
    takes_target_labels = True
    pairs_mean = "Each target image is paired with the most similar source image of the class that it was given."

    def __init__(self, network: Network, options: object, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.probe = Head(network.dim, sizes.classes, "standardise")

    def served(self) -> Network:
        return Network(self.network.backbone, self.probe, self.network.taps)

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        labels = label_target(domains, classes=self.sizes.classes, leading=self.network.leading)
        probe, _, of_target = probe_on_both(domains, labels.probabilities)
        set_probe(self.probe, probe, of_target)
        return Proposals.within_class(domains, labels.probabilities.argmax(dim=1))


def probe_on_both(domains: Domains, labels: Tensor) -> tuple[Probe, Statistics, Statistics]:
    """A probe on the source and the whole target with its labels [Nt, K]; and both domains' statistics."""
    source, target = domains.source.features, domains.target.features
    of_source = Statistics.of(source)
    of_target = Statistics.of(target, prior=of_source)
    x = torch.cat([of_source.standardised(source), of_target.standardised(target)])
    y = F.one_hot(torch.cat([domains.source_labels, labels.argmax(dim=1)]), labels.shape[1]).to(x)
    return fit_probe(x, y, CLOSE), of_source, of_target


@torch.no_grad()
def set_probe(head: Head, probe: Probe, statistics: Statistics) -> None:
    """Make a head of the kind 'standardise' this probe."""
    assert isinstance(head.neck, torch.nn.BatchNorm1d), "the head standardises"
    set_statistics(head.neck, statistics)
    head.classifier.weight.copy_(probe.weight.T)
    head.classifier.bias.copy_(probe.bias)


@torch.no_grad()
def set_statistics(norm: torch.nn.BatchNorm1d, statistics: Statistics) -> None:
    norm.get_buffer("running_mean").copy_(statistics.mean)
    norm.get_buffer("running_var").copy_(statistics.variance)
