"""Each way to do harm is found, by its name, and a healthy model is left alone."""

import dataclasses

import pytest
import torch

from cdtrans.errors import Hopeless
from cdtrans.trust import guard
from cdtrans.trust.guard import (
    Verdict,
    decide,
    fell_later,
    gave_up,
    judge_adapted,
    judge_source,
    labels_to_settle,
)
from impressions import impression_of
from support import says

TARGET = torch.arange(600) % 6


def names(measures: list[guard.Measure]) -> list[str]:
    """Of the harm that was found."""
    return [f.name for f in guard.objections(measures)]


def healthy(**changes: object):
    return impression_of(TARGET, classes=6, **changes)  # type: ignore[arg-type]


def test_a_healthy_run_is_better() -> None:
    assert names(judge_source(healthy())) == []
    assert names(judge_adapted(healthy(), healthy())) == []
    assert decide(judge_adapted(healthy(), healthy()), guard=True).verdict == "better"


@pytest.mark.parametrize(("share", "found"), [(guard.LEARNT - 0.01, ["source not learnt"]), (guard.LEARNT + 0.01, [])])
def test_a_source_that_was_not_learnt(share: float, found: list[str]) -> None:
    assert names(judge_source(healthy(source_right=share, source_learnable=0.9))) == found


def test_a_source_that_is_forgotten() -> None:
    assert names(judge_adapted(healthy(), healthy(source_right=0.75))) == ["source forgotten"]
    assert names(judge_adapted(healthy(source_right=0.9), healthy(source_right=0.75))) == []


def test_what_speaks_against_the_start_speaks_against_the_end() -> None:
    assert "source not learnt" in names(judge_adapted(healthy(source_right=0.2), healthy(source_right=0.2)))


def test_predictions_that_the_source_does_not_support_are_no_harm_but_unknown() -> None:
    """The features of the source-only model are asked, about the adapted model's predictions."""
    apart = torch.where(torch.arange(600) < 450, (TARGET + 1) % 6, TARGET)  # of the nearest source images
    measures = judge_adapted(healthy(nearest=apart), healthy())
    assert names(measures) == ["not supported"]
    verdict = decide(measures, guard=True, labels=47)
    assert verdict.verdict == "unknown"
    assert says(verdict.paragraph, "cannot tell", "adapted model", "About 47", "other or fewer classes")
    assert names(judge_adapted(healthy(), healthy(nearest=apart))) == [], "the adapted model's features are not asked"


def test_a_target_of_few_of_the_classes_is_unknown() -> None:
    few = torch.arange(600) % 2
    assert names(judge_adapted(impression_of(few, classes=6), impression_of(few, classes=6))) == ["not supported"]


@pytest.mark.parametrize(("differ", "labels"), [(300, 40), (60, 200), (6, 600), (0, 600)])
def test_labels_that_would_settle_it(differ: int, labels: int) -> None:
    """Enough for 20 images on which the models differ, and never more than there are."""
    other = torch.where(torch.arange(600) < differ, (TARGET + 1) % 6, TARGET)
    assert labels_to_settle(healthy(), impression_of(other, classes=6)) == labels


def test_training_that_broke_off_says_why_without_advice_for_another_case() -> None:
    cause = "The loss is not finite in the adaptation stage, epoch 2, step 3"
    finding = gave_up(Hopeless(cause, "The last good state is in 'x'."))
    assert finding.harm
    assert says(finding.sentence, "not finite", "epoch 2, step 3")
    assert "'x'" not in finding.sentence


def test_a_fall_after_the_chosen_epoch_is_told_but_not_held_against_it() -> None:
    assert fell_later(2, [0.8]) == ""
    assert fell_later(2, [0.8, 0.73, 0.75]) == ""
    warning = fell_later(2, [0.8, 0.7, 0.79])
    assert "after epoch 2" in warning
    assert "from 0.800 to 0.700" in warning, "the lowest, though the last has recovered"
    kept = decide([], guard=True, warning=warning)
    assert kept.verdict == "better"
    assert kept.paragraph.endswith(warning)
    assert kept.summary()["warning"] == warning


def test_the_verdict_says_what_was_found_and_what_is_chosen() -> None:
    measures = judge_adapted(healthy(), healthy(source_right=0.3))
    harm, off = decide(measures, guard=True), decide(measures, guard=False)
    assert (harm.verdict, off.verdict, decide([], guard=True).verdict) == ("harm", "off", "better")
    assert says(harm.paragraph, "did harm", "source-only model")
    assert says(off.paragraph, "adapted model is kept")
    for verdict in (harm, off):
        assert says(verdict.paragraph, "30%", "accuracy on the source")
    assert "is better" in Verdict("better", []).paragraph
    stopped = decide(measures, guard=True, adapted=False)
    assert stopped.verdict == "harm"
    assert says(stopped.paragraph, "stopped the run")
    assert "did harm" not in stopped.paragraph
    (finding,) = harm.summary()["findings"]
    assert finding.keys() == {"name", "what", "found", "limit", "healthy", "sentence", "decisive"}


def test_labels_that_a_probe_cannot_learn_are_harm_also_if_the_model_learnt_them_by_heart() -> None:
    at_chance = healthy(source_learnable=0.18)
    assert names(judge_source(at_chance)) == ["labels not learnable"]
    assert decide(judge_source(at_chance), guard=True, adapted=False).verdict == "harm"
    assert names(judge_source(healthy(source_learnable=0.4))) == []


def test_everything_measured_is_told_harm_or_not() -> None:
    """So that people see how near to a limit their run came."""
    measures = decide(judge_adapted(healthy(), healthy(source_right=0.75)), guard=True).summary()["measures"]
    assert {m["name"]: m["harm"] for m in measures} == {
        "source not learnt": False,
        "labels not learnable": False,
        "source forgotten": True,
        "not supported": False,
    }
    found = {m["name"]: (m["found"], m["limit"], m["healthy"]) for m in measures}
    assert found["source forgotten"] == (pytest.approx(0.75, abs=0.01), guard.FORGOTTEN, "above")
    assert found["not supported"] == (pytest.approx(1, abs=0.05), guard.SUPPORTED, "above")


def test_without_source_images_nothing_is_judged_and_that_is_said() -> None:
    alone = dataclasses.replace(healthy(), source_labels=torch.zeros(0, dtype=torch.long))
    assert judge_source(alone) == []
    verdict = decide(judge_adapted(alone, alone), guard=True, labels=30)
    assert verdict.verdict == "unknown"
    assert says(verdict.paragraph, "cannot tell", "no source images", "not checked", "About 30 labels")
    broken = [gave_up(Hopeless("The loss is not finite", "")), *judge_adapted(alone, alone)]
    assert decide(broken, guard=True).verdict == "harm", "that needs no source"
