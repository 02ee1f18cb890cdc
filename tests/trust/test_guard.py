"""Each way to do harm is found, by its name, and a healthy model is left alone."""

import pytest
import torch

from cdtrans.errors import Hopeless
from cdtrans.trust import guard
from cdtrans.trust.guard import Verdict, decide, fell_later, gave_up, judge_adapted, judge_source, shifted
from impressions import impression_of
from support import says

TARGET = torch.arange(600) % 6
LOW, HIGH = {"consensus": 0.5}, {"consensus": 0.9}


def names(measures: list[guard.Measure]) -> list[str]:
    """Of the harm that was found."""
    return [f.name for f in guard.objections(measures)]


def healthy(**changes: object):
    return impression_of(TARGET, classes=6, **changes)  # type: ignore[arg-type]


def test_a_healthy_run_is_left_alone() -> None:
    assert names(judge_source(healthy())) == []
    assert names(judge_adapted(healthy(), healthy(), LOW, HIGH)) == []


@pytest.mark.parametrize(("share", "found"), [(guard.LEARNT - 0.01, ["source not learnt"]), (guard.LEARNT + 0.01, [])])
def test_a_source_that_was_not_learnt(share: float, found: list[str]) -> None:
    assert names(judge_source(healthy(source_right=share))) == found


@pytest.mark.parametrize(
    ("share", "found"), [(guard.SOURCE_AGREEMENT - 0.02, ["domains apart"]), (guard.SOURCE_AGREEMENT + 0.01, [])]
)
def test_domains_that_do_not_meet(share: float, found: list[str]) -> None:
    assert names(judge_source(healthy(source_agrees=share))) == found


def test_domains_that_drift_apart_in_training() -> None:
    assert names(judge_adapted(healthy(), healthy(source_agrees=0.3), LOW, HIGH)) == ["domains drifted apart"]


def test_a_source_that_is_forgotten() -> None:
    assert names(judge_adapted(healthy(), healthy(source_right=0.75), LOW, HIGH)) == ["source forgotten"]
    assert names(judge_adapted(healthy(source_right=0.9), healthy(source_right=0.75), LOW, HIGH)) == []


def test_classes_that_vanish() -> None:
    """Two of six classes are rare: nothing else shows that they are gone."""
    rare = TARGET.clone()
    rare[(TARGET >= 4) & (torch.arange(600) > 12)] = 0
    gone = torch.where(rare >= 4, 0, rare)
    before, after = (impression_of(x, centers=rare, classes=6) for x in (rare, gone))
    assert names(judge_adapted(before, after, LOW, HIGH)) == ["vanished classes"]


def test_predictions_that_shift_or_leave_the_centres() -> None:
    moved = torch.where(torch.arange(600) < 108, (TARGET + 1) % 6, TARGET)  # 18 % of the images, evenly
    assert names(judge_adapted(healthy(), impression_of(moved, classes=6), LOW, HIGH)) == []
    to_one = torch.where((torch.arange(600) < 114) & (TARGET > 0), 0, TARGET)
    assert names(judge_adapted(healthy(), impression_of(to_one, classes=6), LOW, HIGH)) == ["predictions shifted"]
    left = torch.where(torch.arange(600) < 192, (TARGET + 1) % 6, TARGET)  # 32 %
    assert names(judge_adapted(healthy(), impression_of(left, classes=6), LOW, HIGH)) == ["centres abandoned"]


def test_a_consensus_below_the_source_only_models() -> None:
    assert names(judge_adapted(healthy(), healthy(), HIGH, LOW)) == ["consensus fell"]
    assert names(judge_adapted(healthy(), healthy(), HIGH, HIGH)) == []


def test_what_speaks_against_the_start_speaks_against_the_end() -> None:
    assert "source not learnt" in names(judge_adapted(healthy(source_right=0.2), healthy(source_right=0.2), LOW, HIGH))


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
    assert kept.verdict == "kept"
    assert kept.paragraph.endswith(warning)
    assert kept.summary()["warning"] == warning


def test_shifted_is_total_variation() -> None:
    assert shifted(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 3) == 0.25
    assert shifted(torch.tensor([0, 0]), torch.tensor([1, 2]), 3) == 1.0


def test_the_verdict_says_what_was_found_and_what_is_chosen() -> None:
    measures = judge_adapted(healthy(), healthy(source_right=0.3), LOW, HIGH)
    harm, off = decide(measures, guard=True), decide(measures, guard=False)
    assert (harm.verdict, off.verdict, decide([], guard=True).verdict) == ("harm", "off", "kept")
    assert says(harm.paragraph, "did harm", "source-only model")
    assert says(off.paragraph, "adapted model is kept")
    for verdict in (harm, off):
        assert says(verdict.paragraph, "30%", "accuracy on the source")
    assert "nothing against" in Verdict("kept", []).paragraph
    stopped = decide(measures, guard=True, adapted=False)
    assert stopped.verdict == "harm"
    assert says(stopped.paragraph, "stopped the run")
    assert "did harm" not in stopped.paragraph
    (finding,) = harm.summary()["findings"]
    assert finding.keys() == {"name", "what", "found", "limit", "healthy", "sentence", "decisive"}


def test_distance_from_the_source_only_opinion_is_a_warning_and_no_harm() -> None:
    """The better the adaptation, the greater it is: five refusals of five on PACS were wrong."""
    moved = impression_of(torch.full((600,), 3), classes=6, source_agrees=0.3)
    for start in (healthy(), healthy(source_agrees=0.2)):
        verdict = decide(judge_adapted(start, moved, HIGH, LOW), guard=True)
        assert {"vanished classes", "predictions shifted", "centres abandoned"} <= set(names(verdict.measures))
        assert verdict.verdict == "unknown"
        assert says(verdict.paragraph, "cannot tell", "adapted model", "Label 50")


def test_labels_that_a_probe_cannot_learn_are_harm_also_if_the_model_learnt_them_by_heart() -> None:
    at_chance = healthy(source_learnable=0.18)
    assert names(judge_source(at_chance)) == ["labels not learnable"]
    assert decide(judge_source(at_chance), guard=True, adapted=False).verdict == "harm"
    assert names(judge_source(healthy(source_learnable=0.4))) == []


def test_everything_measured_is_told_harm_or_not() -> None:
    """So that people see how near to a limit their run came."""
    measures = decide(judge_adapted(healthy(), healthy(source_right=0.75), LOW, HIGH), guard=True).summary()["measures"]
    assert {m["name"]: m["harm"] for m in measures} == {
        "source not learnt": False,
        "labels not learnable": False,
        "domains apart": False,
        "domains drifted apart": False,
        "source forgotten": True,
        "vanished classes": False,
        "predictions shifted": False,
        "centres abandoned": False,
        "consensus fell": False,
    }
    found = {m["name"]: (m["found"], m["limit"], m["healthy"]) for m in measures}
    assert found["source forgotten"] == (pytest.approx(0.75, abs=0.01), guard.FORGOTTEN, "above")
    assert found["predictions shifted"] == (0.0, guard.SHIFTED, "below")
    assert found["consensus fell"] == (0.9, pytest.approx(0.49), "above")


def test_a_weak_source_model_is_named_as_the_cause() -> None:
    """Not the target's classes: nobody knows them before the source has been learnt."""
    weak = judge_source(healthy(source_right=0.6, source_agrees=0.3))
    assert names(weak) == ["domains apart"]
    assert says(weak[2].sentence, "60%", "train it longer")
    assert "fewer classes" not in weak[2].sentence
    assert "fewer classes" in judge_source(healthy(source_agrees=0.3))[2].sentence


@pytest.mark.parametrize("right", [0.2, 0.6])
def test_a_weak_source_model_is_told_once(right: float) -> None:
    weak = healthy(source_right=right, source_agrees=0.2)
    paragraph = decide(judge_adapted(weak, weak, LOW, HIGH), guard=True).paragraph
    assert "domains apart" in paragraph
    assert "domains drifted apart" in paragraph
    assert paragraph.count(f"only {right:.0%} of the images it was trained on") == 1
    assert "fewer classes" not in paragraph
