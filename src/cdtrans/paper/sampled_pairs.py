"""The training pairs of the paper's Fig. 2b: random true-positive pairs, some replaced by random false ones."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.pairing.pairs import Search


class Sample(NamedTuple):
    """Pairs (source image, target image), in the order in which false ones take the place of true ones. They depend on
    the seed alone, so that all runs of a study share them, and more noise contains less."""

    source: Tensor  # [P] of the target image's class
    target: Tensor  # [P]
    false: Tensor  # [P] a source image of another class


def sampled_pairs(found: Search, true: Tensor, config: Config) -> Search:
    """The first `false_share` of the sample is false. `pairing="sampled_true"` has it removed: proposed, but not kept.
    `true` holds the target's true classes, [Nt]."""
    sample = draw(found.labels.cpu(), true.cpu(), config.sampled_pairs, config.seed)
    replaced = torch.arange(len(sample.target)) < round(config.false_share * len(sample.target))
    source = torch.where(replaced, sample.false, sample.source)
    kept = ~replaced if config.pairing == "sampled_true" else torch.ones_like(replaced)
    source, target, kept = (x.to(true.device) for x in (source, sample.target, kept))
    return replace(found, source=source, target=target, kept=kept)


def draw(labels: Tensor, true: Tensor, count: int, seed: int) -> Sample:
    """`count` pairs. Every target image of a class of the source comes once before any comes twice; its partners are
    drawn from the source images of its class, and from all the others. A false pair keeps the target image, so that
    noise changes what the target images are taught and never which of them are seen."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.isin(true, labels).nonzero().squeeze(1)  # [N]
    if not len(known):
        nothing = torch.empty(0, dtype=torch.long)
        return Sample(nothing, nothing, nothing)
    rounds = [torch.randperm(len(known), generator=generator) for _ in range(-(-count // len(known)))]
    target = known[torch.cat(rounds)[:count]]
    target = target[torch.randperm(count, generator=generator)]  # [P]; what is replaced first is of all rounds
    by_class = labels.argsort(stable=True)  # [Ns]
    sizes = torch.bincount(labels)  # [K]
    starts = sizes.cumsum(0) - sizes
    size, start = sizes[true[target]], starts[true[target]]  # [P]
    inside = (torch.rand(count, generator=generator, dtype=torch.double) * size).long()
    outside = (torch.rand(count, generator=generator, dtype=torch.double) * (len(labels) - size)).long()
    outside += torch.where(outside < start, 0, size)  # skips the images of the class itself
    return Sample(by_class[start + inside], target, by_class[outside])
