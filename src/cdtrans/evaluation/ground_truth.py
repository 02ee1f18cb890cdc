"""The last row of the paper's Table 5: a run whose pairs are made with the answer key, to see what better pairs would
be worth. It is the one run that trains on target labels; its config.yaml says `pairing: ground_truth`, a setting that
`cdtrans adapt` refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdtrans.errors import CdtransError
from cdtrans.evaluation.pair_quality import Answers, read_answers
from cdtrans.model.encoding import Encoded
from cdtrans.pairing.neighbours import normalised, two_way
from cdtrans.pairing.pairs import Search, union
from cdtrans.pipeline import Result, layered_config, run_pipeline
from cdtrans.ranks import joined
from cdtrans.screen import Screen

SETTINGS = {"pairing": "ground_truth", "center_aware": False, "target_class": "pair"}


def adapt_with_key(
    source: Path,
    target: Path,
    *,
    key: Path,
    out: Path,
    screen: Screen,
    preset: str | None = None,
    config: Path | None = None,
    **settings: Any,
) -> Result:
    """`adapt`, but every pair is of one true class. All else, the guard and the choice of the epoch too, goes without
    the key."""
    chosen, _ = layered_config(source, target, preset, config, settings | SETTINGS)
    answers = read_answers(chosen, key)

    def rearranged(found: Search, source: Encoded, target: Encoded) -> Search:
        pairs = true_pairs(found, source, target, true_labels(answers, out, target), chosen.mutual_pairs)
        if not len(pairs.source):
            raise CdtransError(f"The answer key '{key}' names no target image of a class of the source.")
        return pairs

    with joined():
        return run_pipeline(chosen, out, screen, rearranged=rearranged)


def true_labels(answers: Answers, run: Path, target: Encoded) -> Tensor:
    return torch.from_numpy(answers.of_target(run)).to(target.features.device)  # [Nt]


def true_pairs(found: Search, source: Encoded, target: Encoded, true: Tensor, mutual: str) -> Search:
    """Eq. 3 and 4 within each class: every image with its nearest of the same class in the other domain. What the
    search says of the domains themselves stays as the model sees it."""
    f_s, f_t = normalised(source.features), normalised(target.features)
    pairs = [torch.empty(2, 0, dtype=torch.long, device=true.device)]
    for label in found.labels.unique():
        s, t = (found.labels == label).nonzero().squeeze(1), (true == label).nonzero().squeeze(1)
        if len(t):
            i, j = union(two_way(f_s[s], f_t[t]), mutual)
            pairs.append(torch.stack([s[i], t[j]]))
    sources, targets = torch.cat(pairs, dim=1)
    return replace(found, source=sources, target=targets, kept=torch.ones_like(sources, dtype=torch.bool))
