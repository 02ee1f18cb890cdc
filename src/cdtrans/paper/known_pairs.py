"""Methods whose pairs are made with target labels, to measure what better or worse pairs would be worth: the last row
of the paper's Table 5 (`ground_truth`) and its Fig. 2b (`sampled_pairs`).

They alone train on target labels. `cdtrans adapt` refuses them: only this module makes them, from labels that the user
of `cdtrans ablate` hands over, and model, config.yaml, result.json and report say so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cdtrans.config import LARGEST_SEED, BranchOptions
from cdtrans.errors import DataError
from cdtrans.methods.base import Round
from cdtrans.methods.cdtrans import ThreeBranches
from cdtrans.pairing.neighbours import normalised, two_way
from cdtrans.pairing.pairs import Domains, Proposals, shuffled, union
from cdtrans.paper.printed_tables import MOST_PAIRS
from cdtrans.schema import option

Labelled = TypeVar("Labelled", bound="KnownPairs")


class KnownPairs(ThreeBranches):
    """CDTrans on pairs that its plan makes with the target's true labels. A target image is taught its pair's class."""

    uses_target_labels = True
    pairs_mean = "The two images of a pair are nearest neighbours or of one class, by the target's true labels."

    @staticmethod
    def true_labels() -> Tensor:
        """[Nt] the target's classes; UNKNOWN for an image whose class is not given."""
        raise NotImplementedError

    @classmethod
    def with_labels(cls: type[Labelled], read: Callable[[], Tensor]) -> type[Labelled]:
        """The method for one target. `read` is called when the run's order of the target images is known."""
        return type(cls.__name__, (cls,), {"true_labels": staticmethod(read)})

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        proposals = self.pair(domains, self.true_labels().to(domains.source_labels.device))
        if not len(proposals.source):
            raise DataError(
                "no-labelled-image",
                "No labelled target image belongs to a class of the source; check the target labels.",
            )
        return proposals

    def pair(self, domains: Domains, true: Tensor) -> Proposals:
        """The pairs, from the target's true labels [Nt]."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroundTruthOptions(BranchOptions):
    mutual_pairs: str = option("twice", "How often to count a pair proposed from both sides: twice, or once.")


class GroundTruth(KnownPairs):
    """Every image is paired with its nearest one of the same true class."""

    Options = GroundTruthOptions
    options: GroundTruthOptions

    def pair(self, domains: Domains, true: Tensor) -> Proposals:
        """Eq. 3 and 4 within each class."""
        labels = domains.source_labels
        f_s, f_t = normalised(domains.source.features), normalised(domains.target.features)
        pairs = [torch.empty(2, 0, dtype=torch.long, device=true.device)]
        for label in labels.unique():
            s, t = (labels == label).nonzero().squeeze(1), (true == label).nonzero().squeeze(1)
            if len(t):
                i, j = union(two_way(f_s[s], f_t[t]), self.options.mutual_pairs)
                pairs.append(torch.stack([s[i], t[j]]))
        source, target = torch.cat(pairs, dim=1)
        return Proposals(source, target, labels[source], labels[source])


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


METHODS: dict[str, type[KnownPairs]] = {"ground_truth": GroundTruth, "sampled_pairs": SampledPairs}
