"""Training pairs (section 3.2 of the paper): neighbours in the other domain, and labels by class centres."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.errors import Hopeless
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.neighbours import Neighbours, two_way, unit_rows

EPSILON = 1e-8  # the authors' guard against an empty class


class TargetLabels(NamedTuple):
    """Labels that a person gave for some target images. Only `adapt --answers` makes one (run.answers)."""

    images: Tensor  # [M] indices in the target
    labels: Tensor  # [M]


@dataclass(frozen=True)
class Domains:
    """Both domains as a network encodes them, and how they match. Without labels given by the user it holds only
    features and the network's own logits of the target."""

    source: Encoded
    source_labels: Tensor  # [Ns]
    target: Encoded
    given: TargetLabels | None = None
    beside: Tensor | None = None  # [Na, D] features of source images whose classes do not occur in the target

    @cached_property
    def neighbours(self) -> Neighbours:
        """Eq. 3 and 4: the nearest image of the other domain."""
        return two_way(unit_rows(self.source.features), unit_rows(self.target.features))

    @cached_property
    def centers(self) -> Tensor:
        """Eq. 5 to 7: [Nt] the class of each target image's nearest centre, its pseudo label."""
        return pseudo_labels(self.target.features, self.target.logits)

    def agreement(self) -> dict[str, float]:
        """How often the nearest image of the other domain is of the same class, seen from each side. If few source
        images agree, whose labels are true, the target's centres are not classes. Empty without source images."""
        if not len(self.source_labels):
            return {}
        equal = {
            "source_agreement": self.centers[self.neighbours.target_of_source] == self.source_labels,
            "target_agreement": self.source_labels[self.neighbours.source_of_target] == self.centers,
            "source_accuracy": self.source.logits.argmax(dim=1) == self.source_labels,
        }
        return {name: float(x.double().mean()) for name, x in equal.items()}


@dataclass(frozen=True)
class Pairs:
    """The pairs of a round as they are trained on."""

    source: Tensor  # [P] indices
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo-labels, or [P, K] soft ones
    weight: Tensor  # [P]
    proposed: int  # their number before the method's filter
    coupled: bool = True  # both images of a pair stay together when an epoch is shuffled

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> "Pairs":
        moved: dict[str, Any] = {k: x.to(device) for k, x in self.state_dict().items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def summary(self) -> dict[str, int]:
        """A round's pairs in numbers, for the log and the screen."""
        return {
            "proposed": self.proposed,
            "kept": len(self),
            "sources_used": len(self.source[self.source >= 0].unique()),
            "targets_used": len(self.target.unique()),
            "classes_used": len(self.source_labels.unique()),
        }


@dataclass(frozen=True)
class Proposals:
    """The result of a method's plan: pairs, some of which are kept."""

    source: Tensor  # [P] indices; -1 where there are no source images
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo-labels, or [P, K] soft ones; a rejected pair has the label it was rejected for
    kept: Tensor | None = None  # [P] bool; None keeps all
    weight: Tensor | None = None  # [P]; None gives all 1
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
        other as often as it takes. `target_labels` has a row for each target image."""
        device = domains.source_labels.device
        sources = torch.arange(len(domains.source_labels))
        count = max(len(sources), len(targets)) if len(targets) else 0
        source, target = (shuffled(x, count, generator).to(device) for x in (sources, targets.cpu()))
        return cls(source, target, domains.source_labels[source], target_labels[target], coupled=coupled)

    @classmethod
    def within_class(cls, domains: Domains, target_labels: Tensor) -> "Proposals":
        """Every target image with the most similar source image of its class. `target_labels` are hard, [Nt]."""
        f_s, f_t = unit_rows(domains.source.features), unit_rows(domains.target.features)
        source = torch.zeros_like(target_labels)
        for k in target_labels.unique():
            sources, targets = ((labels == k).nonzero().squeeze(1) for labels in (domains.source_labels, target_labels))
            source[targets] = sources[two_way(f_s[sources], f_t[targets]).source_of_target]
        target = torch.arange(len(target_labels), device=target_labels.device)
        return cls(source, target, domains.source_labels[source], target_labels)

    def mask(self) -> Tensor:
        """[P] bool: the kept pairs."""
        return torch.ones_like(self.source, dtype=torch.bool) if self.kept is None else self.kept

    def pairs(self) -> Pairs:
        kept = self.mask()
        weight = torch.ones(len(kept), device=kept.device) if self.weight is None else self.weight
        columns = (self.source, self.target, self.source_labels, self.target_labels, weight)
        source, target, source_labels, target_labels, weight = (x[kept] for x in columns)
        return Pairs(source, target, source_labels, target_labels, weight, len(kept), self.coupled)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every proposal with its labels, so that people can see why a pair was kept or not."""
        hard = self.target_labels.argmax(dim=1) if self.target_labels.ndim == 2 else self.target_labels
        columns = {"source": self.source, "target": self.target}
        columns |= {"source_labels": self.source_labels, "target_labels": hard}
        arrays = {name: x.cpu().numpy().astype(np.int32) for name, x in columns.items()}
        return arrays | {"kept": self.mask().cpu().numpy()}


def shuffled(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many indices in random order, each once before any comes twice."""
    if not count:
        return indices[:0]
    rounds = [torch.randperm(len(indices), generator=generator) for _ in range(-(-count // len(indices)))]
    return indices[torch.cat(rounds)[:count]]


def proposed(neighbours: Neighbours, pairing: str, mutual: str) -> tuple[Tensor, Tensor]:
    """Source and target of every pair. `one_way_source` is P_S (Eq. 3), every source image with its nearest target
    image, `one_way_target` is P_T (Eq. 4), and `two_way` has P_T, then P_S, in the authors' order. A pair that both
    images propose is in their list twice (`mutual="twice"`); the paper's union holds it once (`mutual="once"`)."""
    target_of_source, source_of_target = neighbours
    sources, targets = (torch.arange(len(x), device=x.device) for x in neighbours)
    if pairing == "one_way_source":
        return sources, target_of_source
    if pairing == "one_way_target":
        return source_of_target, targets
    if mutual == "once":
        new = source_of_target[target_of_source] != sources
        sources, target_of_source = sources[new], target_of_source[new]
    return torch.cat([source_of_target, sources]), torch.cat([targets, target_of_source])


def require_pairs(pairs: Pairs, epoch: int) -> None:
    """Refuse to train stage 2 on nothing."""
    if len(pairs) < 2:
        raise Hopeless(
            f"Only {len(pairs)} of {pairs.proposed} proposed pairs were kept in epoch {epoch}",
            "Train the source model longer (--source-epochs) or use a stronger backbone. CDTrans rejects pairs whose "
            "source label is not the class of the target image's nearest centre; --no-center-aware switches that off.",
        )


def pseudo_labels(features: Tensor, logits: Tensor) -> Tensor:
    """Labels by weighted k-means centres with one refinement (Eq. 5, 6, 7): the target's features [Nt, D] and logits
    [Nt, K] -> [Nt].

    Only a class that the classifier predicts at least once may become a label. A class that wins no image in the first
    assignment has no centre to refine and is left out of the second: the authors' code lets such a class take every
    image (docs/method.md, section 6, trap 1)."""
    probabilities = logits.softmax(dim=1)  # [Nt, K]
    ones = features.new_ones(len(features), 1)
    x = F.normalize(torch.cat([features, ones], dim=1))  # [Nt, D + 1]
    allowed = _used(logits.argmax(dim=1), logits.shape[1])
    labels = nearest_center(x, centers(x, probabilities), allowed)  # Eq. 5, 6
    assigned = F.one_hot(labels, logits.shape[1]).to(x.dtype)
    return nearest_center(x, centers(x, assigned), allowed & _used(labels, logits.shape[1]))  # Eq. 7, 6


def centers(x: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the features for each class: [N, D], [N, K] -> [K, D]."""
    return (weights.T @ x) / (weights.sum(dim=0)[:, None] + EPSILON)


def nearest_center(x: Tensor, centers: Tensor, allowed: Tensor) -> Tensor:
    """The allowed class whose centre has the highest cosine with each row of x."""
    similarity = F.normalize(x) @ F.normalize(centers).T  # [N, K]
    return similarity.masked_fill(~allowed, -torch.inf).argmax(dim=1)


def _used(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels, minlength=classes) > 0
