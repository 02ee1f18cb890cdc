"""Runs whose pairs are made with the answer key, to see what better or worse pairs would be worth: the last row of the
paper's Table 5, and Fig. 2b (sampled_pairs.py). They alone train on target labels; their config.yaml says so (`pairing:
ground_truth`, `sampled` or `sampled_true`), and `cdtrans adapt` refuses these settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdtrans.config import PAIRINGS_WITH_KEY, Config, layered_config
from cdtrans.errors import CdtransError
from cdtrans.model.encoding import Encoded
from cdtrans.pairing.neighbours import normalised, two_way
from cdtrans.pairing.pairs import Search, union
from cdtrans.paper.pair_quality import Answers, read_answers
from cdtrans.paper.sampled_pairs import sampled_pairs
from cdtrans.run.pipeline import Result, run_pipeline
from cdtrans.runtime.screen import Screen

# what follows from a pair's being made with the key: it is trained on, unfiltered, and says what its target is taught
SETTINGS = {"center_aware": False, "target_class": "pair", "self_training": "none"}


def adapt_with_key(
    source: Path,
    target: Path,
    *,
    key: Path,
    out: Path,
    screen: Screen,
    preset: str | None = None,
    config: Path | None = None,
    force: bool = False,
    **settings: Any,
) -> Result:
    """`adapt` on pairs of the key. All else, the guard and the choice of the epoch too, goes without it."""
    chosen, _ = layered_config(source, target, preset, config, settings | SETTINGS)
    if chosen.pairing not in PAIRINGS_WITH_KEY:
        raise CdtransError(f"'--pairing {chosen.pairing}' needs no answer key; 'cdtrans adapt' has it.")
    answers = read_answers(chosen, key, screen)

    def rearranged(found: Search, source: Encoded, target: Encoded) -> Search:
        pairs = pairs_with_key(chosen)(found, source, target, true_labels(answers, out, target))
        if not len(pairs.source):
            raise CdtransError(f"The answer key '{key}' names no target image of a class of the source.")
        return pairs

    return run_pipeline(chosen, out, screen, force=force, rearranged=rearranged)


def pairs_with_key(config: Config) -> Callable[[Search, Encoded, Encoded, Tensor], Search]:
    """What makes a run's pairs of a search, both domains as the model sees them, and the target's true labels."""
    if config.pairing == "ground_truth":
        return lambda found, source, target, true: true_pairs(found, source, target, true, config.mutual_pairs)
    return lambda found, source, target, true: sampled_pairs(found, true, config)


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
