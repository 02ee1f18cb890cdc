"""The first line of the page: measured, else estimated, else unknown."""

from dataclasses import replace
from typing import Any

import pytest

from cdtrans.reporting.answer import Answer, answer
from cdtrans.reporting.sections import Estimate, Missing
from cdtrans.reporting.target_labels import labelled_results
from run_folders import record
from support import says

ESTIMATE = Estimate(0.47, 0.98, "Estimated: 47% to 98%.", known=True)


def measured(images: int, right: int, **more: Any) -> Answer:
    evaluation = {"accuracy": right / images, "accuracy_interval": [0.4217, 0.6781], "images": images}
    evaluation |= {"confusion": [[right, images - right], [0, 0]], "classes": ["a", "b"]}
    of_run = record(evaluation=evaluation | more)
    return answer(of_run, ESTIMATE, labelled_results(of_run))


def test_what_was_measured_comes_before_what_is_estimated() -> None:
    found = measured(50, 28, whole_target=False)
    assert (found.kind, found.value, found.command) == ("measured", "56%", "")
    assert found.headline == "The adapted model is right on 56% of 50 labelled target images."
    assert says(found.note, "50 target images", "95% interval: 42 to 68%")


def test_of_the_whole_target_the_interval_is_for_others() -> None:
    found = measured(2344, 1184, whole_target=True)
    assert found.headline == "The adapted model is right on 50.5% of the target images."
    assert says(found.note, "all 2,344 target images", "new images like these: 42.2 to 67.8%")


def test_an_older_evaluation_has_no_interval() -> None:
    found = measured(50, 28, accuracy_interval=None)
    assert found.value == "56%"
    assert "interval" not in found.note


def test_the_labels_of_answer_measure_it_too() -> None:
    interval = {"estimate": 0.6889, "low": 0.563, "high": 0.798}
    result = {"images": 119, "labelled": 55, "random": 36, "adapted": interval, "source": None}
    found = answer(record(answers={"result": result}), ESTIMATE, Missing("No labels."))
    assert (found.kind, found.value, found.command) == ("measured", "69%", "")
    assert says(found.headline, "adapted model", "right on about 69% of the target images")
    assert says(found.note, "36 random target images", "95% interval: 56 to 80%")
    whole = answer(record(answers={"result": result | {"labelled": 119}}), ESTIMATE, Missing("No labels."))
    assert whole.headline == "The adapted model is right on 69% of the target images."
    assert whole.note == "measured on all 119 target images"
    of_source = record(answers={"result": result}, result={"chosen_epoch": 0, "chosen_model": "source"})
    assert answer(of_source, ESTIMATE, Missing("No labels.")).kind == "estimated", "another model was measured"
    for damaged in ({}, {"result": {}}, {"result": {"adapted": {"estimate": "x"}}}, {"result": 3}):
        assert answer(record(answers=damaged), ESTIMATE, Missing("No labels.")).kind == "estimated"


def test_without_labels_it_is_an_estimate_and_how_to_measure_it() -> None:
    found = answer(record(), ESTIMATE, Missing("No labels."))
    assert (found.kind, found.value) == ("estimated", "47 to 98%")
    assert "without labels" in found.note
    assert says(found.headline, "estimated", "47 to 98%")
    assert found.command == "cdtrans ask run"


@pytest.mark.parametrize("estimate", [Missing("This run made none."), replace(ESTIMATE, known=False)])
def test_else_it_is_unknown_and_says_why(estimate: Estimate | Missing) -> None:
    of_run = record(result={"chosen_epoch": 0, "chosen_model": "source"})
    found = answer(of_run, estimate, Missing("No labels."))
    assert (found.kind, found.value) == ("unknown", "unknown")
    assert says(found.headline, "source-only model", "unknown")
    assert found.note in ("This run made none.", ESTIMATE.sentence)
    assert found.command
