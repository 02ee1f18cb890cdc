"""The sections that are numbers, by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from cdtrans.record import wording
from cdtrans.record.layout import DataRecord, DomainRecord, PairsRecord
from cdtrans.record.outcome import (
    Answers,
    CalibrationBin,
    Choice,
    Comparison,
    Crowd,
    Interval,
    Measured,
    Outcome,
    Scores,
)
from cdtrans.record.record import RunRecord
from cdtrans.reporting import sections
from cdtrans.reporting.sections import Curve, Missing
from run_folders import outcome, record
from support import says


def pairs(*rows: tuple[int, int, bool]) -> PairsRecord:
    """Rows of source label, target label, kept."""
    labels = np.array(rows, dtype=np.int32).reshape(-1, 3)
    index = np.arange(len(labels), dtype=np.int32)
    return PairsRecord(index, index, labels[:, 0], labels[:, 1], labels[:, 2].astype(bool))


SCORED = [
    {"event": "scores", "epoch": e, "confidence": 0.5 + e / 10, "diversity": 0.9, "consensus": 0.3} for e in range(4)
]
STOPPED = outcome(choice=Choice("source", 0), adapted_epoch=0)


class TestScores:
    def test_before_and_after_in_the_order_of_the_page(self) -> None:
        shown = sections.scores(record(log=SCORED))
        assert [name for name, *_ in shown] == ["Consensus", "Confidence", "Diversity"]
        assert shown[1][2:] == (0.5, 0.7)  # epochs 0 and 2, not 3

    def test_a_run_that_ended_before_adaptation_has_nothing_to_compare(self) -> None:
        hopeless = record(log=SCORED[:1], outcome=STOPPED)
        shown = [(name, *values) for name, _, *values in sections.scores(hopeless)]
        assert shown[:2] == [("Consensus", 0.3, None), ("Confidence", 0.5, None)]
        assert "before the first epoch" in sections.selection_curve(hopeless).why

    def test_a_single_epoch_makes_no_curve(self) -> None:
        """Nor does one whose other values are not finite."""
        log = [
            {"event": "epoch", "stage": "adaptation", "epoch": 1, "loss_source": 3.0, "loss_target": 3.0},
            {"event": "epoch", "stage": "adaptation", "epoch": 2, "loss_source": 2.0, "loss_target": float("nan")},
        ]
        assert [c.name for c in sections.loss_curves(record(log=log))] == ["Loss, source branch"]
        assert "one epoch" in sections.loss_curves(record(log=log[:1])).why
        assert "one epoch" in sections.selection_curve(record(log=SCORED[2:3])).why

    def test_the_score_that_chose_the_epoch_is_a_curve_with_a_mark(self) -> None:
        by_confidence = outcome(selection="confidence")
        curve = sections.selection_curve(record(log=SCORED, outcome=by_confidence))
        assert (curve.name, curve.epochs) == ("Confidence", (0, 1, 2, 3))
        assert curve.values == pytest.approx((0.5, 0.6, 0.7, 0.8))
        assert curve.mark == (200.0, 32.0, 0.7)
        gone_back = record(log=SCORED, outcome=replace(by_confidence, choice=Choice("source", 0)))
        assert sections.selection_curve(gone_back).mark == (0.0, 96.0, 0.5)
        last = sections.selection_curve(record(log=SCORED, outcome=outcome(selection="last")))
        assert last.name == "Consensus"

    def test_losses_are_those_of_adaptation_by_their_names(self) -> None:
        source = {"event": "epoch", "stage": "source", "epoch": 3, "loss_source": 9.0}
        other = {"lr": 0.1, "pairs": 20, "loss_domain": 0.7, "entropy_of_mine": 0.2, "loss_source": 1.0}
        log = [source, *({"event": "epoch", "stage": "adaptation", "epoch": epoch} | other for epoch in (1, 2))]
        curves = sections.loss_curves(record(log=log))
        assert [c.name for c in curves] == ["Loss, source branch", "Loss domain", "Entropy of mine"]
        assert [c.values for c in curves] == [(1.0, 1.0), (0.7, 0.7), (0.2, 0.2)]

    @pytest.mark.parametrize(
        "make",
        [sections.scores, sections.selection_curve, sections.loss_curves, sections.stage_times, sections.pair_counts],
    )
    def test_a_run_without_them(self, make: Any) -> None:
        assert isinstance(make(record()), Missing)

    def test_labels_say_what_the_probabilities_mean_where_no_estimate_does(self) -> None:
        unknown = outcome(estimates={"source": None, "adapted": None})
        parts = {"outcome": unknown, "confidences": lambda: np.array([0.9, 0.7])}
        assert isinstance(sections.confident_labels(record(**parts, has_model=lambda _: True)), Missing)
        answers = Answers("", True, None, ())
        table = sections.confident_labels(record(**parts, has_model=lambda _: True, answers=answers))
        assert table.rows[0] == ("all", "80%", "")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("cdtrans", ["nearest neighbour", "kept"]),
        ("instant", ["most similar source image"]),
        ("shot", ["no source image takes part"]),
        ("cotraining", ["'cotraining'", "need not belong together"]),
    ],
)
def test_pairs_are_described_as_the_method_makes_them(method: str, words: list[str]) -> None:
    of_run = record(config=SimpleNamespace(method=method))
    assert says(sections.about_pairs(of_run), *words)
    assert bool(sections.pairs_meaning(of_run)) == (method in ("cdtrans", "instant"))


def test_pairs_made_with_target_labels_are_called_so() -> None:
    of_run = record(outcome=outcome(trained_with_labels=True), config=SimpleNamespace(method="ground_truth"))
    assert says(sections.about_pairs(of_run), "target labels")


class TestCurve:
    def test_fills_its_box_from_the_least_to_the_largest(self) -> None:
        curve = Curve("n", "m", (1, 2, 5), (3.0, 1.0, 2.0), 4)
        assert curve.points == "0.0,0.0 75.0,96.0 300.0,48.0"
        assert curve.mark is None  # no such epoch

    def test_a_single_or_a_constant_value_lies_in_the_middle(self) -> None:
        assert Curve("n", "m", (3,), (0.4,), 3).points == "0.0,48.0"
        assert Curve("n", "m", (0, 1), (0.4, 0.4), 1).points == "0.0,48.0 300.0,48.0"


class TestClasses:
    @staticmethod
    def histogram(before: np.ndarray, after: np.ndarray, classes: tuple[str, ...]) -> sections.Histogram:
        source = DomainRecord(70, "f", "f", "p", 0, dict.fromkeys(classes, 10))
        data = DataRecord(source, DomainRecord(100, "g", "g", "q"))
        views = SimpleNamespace(target_before=before, target_after=after)
        shown = sections.histogram(record(classes=classes, data=data, views=views))
        assert isinstance(shown, sections.Histogram)
        return shown

    def test_shares_of_source_and_predictions(self, full: Path) -> None:
        record, shown = RunRecord(full), sections.histogram(RunRecord(full))
        assert (shown.classes, sorted(name for name, _ in shown.rows)) == (3, ["blue", "green", "red"])
        for k, (_, (source, *predicted)) in enumerate(sorted(shown.rows)):
            assert source == pytest.approx(1 / 3)
            for epoch, share in zip((0, record.outcome.adapted_epoch), predicted, strict=True):
                assert share == pytest.approx(np.mean(record.predictions(epoch).predicted == k))

    def test_only_the_classes_that_differ_most_are_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sections, "SHOWN_CLASSES", 2)
        predicted = np.array([0] * 11 + [1] * 7 + [2] * 3)
        shown = self.histogram(predicted, predicted, ("a", "b", "c"))
        assert [name for name, _ in shown.rows] == ["a", "c"]
        assert shown.classes == 3
        assert shown.crowds == {}, "half of three classes is nothing special"

    @pytest.mark.parametrize("model", ["source", "adapted"])
    def test_a_class_that_holds_most_images_is_named(self, model: str) -> None:
        even, crowded = np.arange(100) % 7, np.array([2] * 80 + [0] * 20)
        sides = (crowded, even) if model == "source" else (even, crowded)
        classes = ("dog", "elephant", "guitar", "giraffe", "horse", "house", "person")
        shown = self.histogram(*sides, classes)
        assert shown.crowds == {model: Crowd("guitar", 0.8)}
        assert shown.rows[0][0] == "guitar", "the largest difference comes first"


class TestPairs:
    USED: ClassVar = {"event": "pairs", "sources_used": 1, "targets_used": 2, "classes_used": 3, "source_accuracy": 0.5}
    LOG = (USED | {"round": 1, "epoch": 1, "proposed": 3}, USED | {"round": 2, "epoch": 3, "proposed": 4})

    def test_counts_per_class_and_round(self) -> None:
        rounds = {
            1: pairs((0, 0, True), (0, 1, False), (1, 1, True)),
            2: pairs((0, 0, True), (0, 0, True), (2, 1, False), (2, 0, False)),
        }
        shown = sections.pair_counts(record(rounds=rounds, log=self.LOG))
        assert shown.rounds.columns[-2:] == ("classes used", "accuracy on source")
        assert shown.rounds.rows == (
            ("1", "1", "3", "2", "1", "66.7%", "1", "2", "3", "50%"),
            ("2", "3", "4", "2", "2", "50.0%", "1", "2", "3", "50%"),
        )
        assert shown.by_class == (("a", [1, 2], [1, 0]), ("b", [1, 0], [0, 0]), ("c", [0, 0], [0, 2]))
        assert (shown.most, shown.agreements) == (2, True)

    def test_only_the_classes_that_lose_most_are_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sections, "SHOWN_CLASSES", 1)
        rounds = {1: pairs((0, 0, True), (1, 1, True), (1, 0, False), (2, 2, True))}
        shown = sections.pair_counts(record(rounds=rounds, log=self.LOG))
        assert ([name for name, *_ in shown.by_class], shown.classes) == (["b"], 3)


SCORES = Scores(
    0.7, Interval(0.4, 0.9), 0.775, Interval(0.5, 0.9), (3, 4, 0), (4, 6, 0), ((3, 1, 0), (0, 4, 2), (0, 0, 0))
)
SOURCE = replace(SCORES, accuracy=0.5, confusion=((2, 2, 0), (0, 3, 3), (0, 0, 0)), right=(2, 3, 0))
MEASURED = Measured(
    model="adapted",
    classes=("a", "b", "c"),
    images=10,
    target=21,
    whole_target=False,
    models={"source": SOURCE, "adapted": SCORES},
    epochs=tuple(replace(SCORES, accuracy=accuracy) for accuracy in (0.5, 0.6, 0.7)),
    adapted_epoch=2,
    comparison=Comparison(2, 0, 0.5, "adapted", disagree=9),
    calibration=(CalibrationBin(0.5, 0.4, 10),),
)


class TestLabelled:
    def test_the_numbers_of_eval(self) -> None:
        shown = sections.label_results(record(evaluation=MEASURED))
        assert shown["scores"] == SCORES
        assert shown["classes"] == [("a", 4, 0.75), ("b", 6, 4 / 6), ("c", 0, None)]
        assert shown["confusions"] == [("b", "c", 2), ("a", "b", 1)]
        assert (shown["curve"].values, shown["curve"].mark[2]) == ((0.5, 0.6, 0.7), 0.7)
        assert (shown["calibration"], shown["command"]) == (True, "")

    def test_the_labels_of_answer_are_shown_where_eval_has_none(self) -> None:
        answers = Answers("", False, MEASURED, ())
        assert sections.label_results(record(answers=answers))["scores"] == SCORES

    def test_the_chosen_model_is_shown_whichever_was_scored(self) -> None:
        gone_back = outcome(choice=Choice("source", 0))
        shown = sections.label_results(record(evaluation=MEASURED, outcome=gone_back))
        assert (shown["scores"], shown["calibration"], shown["command"]) == (
            SOURCE,
            False,
            "cdtrans choose run adapted",
        )
        alone = replace(MEASURED, models={"adapted": SCORES}, epochs=MEASURED.epochs[:1], comparison=None)
        assert isinstance(sections.label_results(record(evaluation=alone, outcome=gone_back)), Missing)
        shown = sections.label_results(record(evaluation=alone))
        assert (shown["curve"], shown["compared"], shown["command"]) == (None, "", "")

    def test_without_labels_it_says_how_to_give_them(self) -> None:
        assert "cdtrans eval run" in sections.label_results(record()).why


class TestAccuracy:
    """The first line of the page: measured, else estimated, else unknown."""

    WHOLE = replace(MEASURED, images=2344, target=2344, whole_target=True)
    LIKE_THESE = "new images like these: 40.0 to 90.0%"
    ALL = "The adapted model is right on 70.0% of the target images."

    @pytest.mark.parametrize(
        ("trained", "measured", "value", "headline", "basis"),
        [
            (0, MEASURED, "70%", "right on 70% of 10 labelled target images.", ["10 target", "interval: 40 to 90%"]),
            (0, replace(MEASURED, random=True), "70%", "right on about 70% of the target images", ["10 random target"]),
            (0, WHOLE, "70.0%", ALL, ["all 2,344 target images;", LIKE_THESE]),
            (5, WHOLE, "70.0%", ALL, ["it was not trained with", LIKE_THESE]),
            (0, None, "47 to 98%", "estimated", []),
            (0, replace(MEASURED, models={"source": SOURCE}), "47 to 98%", "estimated", []),
        ],
    )
    def test_a_measurement_of_the_chosen_model_comes_before_an_estimate(
        self, trained: int, measured: Measured | None, value: str, headline: str, basis: list[str]
    ) -> None:
        shown = wording.accuracy(outcome(target_labels=trained), measured, Path("run"))
        assert (shown.kind, shown.value) == ("measured" if basis else "estimated", value)
        assert says(shown.headline, "adapted model", headline)
        assert says(shown.basis, *basis)
        assert shown.command == "cdtrans ask run"

    def test_else_it_is_unknown_and_says_why(self) -> None:
        of_run: Outcome = outcome(choice=Choice("source", 0), estimates={"source": None, "adapted": None})
        shown = wording.accuracy(of_run, None, Path("run"))
        assert (shown.kind, shown.value, shown.basis) == ("unknown", "unknown", wording.estimate(of_run))
        assert says(shown.headline, "source-only model", "unknown")


class TestCosts:
    LINES = (
        {"stage": "source", "epoch": 1, "seconds": 10.0, "images_per_second": 100.0, "at": 1020.0},
        {"stage": "source", "epoch": 2, "seconds": 20.2, "images_per_second": 300.0, "at": 1045.0},
        {"stage": "verdict", "seconds": 0.4, "at": 1089.0},
        {"stage": "session", "seconds": 95.0, "at": 1095.0},
    )

    def test_stages_rest_and_total(self) -> None:
        """The page is written before its own line is."""
        rate = f"{(10 * 100 + 20.2 * 300) / 30.2:.0f}"
        assert sections.stage_times(record(timings=self.LINES)).rows == (
            ("Stage 1, source", "2", rate, "30.2 s"),
            ("Verdict", "", "", "0.4 s"),
            ("Between the stages", "", "", "1:04"),
            ("Total", "", "", "1:35"),
        )

    def test_a_page_written_after_its_session_is_added(self) -> None:
        report = {"stage": "report", "seconds": 4.0, "at": 1099.1}
        *_, page, rest, total = sections.stage_times(record(timings=[*self.LINES, report])).rows
        assert (page[0], rest[-1], total[-1]) == ("This page", "1:04", "1:39")

    def test_sessions_that_were_interrupted_or_killed_count(self) -> None:
        first = [{"stage": "source", "epoch": 1, "seconds": 7.0, "at": 510.0}]
        stopped = {"stage": "session", "seconds": 20.0, "at": 515.0}
        for before, times in (([], ("1:04", "1:42")), ([stopped], ("1:17", "1:55"))):
            *_, rest, total = sections.stage_times(record(timings=[*first, *before, *self.LINES])).rows
            assert (rest[-1], total[-1]) == times
