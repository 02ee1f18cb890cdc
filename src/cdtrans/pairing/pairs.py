"""Training pairs: two-way neighbours, kept where the centres agree with the source's label (section 3.2)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdtrans.errors import CdtransError
from cdtrans.pairing.centers import pseudo_labels
from cdtrans.pairing.neighbours import Neighbours, normalised, two_way


@dataclass(frozen=True)
class Pairs:
    """A list of (source image, target image), with the labels each side is trained on."""

    source: Tensor  # [P] indices
    target: Tensor  # [P] indices
    source_labels: Tensor  # [P]
    target_labels: Tensor  # [P] pseudo labels
    proposed: int  # how many the two-way search offered before the centre-aware filter

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

    def arrays(self) -> dict[str, np.ndarray]:
        names = ("source", "target", "source_labels", "target_labels")
        return {name: getattr(self, name).cpu().numpy().astype(np.int32) for name in names}


def build_pairs(
    source_features: Tensor,
    source_labels: Tensor,
    target_features: Tensor,
    target_logits: Tensor,
    *,
    center_aware: bool = True,
    mutual: str = "twice",
) -> Pairs:
    """Encoded domains -> pairs. No target label comes in: only features and the model's own logits."""
    neighbours = two_way(normalised(source_features), normalised(target_features))
    labels = pseudo_labels(target_features, target_logits)
    source, target = union(neighbours, mutual)
    proposed = len(source)
    if center_aware:
        agree = source_labels[source] == labels[target]
        source, target = source[agree], target[agree]
    return Pairs(source, target, source_labels[source], labels[target], proposed)


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


def require_pairs(pairs: Pairs, round_number: int) -> None:
    """Stage 2 cannot train on nothing; say what rejected the pairs and what to try."""
    if len(pairs) < 2:
        raise CdtransError(
            f"Only {len(pairs)} of {pairs.proposed} pairs were left in round {round_number}: the others were rejected "
            "because the source image's class differs from the class of the target's nearest centre; train the source "
            "model longer (--source-epochs), use a stronger backbone, or switch the filter off (--no-center-aware)."
        )
