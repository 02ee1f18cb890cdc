"""Training pairs: who meets whom in stage 2 (section 3.2 of the paper)."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdtrans.errors import Hopeless
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.centers import pseudo_labels
from cdtrans.pairing.neighbours import Neighbours, normalised, two_way


class TargetLabels(NamedTuple):
    """Labels that a person gave for some target images. Only `adapt --target-labels` makes one (run.target_labels)."""

    images: Tensor  # [M] indices in the target
    labels: Tensor  # [M]


@dataclass(frozen=True)
class Domains:
    """Both domains as a network encodes them, and what follows from that about how they match. No target label comes
    in but those that the user gave: otherwise only features and the network's own logits."""

    source: Encoded
    source_labels: Tensor  # [Ns]
    target: Encoded
    given: TargetLabels | None = None

    @cached_property
    def neighbours(self) -> Neighbours:
        """Eq. 3 and 4: the nearest image of the other domain."""
        return two_way(normalised(self.source.features), normalised(self.target.features))

    @cached_property
    def centers(self) -> Tensor:
        """Eq. 5 to 7: [Nt] the class of each target image's nearest centre, its pseudo-label."""
        return pseudo_labels(self.target.features, self.target.logits)

    @cached_property
    def label_nearest_target(self) -> Tensor:
        """[Nt] the label of each target image's nearest source image."""
        return self.source_labels[self.neighbours.source_of_target]

    @cached_property
    def center_nearest_source(self) -> Tensor:
        """[Ns] the pseudo-label of each source image's nearest target image."""
        return self.centers[self.neighbours.target_of_source]

    def agreement(self) -> dict[str, float]:
        """How often the nearest image of the other domain is of the same class, seen from each side. The source's is
        the telling one: its labels are true, so if few agree, the target's centres are not classes. Nothing without
        source images."""
        if not len(self.source_labels):
            return {}
        source = (self.center_nearest_source == self.source_labels).double().mean()
        right = (self.source.logits.argmax(dim=1) == self.source_labels).double().mean()
        return {
            "source_agreement": float(source),
            "target_agreement": float((self.label_nearest_target == self.centers).double().mean()),
            "source_accuracy": float(right),
        }


@dataclass(frozen=True)
class Pairs:
    """The pairs of a round as they are trained on."""

    source: Tensor  # [P] indices
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo-labels, or [P, K] soft ones
    weight: Tensor  # [P]
    proposed: int  # how many there were before the method's filter
    coupled: bool = True  # whether source and target image of a pair stay together when an epoch is shuffled

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> "Pairs":
        moved: dict[str, Any] = {k: x.to(device) for k, x in self.state_dict().items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def summary(self) -> dict[str, int]:
        """What the log and the screen say about a round."""
        return {
            "proposed": self.proposed,
            "kept": len(self),
            "sources_used": len(self.source[self.source >= 0].unique()),
            "targets_used": len(self.target.unique()),
            "classes_used": len(self.source_labels.unique()),
        }


@dataclass(frozen=True)
class Proposals:
    """What a method's plan returns: pairs, and which of them are kept."""

    source: Tensor  # [P] indices; -1 where there are no source images
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo-labels, or [P, K] soft ones; of a rejected pair the label it was rejected for
    kept: Tensor | None = None  # [P] bool; None: all
    weight: Tensor | None = None  # [P]; None: all 1
    coupled: bool = True  # see Pairs

    @classmethod
    def at_random(
        cls,
        domains: Domains,
        targets: Tensor,
        target_labels: Tensor,
        generator: torch.Generator,
        *,
        coupled: bool = False,
    ) -> "Proposals":
        """Every source image with some of these `targets` (indices). The larger of the two sides is used once, the
        other as often as it takes. `target_labels` are of all target images."""
        device = domains.source_labels.device
        sources = torch.arange(len(domains.source_labels))
        count = max(len(sources), len(targets)) if len(targets) else 0
        source, target = (shuffled(x, count, generator).to(device) for x in (sources, targets.cpu()))
        return cls(source, target, domains.source_labels[source], target_labels[target], coupled=coupled)

    @classmethod
    def within_class(cls, domains: Domains, target_labels: Tensor) -> "Proposals":
        """Every target image with the most similar source image of its class. `target_labels` are hard, [Nt]."""
        features = normalised(domains.source.features), normalised(domains.target.features)
        source = torch.zeros_like(target_labels)
        for k in target_labels.unique():
            of_class = (domains.source_labels == k).nonzero().squeeze(1)
            members = (target_labels == k).nonzero().squeeze(1)
            source[members] = of_class[two_way(features[0][of_class], features[1][members]).source_of_target]
        target = torch.arange(len(target_labels), device=target_labels.device)
        return cls(source, target, domains.source_labels[source], target_labels)

    def pairs(self) -> Pairs:
        """The kept ones."""
        kept = torch.ones_like(self.source, dtype=torch.bool) if self.kept is None else self.kept
        weight = torch.ones(len(kept), device=kept.device) if self.weight is None else self.weight
        return Pairs(
            source=self.source[kept],
            target=self.target[kept],
            source_labels=self.source_labels[kept],
            target_labels=self.target_labels[kept],
            weight=weight[kept],
            proposed=len(kept),
            coupled=self.coupled,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """pairs/round-NN.npz: every proposal with its labels, so that people can see why a pair was kept or not."""
        hard = self.target_labels.argmax(dim=1) if self.target_labels.ndim == 2 else self.target_labels
        columns = {"source": self.source, "target": self.target}
        columns |= {"source_labels": self.source_labels, "target_labels": hard}
        arrays = {name: x.cpu().numpy().astype(np.int32) for name, x in columns.items()}
        kept = torch.ones_like(self.source, dtype=torch.bool) if self.kept is None else self.kept
        return arrays | {"kept": kept.cpu().numpy()}


def shuffled(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of these in random order, each once before any comes twice."""
    if not count:
        return indices[:0]
    rounds = [torch.randperm(len(indices), generator=generator) for _ in range(-(-count // len(indices)))]
    return indices[torch.cat(rounds)[:count]]


def union(neighbours: Neighbours, mutual: str) -> tuple[Tensor, Tensor]:
    """P_T then P_S, in the authors' order. A pair found from both sides is in their list twice (`mutual="twice"`); the
    paper's union holds it once (`mutual="once"`)."""
    target_of_source, source_of_target = neighbours
    targets = torch.arange(len(source_of_target), device=source_of_target.device)
    sources = torch.arange(len(target_of_source), device=target_of_source.device)
    if mutual == "once":
        new = source_of_target[target_of_source] != sources
        sources, target_of_source = sources[new], target_of_source[new]
    return torch.cat([source_of_target, sources]), torch.cat([targets, target_of_source])


def one_way(neighbours: Neighbours, pairing: str) -> tuple[Tensor, Tensor]:
    """P_S (Eq. 3) for `one_way_source`, every source image with its nearest target image, or P_T (Eq. 4)."""
    target_of_source, source_of_target = neighbours
    if pairing == "one_way_source":
        return torch.arange(len(target_of_source), device=target_of_source.device), target_of_source
    return source_of_target, torch.arange(len(source_of_target), device=source_of_target.device)


def require_pairs(pairs: Pairs, epoch: int) -> None:
    """Stage 2 cannot train on nothing."""
    if len(pairs) < 2:
        raise Hopeless(
            f"Only {len(pairs)} of {pairs.proposed} proposed pairs were kept in epoch {epoch}",
            "Train the source model longer (--source-epochs) or use a stronger backbone. CDTrans rejects pairs whose "
            "source label is not the class of the target image's nearest centre; --no-center-aware switches that off.",
        )
