"""Training pairs: two-way neighbours, kept where the centres agree with the source's label (section 3.2)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdtrans.errors import Hopeless
from cdtrans.pairing.centers import pseudo_labels
from cdtrans.pairing.neighbours import Neighbours, normalised, two_way

ONE_WAY = ("one_way_source", "one_way_target")


@dataclass(frozen=True)
class Pairs:
    """A list of (source image, target image), with the labels each side is trained on."""

    source: Tensor  # [P] indices
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo labels, or [P, K] soft ones
    proposed: int  # how many the search offered before the centre-aware filter

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> "Pairs":
        source, target = self.source.to(device), self.target.to(device)
        return Pairs(source, target, self.source_labels.to(device), self.target_labels.to(device), self.proposed)

    def summary(self) -> dict[str, int]:
        """What the log and the screen say about a rebuild."""
        return {
            "proposed": self.proposed,
            "kept": len(self),
            "sources_used": len(self.source.unique()),
            "targets_used": len(self.target.unique()),
            "classes_used": len(self.source_labels.unique()),
        }


@dataclass(frozen=True)
class Search:
    """What a search for pairs came to: all that it proposed, and what it says of the two domains."""

    source: Tensor  # [P] indices
    target: Tensor  # [P] indices
    kept: Tensor  # [P] bool: passed the centre-aware filter
    labels: Tensor  # [Ns] of the source
    centers: Tensor  # [Nt] pseudo labels
    nearest: Tensor  # [Nt] the label of each target's nearest source image
    found: Tensor  # [Ns] the pseudo label of each source's nearest target image
    target_class: str = "center"
    pseudo_labels: Tensor | None = None  # [Nt, K] of self-training, which has its own

    def pairs(self) -> Pairs:
        """The pairs to train on. Where the filter is on, a target image's centre and its pair are of one class. Where
        it is off, the authors teach the centre's; without any use of centres (`target_class="pair"`) it is the source
        image's, and the pair alone is the pseudo label."""
        source, target = self.source[self.kept], self.target[self.kept]
        return Pairs(source, target, self.labels[source], self._taught()[self.kept], proposed=len(self.source))

    def _taught(self) -> Tensor:
        """[P], or [P, K] of soft labels: what the target image of each proposal would be taught."""
        if self.pseudo_labels is not None:
            return self.pseudo_labels[self.target]
        return self.labels[self.source] if self.target_class == "pair" else self.centers[self.target]

    def agreement(self) -> dict[str, float]:
        """How often the nearest image of the other domain is of one's own class, seen from each side. Of the two the
        source's is the telling one: its labels are true, so where few agree, the target's centres are not classes."""
        source = (self.found == self.labels).double().mean()
        return {
            "source_agreement": float(source),
            "target_agreement": float((self.nearest == self.centers).double().mean()),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """Every proposal with its labels, for people who ask why a pair was kept or not: the target image's is what it
        was taught, and of a rejected pair its centre's class, for which it was rejected."""
        taught = self._taught()  # [P]
        taught = taught.argmax(dim=1) if taught.ndim == 2 else taught
        target_labels = torch.where(self.kept, taught, self.centers[self.target])
        numbers = {"source": self.source, "target": self.target}
        numbers |= {"source_labels": self.labels[self.source], "target_labels": target_labels}
        arrays = {name: x.cpu().numpy().astype(np.int32) for name, x in numbers.items()}
        return arrays | {"kept": self.kept.cpu().numpy()}


def search_pairs(
    source_features: Tensor,
    source_labels: Tensor,
    target_features: Tensor,
    target_logits: Tensor,
    *,
    center_aware: bool = True,
    mutual: str = "twice",
    pairing: str = "two_way",
    target_class: str = "center",
) -> Search:
    """Encoded domains -> pairs. No target label comes in: only features and the model's own logits."""
    neighbours = two_way(normalised(source_features), normalised(target_features))
    centers = pseudo_labels(target_features, target_logits)
    source, target = one_way(neighbours, pairing) if pairing in ONE_WAY else union(neighbours, mutual)
    kept = source_labels[source] == centers[target] if center_aware else torch.ones_like(source, dtype=torch.bool)
    nearest, found = source_labels[neighbours.source_of_target], centers[neighbours.target_of_source]
    return Search(source, target, kept, source_labels, centers, nearest, found, target_class)


def union(neighbours: Neighbours, mutual: str) -> tuple[Tensor, Tensor]:
    """P_T then P_S, in the authors' order. A pair found from both sides stands in their list twice (`mutual="twice"`);
    the paper's union holds it once (`mutual="once"`)."""
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
    """Stage 2 cannot train on nothing; say what rejected the pairs and what to try."""
    if len(pairs) < 2:
        raise Hopeless(
            f"Only {len(pairs)} of {pairs.proposed} pairs were left in epoch {epoch}: the others were rejected "
            "because the source image's class differs from the class of the target's nearest centre; train the source "
            "model longer (--source-epochs), use a stronger backbone, or switch the filter off (--no-center-aware)."
        )
