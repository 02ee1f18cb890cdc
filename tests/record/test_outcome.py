"""The outcome: what it decides, that it survives JSON, and that everything about it is said."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cdtrans.record import wording
from cdtrans.record.outcome import (
    Basis,
    Choice,
    ClassSet,
    Crowd,
    Interval,
    Measure,
    Measured,
    NoClassCurve,
    Outcome,
    Scores,
    Setback,
    Support,
    Verdict,
)
from cdtrans.schema import Misfit, build
from support import says

RUN = Path("a run")
DECISIVE, OPEN = Measure("training-broken", 0.01, 0.05, decisive=True), Measure("source-forgotten", 0.8, 0.9)
UNSUPPORTED = Measure("not-supported", 0.1, 0.3)
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


def basis(source: float, adapted: float, features: Any = "pretrained") -> Basis:
    """These agreements with the nearest source images."""
    support = {"source": Support(0.5, source, 0.4), "adapted": Support(0.5, adapted, 0.4)}
    return Basis(features, 0.8, 0.8, support, {"source": 0.0, "adapted": 0.0})


def measured(right: int, of: int, *, no_class: int = 0, low: float = 0.0, high: float = 1.0, **fields: Any) -> Measured:
    scores = Scores(right / of, Interval(low, high), right / of, Interval(low, high), (right,), (of,))
    values = {"model": "adapted", "classes": ("a",), "images": of, "target": 500, "whole_target": False}
    return Measured(**values | {"models": {"adapted": scores}, "no_class": no_class, "random": True} | fields)


@pytest.mark.parametrize(
    ("change", "model"),
    [
        ({}, "source"),
        ({"basis": basis(0.3, 0.5)}, "adapted"),
        ({"basis": basis(0.5, 0.45)}, "adapted"),  # as on many targets that are only very different
        ({"basis": basis(0.5, 0.3, "source-only")}, "adapted"),  # its own features favour the source-only model
        ({"basis": None}, "adapted"),
        ({"guard": False}, "adapted"),
        ({"class_set": ClassSet(("a",), "told", total=7)}, "adapted"),
        ({"class_set": ClassSet(("a",), "noticed", total=7)}, "adapted"),  # its labels have none of these already
        ({"verdict": Verdict("unknown", (OPEN,))}, "adapted"),
        ({"verdict": Verdict("unknown", (UNSUPPORTED, OPEN))}, "adapted"),
        ({"verdict": Verdict("better", ())}, "adapted"),
    ],
)
def test_where_the_classes_are_in_doubt_the_source_decides_which_model_is_used(
    change: dict[str, Any], model: str
) -> None:
    fields = {"basis": basis(0.5, 0.3), "verdict": Verdict("unknown", (UNSUPPORTED,))} | change
    given = replace(outcome("unknown"), **fields)
    given = given.choose(given.own_choice)
    assert (given.choice.model, given.choice.by, given.harm) == (model, "run", False)
    if model == "source":
        given = replace(given, verdict=outcome("unknown", UNSUPPORTED).verdict)
        said = wording.explanation(given, RUN)
        assert says(said, "cannot tell", "source-only model agrees better", "cdtrans choose 'a run' adapted")


def test_doubtful_classes_ask_which_occur_and_not_for_labels() -> None:
    doubtful = wording.explanation(outcome("unknown", UNSUPPORTED), RUN)
    assert says(doubtful, "cdtrans ask 'a run'", "one minute", "which classes occur")
    assert "47" not in doubtful
    many = outcome("unknown", OPEN, labels=0, estimates={"source": None, "adapted": None})
    assert "0 label" not in wording.explanation(many, RUN) + wording.estimate(many)


CURVE = NoClassCurve(intercept=-1, slope=1.5, cut=0.5, share=0.25)
FEW = replace(CURVE, share=0.02)


@pytest.mark.parametrize(
    ("known", "premise"),
    [
        (ClassSet(total=21), "if every image shows one of your 21 classes and all of them occur"),
        (ClassSet(total=21, others=False), "if all of your 21 classes occur"),
        (ClassSet(("a", "b"), "told", total=12), "if every image shows one of the 10 classes that you named"),
        (
            ClassSet(("a", "b"), "asked", total=12),
            "if every image shows one of the 10 classes that you did not rule out",
        ),
        (
            ClassSet(("a", "b"), "noticed", total=12),
            "if every image shows one of the 10 classes that seem to occur (2 seem absent: a, b)",
        ),
        (ClassSet(("a",), "told", False, total=5), "if the target shows just the 4 classes that you named"),
        (
            ClassSet(("a",), "asked", curve=FEW, total=5),
            "if the target shows just the 4 classes that you did not rule out",
        ),
        (
            ClassSet(("a",), "asked", curve=CURVE, total=5),
            "for images of the 4 classes that you did not rule out (by your answers 25% of the images show none",
        ),
        (ClassSet(others=True, total=5), "for those images that show one of your 5 classes"),
        (ClassSet(), "if every image shows one of your classes and all of them occur"),
    ],
)
def test_every_claim_says_its_premise(known: ClassSet, premise: str) -> None:
    given = outcome("better", class_set=known)
    assert premise in wording.premise(given)
    assert premise in wording.headline(given).sentence
    assert premise in wording.explanation(given, RUN)
    assert premise in wording.accuracy(given, None, RUN).basis
    assert premise in wording.done(given, RUN, with_estimate=True)
    assert premise in wording.estimate(given)
    assert ("'cdtrans ask' finds out" in wording.estimate(given)) is (known.by == "assumed" and known.others is None)


@pytest.mark.parametrize(
    ("known", "strange", "features", "question"),
    [
        (ClassSet(), 0.2, "pretrained", ""),
        (ClassSet(), 0.3, "pretrained", "images"),
        (ClassSet(), 0.3, "source-only", ""),  # the limit is one of pretrained features
        (ClassSet(others=False), 0.3, "pretrained", ""),
        (ClassSet(("a",), "asked", curve=CURVE), 0.3, "pretrained", ""),
        (ClassSet(others=True, curve=CURVE), 0.3, "pretrained", ""),
        (ClassSet(others=True), 0.2, "pretrained", "share"),
        (ClassSet(("a",), "noticed"), 0.2, "pretrained", "classes"),
        (ClassSet(("a",), "told"), 0.2, "pretrained", ""),
    ],
)
def test_a_range_waits_for_the_answer_to_a_question(
    known: ClassSet, strange: float, features: str, question: str
) -> None:
    evidence = replace(basis(0.5, 0.5, features), strange=strange)
    given = outcome("better", class_set=known, basis=evidence, estimates={"source": None, "adapted": None})
    assert (given.question, known.question(evidence)) == (question, question)
    assert ("cdtrans ask 'a run'" in wording.advice(given, RUN)) is bool(question)
    if question:
        assert wording.UNANSWERED[question] in wording.estimate(given)


def test_classes_taken_for_absent_are_named_with_a_way_to_say_otherwise() -> None:
    noticed = outcome("better", class_set=ClassSet(tuple("abcdefgh"), "noticed", total=20))
    said = wording.explanation(noticed, RUN)
    assert says(said, "8 of your 20 classes", "a, b, c, d, e, f, g, h", "--target-classes all", "cdtrans ask 'a run'")
    told = replace(noticed, class_set=replace(noticed.class_set, by="told"))
    assert "absent" not in wording.explanation(told, RUN)


@pytest.mark.parametrize(
    ("found", "refuted"),
    [
        (measured(20, 100, low=0.1, high=0.3), True),  # the run claims 50 to 75%
        (measured(90, 100, low=0.8, high=0.95), True),
        (measured(40, 100, low=0.3, high=0.5), False),
        (measured(40, 100, low=0.3, high=0.5, whole_target=True), True),  # exact
        (measured(12, 18, low=0.44, high=0.84, no_class=5), True),  # more than chance if hardly any belong to no class
        (measured(12, 18, low=0.44, high=0.84, no_class=2), False),
        (replace(measured(20, 100, low=0.1, high=0.3), models={}), False),
        (None, False),
    ],
)
def test_labels_that_refute_a_claim_replace_it(found: Measured | None, refuted: bool) -> None:
    given = outcome("better", class_set=ClassSet(total=21))
    assert given.contradicted_by(found) is refuted
    shown = wording.accuracy(given, found, RUN).headline
    explained = wording.explanation(given, RUN, found)
    if not refuted or found is None:
        assert "claimed" not in shown + explained
        return
    accuracy = f"Measured {found.models['adapted'].accuracy:.0%}"
    for sentence in (shown, explained, wording.labels_show(found.images, found, given, RUN)[0]):
        assert sentence.startswith(accuracy)
        assert says(sentence, "claimed 50 to 75%", "every image shows one of your 21 classes")
    assert wording.headline(given, found).badge == "claim refuted"
    assert ("5 images show none" in shown) is (found.no_class > 0)
    unsaid = replace(given, estimates={"source": None, "adapted": None})
    assert not unsaid.contradicted_by(found), "nothing was claimed"
    known = replace(given, class_set=ClassSet(total=21, curve=CURVE))
    assert known.contradicted_by(found) is (found.no_class == 0), "images of no class are part of the claim"


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
