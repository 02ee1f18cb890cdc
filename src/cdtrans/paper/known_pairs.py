"""Methods whose pairs are made with target labels, to measure the worth of better or worse pairs: the last row of the
paper's Table 5 (`ground_truth`), and its Fig. 2b (research/figures).

They alone train on target labels. `cdtrans adapt` refuses them: only ablations use them, with labels that the user
hands over, and model, config.yaml, result.json and report say so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from cdtrans.config import BranchOptions, is_method_file
from cdtrans.errors import DataError
from cdtrans.methods import class_in_file, method_class
from cdtrans.methods.base import Method, Round
from cdtrans.methods.cdtrans import ThreeBranches
from cdtrans.pairing.neighbours import two_way, unit_rows
from cdtrans.pairing.pairs import Domains, Proposals, proposed
from cdtrans.schema import option


class KnownPairs(ThreeBranches):
    """CDTrans on pairs that its plan makes with the target's true labels. A target image is taught its pair's class."""

    uses_target_labels = True
    pairs_mean = "The two images of a pair are nearest neighbours or of one class, by the target's true labels."

    true_labels: ClassVar["staticmethod[[], Tensor]"]  # [Nt] the target's classes; UNKNOWN for an image without a label

    @classmethod
    def with_labels(cls, read: Callable[[], Tensor]) -> type[Self]:
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
        f_s, f_t = unit_rows(domains.source.features), unit_rows(domains.target.features)
        pairs = [torch.empty(2, 0, dtype=torch.long, device=true.device)]
        for label in labels.unique():
            s, t = (labels == label).nonzero().squeeze(1), (true == label).nonzero().squeeze(1)
            if len(t):
                i, j = proposed(two_way(f_s[s], f_t[t]), "two_way", self.options.mutual_pairs)
                pairs.append(torch.stack([s[i], t[j]]))
        source, target = torch.cat(pairs, dim=1)
        return Proposals(source, target, labels[source], labels[source])


def known_pairs_class(name: str) -> type[KnownPairs] | None:
    """The class of a method that makes its pairs with target labels, by its name or as FILE.py:CLASS."""
    if not is_method_file(name):
        return GroundTruth if name == "ground_truth" else None
    kind = class_in_file(*name.rsplit(":", 1))
    return kind if issubclass(kind, KnownPairs) else None


def row_class(method: str) -> type[Method]:
    """The class of an ablation's method, with or without target labels."""
    return known_pairs_class(method) or method_class(method)
