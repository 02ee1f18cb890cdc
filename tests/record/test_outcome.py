"""The outcome: what it decides, that it survives JSON, and that everything about it is said."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cdtrans.record import wording
from cdtrans.record.outcome import Choice, Crowd, Interval, Measure, Outcome, Setback, Verdict
from cdtrans.schema import Misfit, build
from support import says

RUN = Path("a run")
DECISIVE, OPEN = Measure("training-broken", 0.01, 0.05, decisive=True), Measure("source-forgotten", 0.8, 0.9)
NUMBERS = dict.fromkeys(("unseen", "chance", "before", "after", "first", "shift"), 0.25)


def outcome(kind: Any = "better", *measures: Measure, **fields: Any) -> Outcome:
    numbered = tuple(replace(measure, numbers=NUMBERS) for measure in measures)
    values = {"guard": True, "adapted_epoch": 7, "labels": 47, "selection": "consensus", "choice": Choice("source", 0)}
    values["estimates"] = {"source": None, "adapted": Interval(0.5, 0.75)}
    made = Outcome(verdict=Verdict(kind, numbered), **values | fields)
    return made.choose(made.own_choice)


@pytest.mark.parametrize(
    ("given", "model", "harm", "badge"),
    [
        (outcome("better"), "adapted", False, "better"),
        (outcome("better", setback=Setback(0.8, 0.4)), "adapted", False, "later epochs went wrong"),
        (outcome("unknown", OPEN), "adapted", False, "cannot tell"),
        (outcome("harm", DECISIVE), "source", True, "harm found"),
        (outcome("harm", DECISIVE, guard=False), "adapted", False, "harm found"),
        (outcome("harm", DECISIVE, adapted_epoch=0), "source", True, "stopped"),
        (outcome("harm", DECISIVE).choose("adapted"), "adapted", False, "chosen by hand"),
        (outcome("better", trained_with_labels=True), "adapted", False, "trained with target labels"),
    ],
)
def test_the_choice_follows_the_verdict_until_a_person_chooses(
    given: Outcome, model: str, harm: bool, badge: str
) -> None:
    assert (given.choice.model, given.harm, wording.headline(given).badge) == (model, harm, badge)
    assert given.choice.epoch == (7 if model == "adapted" else 0)
    assert given.choose("source").choose("adapted").choose(given.choice.model) == given
    assert wording.chosen_model(given.choice) in wording.headline(given).sentence or given.trained_with_labels


def test_it_survives_json_and_nothing_else_does() -> None:
    whole = outcome("unknown", OPEN, DECISIVE, crowd=Crowd("fox", 0.8), setback=Setback(0.8, 0.4))
    values = json.loads(json.dumps(asdict(whole)))
    assert build(Outcome, values) == whole
    for change in ({"verdict": 5}, {"labels": "47"}, {"choice": {"model": "last", "epoch": 1}}, {"unheard of": 1}):
        with pytest.raises(Misfit):
            build(Outcome, values | change)


def test_every_measure_has_its_sentences() -> None:
    for code in wording.MEASURES:
        finding = Measure(code, -1.0, 0.5, numbers=NUMBERS, cause="the loss was not finite")
        (sentence,) = wording.findings(outcome("unknown", finding))
        assert sentence.startswith(code.replace("-", " "))
        assert len(sentence) > len(code) + 10


def test_an_explanation_says_what_was_found_and_what_to_do() -> None:
    paragraph = wording.explanation(outcome("unknown", OPEN, crowd=Crowd("fox", 0.8)), RUN)
    assert says(paragraph, "source forgotten", "'fox'", "80%", "47 labels", "cdtrans ask")
    refused = wording.explanation(outcome("harm", DECISIVE), RUN)
    assert says(refused, "cdtrans choose 'a run' adapted", "--model adapted", "47 labels")
    assert "choose" not in wording.explanation(outcome("harm", DECISIVE, adapted_epoch=0), RUN)
    assert says(wording.explanation(outcome("better", setback=Setback(0.8, 0.4)), RUN), "0.800", "0.400", "epoch 7")


def test_an_estimate_is_a_range_or_a_number_of_labels() -> None:
    better = outcome("better")
    assert says(wording.estimate(better), "50% to 75%", "without labels")
    assert says(wording.estimate(better, "source"), "unknown", "47 labels")
    assert says(wording.estimate(better, "last"), "not estimated")
    assert "50% to 75%" in wording.done(better, RUN, with_estimate=True)


@pytest.mark.parametrize(
    ("predicted", "source", "crowd"),
    [
        ([2, 3, 80, 5, 4, 3, 3], [9] * 7, Crowd("c", 0.8)),
        ([50, 25, 25, 0, 0, 0, 0], [9] * 7, None),  # half, not more
        ([59, 41], [1, 1], None),  # more than half of two classes is nothing special
        ([60, 20, 10, 5, 3, 1, 1], [30, 10, 5, 5, 5, 5, 5], None),  # the source is nearly as uneven
        ([60, 10, 10, 10, 10], [1, 100, 100, 100, 100], None),  # a rare class may take three times a fifth
        ([61, 9, 10, 10, 10], [1, 100, 100, 100, 100], Crowd("a", 0.61)),
        ([61, 9, 10, 10, 10], [0] * 5, Crowd("a", 0.61)),  # a source without counts
        ([0] * 7, [9] * 7, None),
    ],
)
def test_a_class_that_most_images_are_put_into(predicted: list[int], source: list[int], crowd: Crowd | None) -> None:
    assert Crowd.of(predicted, source, "abcdefg") == crowd
