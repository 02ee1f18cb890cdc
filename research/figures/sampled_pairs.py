"""The method of Fig. 2b: random true pairs, some replaced by random false ones."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import LARGEST_SEED, BranchOptions
from cdtrans.pairing.pairs import Domains, Proposals, shuffled
from cdtrans.paper.known_pairs import KnownPairs
from cdtrans.schema import option

MOST_PAIRS = 10**7  # largest sample; it fits into memory several times


@dataclass(frozen=True)
class SampledPairsOptions(BranchOptions):
    pairs: int = option(2, "Number of pairs to sample.", minimum=2, maximum=MOST_PAIRS)
    false_share: float = option(0.0, "Share of them to replace by false pairs.", minimum=0, maximum=1)
    drop_false: bool = option(False, "Leave the false pairs out.")
    sample_seed: int = option(1234, "Seed of the sample.", minimum=0, maximum=LARGEST_SEED)


class SampledPairs(KnownPairs):
    """Random true pairs, some replaced by random false ones."""

    Options = SampledPairsOptions
    options: SampledPairsOptions

    def pair(self, domains: Domains, true: Tensor) -> Proposals:
        """The first `false_share` of the sample is false; with `drop_false` it is proposed, but not kept."""
        options, labels = self.options, domains.source_labels
        sample = draw(labels.cpu(), true.cpu(), options.pairs, options.sample_seed)
        false = torch.arange(len(sample.target)) < round(options.false_share * len(sample.target))
        source = torch.where(false, sample.false, sample.source)
        kept = ~false if options.drop_false else torch.ones_like(false)
        source, target, kept = (x.to(true.device) for x in (source, sample.target, kept))
        rejected_for = domains.centers[target]
        return Proposals(source, target, labels[source], torch.where(kept, labels[source], rejected_for), kept)


class Sample(NamedTuple):
    """Pairs (source image, target image), in the order in which false ones replace true ones. They depend on the seed
    alone, so that all runs of a study share them, and more noise contains less."""

    source: Tensor  # [P] a source image of the target image's class
    target: Tensor  # [P]
    false: Tensor  # [P] a source image of another class


def draw(labels: Tensor, true: Tensor, count: int, seed: int) -> Sample:
    """`count` pairs. Every target image of a class of the source comes once before any comes twice; its partners are
    drawn from the source images of its class, and from all the others. A false pair keeps the target image, so that
    noise changes what the target images are taught and never which of them are seen."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.isin(true, labels).nonzero().squeeze(1)  # [N]
    if not len(known):
        nothing = torch.empty(0, dtype=torch.long)
        return Sample(nothing, nothing, nothing)
    target = shuffled(known, count, generator)
    target = target[torch.randperm(count, generator=generator)]  # [P]; the first pairs come from all rounds
    by_class = labels.argsort(stable=True)  # [Ns]
    sizes = torch.bincount(labels)  # [K]
    starts = sizes.cumsum(0) - sizes
    size, start = sizes[true[target]], starts[true[target]]  # [P]
    inside = (torch.rand(count, generator=generator, dtype=torch.double) * size).long()
    outside = (torch.rand(count, generator=generator, dtype=torch.double) * (len(labels) - size)).long()
    outside += torch.where(outside < start, 0, size)  # skips the images of the class itself
    return Sample(by_class[start + inside], target, by_class[outside])
