"""The chosen epoch and its weights."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from cdtrans.config import HINTS
from cdtrans.trust.scores import LabelFreeScores
from cdtrans.trust.selection import CONSENSUS, Watch, consensus


def scores(value: float, **others: float) -> dict[str, float]:
    every = dict.fromkeys((*LabelFreeScores._fields, "holdout"), 0.5) | {"information": value} | others
    return every | {"consensus": consensus(every)}


def watch(rule: str) -> Watch:
    return Watch(None, None, None, rule, None)  # type: ignore[arg-type]


def chosen(rule: str, values: list[dict[str, float]]) -> tuple[int, float]:
    """The epoch, and the weight of the model after restoring: in epoch e it was e."""
    model, selection = nn.Linear(1, 1), watch(rule)
    for epoch, value in enumerate(values, 1):
        nn.init.constant_(model.weight, epoch)
        selection.consider(epoch, value, model)
    assert selection.best is not None
    model.load_state_dict(selection.best.weights)
    return selection.best.epoch, float(model.weight.detach())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_the_best_epoch_wins_and_its_own_weights_come_back(values: list[float]) -> None:
    best = max(range(len(values)), key=lambda i: (values[i], i)) + 1  # the later one of equals
    assert chosen("information", [scores(v) for v in values]) == (best, best)


def test_last_is_the_last_whatever_the_scores() -> None:
    assert chosen("last", [scores(0.9), scores(0.5), scores(0.1)]) == (3, 3)


def test_the_choice_survives_a_kill_with_a_copy_of_weights_and_buffers() -> None:
    model, first, later = nn.BatchNorm1d(2), watch("information"), watch("information")
    later.load_state_dict(first.state_dict())
    assert later.best is None
    model(torch.randn(8, 2) + 5)
    chosen = {name: x.clone() for name, x in model.state_dict().items()}
    first.consider(1, scores(0.9), model)
    model(torch.randn(8, 2) - 50)
    nn.init.constant_(model.weight, 2.0)
    later.load_state_dict(first.state_dict())
    later.consider(2, scores(0.3), model)
    assert later.best is not None
    assert (later.best.epoch, later.best.value) == (1, 0.9)
    assert all(torch.equal(later.best.weights[name], x) for name, x in chosen.items())


def test_consensus_takes_confidence_only_together_with_diversity() -> None:
    assert "confidence" not in CONSENSUS
    assert "density" not in CONSENSUS
    fair = {"information": 0.5, "nuclear_norm": 0.6, "clusters": 0.7, "centers": 0.8, "confidence": 0.1}
    assert consensus(fair) == pytest.approx((0.5 * 0.6 * 0.7 * 0.8) ** 0.25)
    assert consensus(fair | {"information": 0.0}) == 0, "however good the rest"


def test_every_rule_can_be_asked_for_and_every_score_is_a_rule() -> None:
    rules = HINTS["select"].__args__
    assert set(rules) == {*LabelFreeScores._fields, "consensus", "holdout", "last"} - {
        "diversity"
    }  # alone it says nothing
    for rule in rules:
        assert chosen(rule, [scores(0.5)])[0] == 1
