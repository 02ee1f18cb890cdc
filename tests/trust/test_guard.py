"""Each way to do harm is found, by its name, and a healthy model is left alone."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from cdtrans.errors import Hopeless
from cdtrans.record.outcome import Measure, Setback
from cdtrans.trust import guard
from cdtrans.trust.guard import decide, fell_later, gave_up, judge_adapted, judge_source, labels_to_settle
from cdtrans.trust.support import Evidence, Impression
from impressions import evidence_of, impression_of

TARGET = torch.arange(600) % 6


def names(measures: Sequence[Measure]) -> list[str]:
    return [measure.code for measure in measures if measure.harm]


def healthy(source_right: float = 1.0) -> Impression:
    return impression_of(TARGET, classes=6, source_right=source_right)


def evidence(nearest: torch.Tensor = TARGET, learnable: float = 0.9) -> Evidence:
    return evidence_of(nearest, classes=6, learnable=learnable)


def test_a_healthy_run_is_better() -> None:
    assert names(judge_source(healthy(), evidence())) == []
    assert names(judge_adapted(healthy(), healthy(), evidence())) == []
    assert decide(judge_adapted(healthy(), healthy(), evidence())).kind == "better"


@pytest.mark.parametrize(("share", "found"), [(guard.LEARNT - 0.01, ["source-not-learnt"]), (guard.LEARNT + 0.01, [])])
def test_a_source_that_was_not_learnt(share: float, found: list[str]) -> None:
    assert names(judge_source(healthy(source_right=share), evidence())) == found


@pytest.mark.parametrize(("kept", "verdict"), [(0.95, "better"), (0.75, "unknown"), (0.4, "unknown")])
def test_a_source_that_is_forgotten(kept: float, verdict: str) -> None:
    """However much of it is: a method without a source loss can forget the source and gain on the target."""
    measures = judge_adapted(healthy(), healthy(source_right=kept), evidence())
    assert names(measures) == ([] if verdict == "better" else ["source-forgotten"])
    assert decide(measures).kind == verdict
    assert names(judge_adapted(healthy(source_right=0.8), healthy(source_right=0.75), evidence())) == []


def test_predictions_at_chance_are_harm() -> None:
    """As of a model that training has ruined, even if it still knows the source."""
    ruined = impression_of(torch.randint(6, (600,), generator=torch.Generator().manual_seed(0)), classes=6)
    measures = judge_adapted(healthy(), ruined, evidence())
    assert names(measures) == ["training-broken", "not-supported"]
    assert decide(measures).kind == "harm"


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(("changed", "verdict"), [(10, "better"), (40, "unknown"), (320, "harm")])
def test_support_that_falls(changed: int, verdict: str, pretrained: bool) -> None:
    """A little, and nobody knows; far, and training went wrong. But by features that the run has not trained alone: the
    source-only model agrees with its own."""
    moved = impression_of(torch.where(torch.arange(600) < changed, (TARGET + 1) % 6, TARGET), classes=6)
    measures = judge_adapted(healthy(), moved, evidence_of(TARGET, classes=6, pretrained=pretrained))
    found = decide(measures)
    assert ("support-fell" in names(measures)) == (pretrained and verdict != "better")
    assert found.kind == (verdict if pretrained else "better")
    back = judge_adapted(moved, healthy(), evidence_of(TARGET, classes=6, pretrained=pretrained))
    assert names(back) == [], "what rises does not fall"


@pytest.mark.parametrize(("learnable", "images"), [(guard.TELLING - 0.01, 600), (0.9, guard.MANY - 4)])
def test_weak_features_or_few_images_are_not_decisive(learnable: float, images: int) -> None:
    target = TARGET[:images]
    moved = impression_of(torch.where(torch.arange(images) < 0.6 * images, (target + 1) % 6, target), classes=6)
    before = impression_of(target, classes=6)
    measures = judge_adapted(before, moved, evidence_of(target, classes=6, learnable=learnable, pretrained=True))
    assert "support-fell" in names(measures)
    assert decide(measures).kind == "unknown"


def test_predictions_that_the_source_does_not_support_are_no_harm_but_unknown() -> None:
    apart = torch.where(torch.arange(600) < 420, (TARGET + 1) % 6, TARGET)
    measures = judge_adapted(healthy(), healthy(), evidence(nearest=apart))
    assert names(measures) == ["not-supported"]
    assert decide(measures).kind == "unknown"


def test_a_target_of_few_of_the_classes_is_unknown() -> None:
    few = torch.arange(600) % 2
    both = impression_of(few, classes=6), impression_of(few, classes=6)
    assert names(judge_adapted(*both, evidence_of(few, classes=6))) == ["not-supported"]


@pytest.mark.parametrize(("differ", "labels"), [(300, 40), (120, 100), (110, 0), (6, 0), (0, 0)])
def test_labels_that_would_settle_it(differ: int, labels: int) -> None:
    """Enough for 20 images on which the models differ, but no number that nobody would label."""
    other = torch.where(torch.arange(600) < differ, (TARGET + 1) % 6, TARGET)
    assert labels_to_settle(healthy(), impression_of(other, classes=6)) == labels


def test_the_whole_of_a_small_target_is_never_to_be_labelled() -> None:
    few = torch.arange(30) % 6
    other = torch.where(torch.arange(30) < 20, (few + 1) % 6, few)
    assert labels_to_settle(impression_of(few, classes=6), impression_of(other, classes=6)) == 0


def test_training_that_broke_off_is_harm_and_says_why() -> None:
    finding = gave_up(Hopeless("The loss is not finite", "The last good state is in 'x'."))
    assert (finding.harm, finding.decisive, finding.cause) == (True, True, "The loss is not finite")


def test_a_fall_after_the_chosen_epoch_is_a_setback() -> None:
    assert fell_later([0.8]) is None
    assert fell_later([0.8, 0.73, 0.75]) is None
    assert fell_later([0.8, 0.7, 0.79]) == Setback(0.8, 0.7), "the lowest, though the last has recovered"


def test_a_run_without_an_adapted_model_cannot_be_unknown() -> None:
    measures = [Measure("not-supported", 0.1, 0.3)]
    assert (decide(measures).kind, decide(measures, adapted=False).kind) == ("unknown", "harm")


def test_labels_that_a_probe_cannot_learn_are_harm_also_if_the_model_learnt_them_by_heart() -> None:
    at_chance = judge_source(healthy(), evidence(learnable=0.18))
    assert names(at_chance) == ["labels-not-learnable"]
    assert decide(at_chance, adapted=False).kind == "harm"
    assert names(judge_source(healthy(), evidence(learnable=0.4))) == []


def test_every_measure_is_kept_harm_or_not() -> None:
    """So that people see how near to a limit their run came."""
    measures = {m.code: m for m in decide(judge_adapted(healthy(), healthy(0.75), evidence())).measures}
    assert {code: m.harm for code, m in measures.items()} == {
        "source-not-learnt": False,
        "labels-not-learnable": False,
        "source-forgotten": True,
        "training-broken": False,
        "not-supported": False,
    }
    forgotten, supported = measures["source-forgotten"], measures["not-supported"]
    assert (forgotten.value, forgotten.limit) == (pytest.approx(0.75, abs=0.01), guard.FORGOTTEN)
    assert (supported.value, supported.limit) == (pytest.approx(1 / 0.9, abs=0.05), guard.SUPPORTED)


def test_without_source_images_nothing_is_judged() -> None:
    alone = dataclasses.replace(healthy(), source_labels=torch.zeros(0, dtype=torch.long))
    assert judge_source(alone, evidence()) == []
    verdict = decide(judge_adapted(alone, alone, evidence()))
    assert (verdict.kind, names(verdict.measures)) == ("unknown", ["no-source-images"])
    broken = [gave_up(Hopeless("The loss is not finite", "")), *judge_adapted(alone, alone, evidence())]
    assert decide(broken).kind == "harm", "that needs no source"
