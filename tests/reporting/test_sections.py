"""The sections that are numbers, by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdtrans.reporting import sections
from cdtrans.reporting.costs import costs
from cdtrans.reporting.record import Round, read_record
from cdtrans.reporting.sections import Curve, Missing
from cdtrans.trust.guard import Measure, decide
from run_folders import record
from support import says

GUARD = {"paragraph": "Evidence.", "findings": [{"name": "n", "found": 1, "limit": 2, "sentence": "classes vanished"}]}


def pairs(number: int, rows: list[tuple[int, int, bool]], *, complete: bool = True, **facts: int) -> Round:
    """Rows of source label, target label, kept."""
    labels = np.array(rows, dtype=np.int32).reshape(-1, 3)
    index = np.arange(len(labels), dtype=np.int32)
    return Round(number, index, index, labels[:, 0], labels[:, 1], labels[:, 2].astype(bool), complete, facts)


SCORED = [
    {"event": "scores", "epoch": e, "confidence": 0.5 + e / 10, "diversity": 0.9, "consensus": 0.3, "fresh_idea": e}
    for e in range(4)
]


class TestVerdict:
    @pytest.mark.parametrize(
        ("guard", "chosen", "tone", "part"),
        [
            ({"verdict": "kept", "paragraph": "Fine.", "findings": []}, "adapted", "good", "No sign of harm"),
            ({"verdict": "kept", "paragraph": "But.", "warning": "Oh."}, "adapted", "warned", "an earlier one"),
            (GUARD | {"verdict": "harm"}, "source", "bad", "the source-only model"),
            (GUARD | {"verdict": "off"}, "adapted", "bad", "the guard was off"),
            (GUARD | {"verdict": "unknown"}, "adapted", "warned", "without labels it could not tell"),
            (GUARD | {"verdict": "a later version's"}, "adapted", "unknown", "did not check"),
            (None, "adapted", "unknown", "did not check"),
        ],
        ids=["kept", "kept in time", "harm", "off", "unknown", "a word of a later version", "an older run"],
    )
    def test_one_sentence(self, guard: dict | None, chosen: str, tone: str, part: str) -> None:
        epochs = {"chosen_epoch": 2 if chosen == "adapted" else 0, "judged_epoch": 2}
        result = epochs | {"chosen_model": chosen} | ({"guard": guard} if guard else {})
        verdict = sections.verdict(record(result=result))
        assert verdict.tone == tone
        assert part in verdict.sentence
        assert verdict.sentence.count(".") == 1
        assert ("epoch 2" in verdict.sentence) == (chosen == "adapted")
        assert "accura" not in verdict.sentence  # nobody knows that here
        assert verdict.opening == (guard["paragraph"] if guard else ""), "as an older run has it"
        assert verdict.findings == (("n: classes vanished",) if guard and "Evidence." in guard.values() else ())
        assert verdict.command == ("cdtrans choose run adapted" if chosen == "source" else "")

    @pytest.mark.parametrize(("verdict", "chosen"), [("harm", "adapted"), ("kept", "source")])
    def test_a_choice_by_hand_is_called_so(self, verdict: str, chosen: str) -> None:
        result = {"chosen_epoch": 2, "judged_epoch": 2, "chosen_model": chosen, "chosen_by": "person"}
        told = sections.verdict(record(result=result | {"guard": GUARD | {"verdict": verdict}}))
        assert (told.tone, told.badge, told.command) == ("warned", "chosen by hand", "")
        assert says(told.sentence, "by hand", "source-only model" if chosen == "source" else "epoch 2")
        assert told.findings, "what the guard said stays"

    @pytest.mark.parametrize(
        ("features", "part"),
        [("pretrained", "pretrained backbone"), ("source-only", "trust the evidence less"), (None, ""), ("later", "")],
    )
    def test_whose_features_the_evidence_is_from(self, features: str | None, part: str) -> None:
        result = {"chosen_epoch": 2, "judged_epoch": 2, "chosen_model": "adapted", "guard": GUARD}
        told = sections.verdict(record(result=result | {"evidence_features": features})).features
        assert part in told
        assert bool(told) == bool(part)

    def test_all_that_the_guard_measured_is_there(self) -> None:
        measured = Measure("accuracy", "share kept", 0.75, 0.8, "it fell")
        guard = decide([measured, measured._replace(found=0.9)], guard=True).summary()
        result = {"chosen_epoch": 0, "chosen_model": "source", "judged_epoch": 2}
        result["guard"] = json.loads(json.dumps(guard))
        assert sections.verdict(record(result=result)).measures == (
            sections.Measure("share kept", 0.75, 0.8, "above", harm=True),
            sections.Measure("share kept", 0.9, 0.8, "above", harm=False),
        )

    def test_a_run_of_an_ablation_that_had_the_key_is_called_so(self) -> None:
        result = {"chosen_epoch": 2, "chosen_model": "adapted", "guard": {"verdict": "kept"}}
        assert sections.verdict(record(result=result)).tone == "good"
        verdict = sections.verdict(record(result=result | {"trained_with_key": True}))
        assert verdict.tone == "warned"
        assert says(verdict.badge, "trained with target labels")
        assert says(verdict.sentence, "target labels", "not an adaptation")

    def test_the_estimate_is_a_range_or_missing(self) -> None:
        told = {"low": 0.6, "high": 0.8, "sentence": "So."}
        result = {"chosen_epoch": 2, "chosen_model": "adapted", "estimate": told}
        assert sections.estimate(record(result=result)) == sections.Estimate(0.6, 0.8, "So.", known=True)
        assert isinstance(sections.estimate(record()), Missing)
        result["estimate"]["harm"] = True
        assert not sections.estimate(record(result=result)).known, "as in older runs"
        result["estimate"] = {"low": None, "high": None, "sentence": "Unknown."}
        assert sections.estimate(record(result=result)) == sections.Estimate(0, 0, "Unknown.", known=False)

    def test_labels_say_what_the_probabilities_mean_where_no_estimate_does(self, tmp_path: Path) -> None:
        (tmp_path / "adapted").mkdir()
        (tmp_path / "adapted" / "model.json").write_text('{"classes": ["a", "b"]}')
        estimate = {"low": None, "high": None, "sentence": "Unknown."}
        result = {"chosen_epoch": 1, "chosen_model": "adapted", "estimate": estimate}
        (tmp_path / "result.json").write_text(json.dumps(result))
        np.savez(tmp_path / "logits.npz", adapted=np.eye(2))
        made = record(run=tmp_path, result=result)
        assert isinstance(sections.trade_off(made), Missing)
        (tmp_path / "answers.json").write_text('{"result": {"recalibrated": true}}')
        table = sections.trade_off(made)
        assert not isinstance(table, Missing)
        assert table[0].accuracy == pytest.approx(0.731, abs=0.001)
        (tmp_path / "answers.json").write_text("[")
        assert isinstance(sections.trade_off(made), Missing)

    def test_a_run_that_was_stopped_did_no_harm(self) -> None:
        guard = {"verdict": "harm", "opening": "Stopped.", "advice": "Go on.", "findings": []}
        result = {"chosen_epoch": 0, "chosen_model": "source", "judged_epoch": 0, "guard": guard}
        verdict = sections.verdict(record(result=result))
        assert (verdict.tone, verdict.badge) == ("bad", "stopped")
        assert (verdict.opening, verdict.advice) == ("Stopped.", "Go on.")
        assert "harm" not in verdict.sentence


class TestScores:
    def test_before_and_after_in_the_order_of_the_page(self) -> None:
        found = sections.scores(record(log=SCORED))
        assert [s.name for s in found] == ["Consensus", "Confidence", "Diversity", "Fresh idea"]
        assert (found[1].before, found[1].after) == (0.5, 0.7)  # epochs 0 and 2, not 3
        assert found[0].meaning
        assert found[3].meaning == ""

    def test_a_run_that_ended_before_adaptation_has_nothing_to_compare(self) -> None:
        hopeless = record(log=SCORED[:1], result={"chosen_epoch": 0, "chosen_model": "source"})
        assert [(s.name, s.before, s.after) for s in sections.scores(hopeless)[:2]] == [
            ("Consensus", 0.3, None),
            ("Confidence", 0.5, None),
        ]
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
        chosen = {"chosen_epoch": 2, "chosen_model": "adapted", "selection": "confidence"}
        curve = sections.selection_curve(record(log=SCORED, result=chosen))
        assert (curve.name, curve.epochs) == ("Confidence", (0, 1, 2, 3))
        assert curve.values == pytest.approx((0.5, 0.6, 0.7, 0.8))
        assert curve.mark == (200.0, 32.0, 0.7)
        gone_back = record(log=SCORED, result=chosen | {"chosen_epoch": 3, "chosen_model": "source"})
        assert sections.selection_curve(gone_back).mark == (0.0, 96.0, 0.5)
        assert sections.selection_curve(record(log=SCORED)).name == "Consensus", "where the last epoch was chosen"

    def test_a_number_that_is_none_leaves_a_gap(self) -> None:
        lines = [*SCORED[:3], {"event": "scores", "epoch": 3, "consensus": float("nan")}]
        assert sections.selection_curve(record(log=lines)).epochs == (0, 1, 2)

    def test_losses_are_those_of_adaptation(self) -> None:
        log = [
            {"event": "epoch", "stage": "source", "epoch": 3, "loss_source": 9.0},
            {"event": "epoch", "stage": "adaptation", "epoch": 1, "loss_source": 3.0, "loss_target": 1.0},
            {"event": "epoch", "stage": "adaptation", "epoch": 2, "loss_source": 2.0, "loss_target": 0.5},
        ]
        curves = sections.loss_curves(record(log=log))
        assert [c.values for c in curves] == [(3.0, 2.0), (1.0, 0.5)]

    def test_losses_of_any_method_are_shown_by_their_names(self) -> None:
        other = {"lr": 0.1, "pairs": 20, "loss_domain": 0.7, "entropy_of_mine": 0.2, "loss_source": 1.0}
        log = [{"event": "epoch", "stage": "adaptation", "epoch": epoch} | other for epoch in (1, 2)]
        curves = sections.loss_curves(record(log=log))
        assert [c.name for c in curves] == ["Loss, source branch", "Loss domain", "Entropy of mine"]
        assert [c.values for c in curves] == [(1.0, 1.0), (0.7, 0.7), (0.2, 0.2)]

    @pytest.mark.parametrize("make", [sections.scores, sections.selection_curve, sections.loss_curves, costs])
    def test_a_log_without_them(self, make: Any) -> None:
        assert isinstance(make(record()), Missing)


@pytest.mark.parametrize(
    ("method", "words", "together"),
    [
        (None, ["nearest neighbour", "kept"], True),  # runs from before there were methods
        ("cdtrans", ["nearest neighbour", "kept"], True),
        ("instant", ["most similar source image"], True),
        ("cotraining", ["'cotraining'", "need not belong together"], False),
        ("my_file.py:Mine", ["side by side"], False),
    ],
)
def test_pairs_are_described_as_the_method_makes_them(method: str | None, words: list[str], together: bool) -> None:
    of_run = replace(record(), config={} if method is None else {"method": method})
    assert says(sections.about_pairs(of_run), *words)
    assert sections.pairs_belong_together(of_run) is together


class TestCurve:
    def test_fills_its_box_from_the_least_to_the_largest(self) -> None:
        curve = Curve("n", "m", (1, 2, 5), (3.0, 1.0, 2.0), 4)
        assert curve.points == "0.0,0.0 75.0,96.0 300.0,48.0"
        assert curve.mark is None  # no such epoch

    def test_a_single_or_a_constant_value_lies_in_the_middle(self) -> None:
        assert Curve("n", "m", (3,), (0.4,), 3).points == "0.0,48.0"
        assert Curve("n", "m", (0, 1), (0.4, 0.4), 1).points == "0.0,48.0 300.0,48.0"


class TestClasses:
    def test_shares_of_source_and_predictions(self, full: Path) -> None:
        shown = sections.histogram(read_record(full))
        assert shown.classes == 3
        assert sorted(row.name for row in shown.rows) == ["blue", "green", "red"]
        for k, row in enumerate(sorted(shown.rows, key=lambda row: row.name)):
            assert row.source == pytest.approx(1 / 3)
            for epoch, share in ((0, row.before), (4, row.after)):
                with np.load(full / "predictions" / f"epoch-{epoch:03}.npz") as arrays:
                    assert share == pytest.approx(np.mean(arrays["predicted"] == k))
        assert shown.largest == max(max(r.source, r.before, r.after) for r in shown.rows)

    def test_of_many_classes_those_that_differ_most(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sections, "SHOWN_CLASSES", 2)
        whole = sections.histogram(read_record(run))
        chosen = read_record(run).result["chosen_epoch"]
        for epoch in (0, chosen):
            predicted = np.array([0] * 11 + [1] * 7 + [2] * 3, np.int32)
            np.savez(run / "predictions" / f"epoch-{epoch:03}.npz", predicted=predicted)
        shown = sections.histogram(read_record(run))
        assert [row.name for row in shown.rows] == ["blue", "red"]
        assert shown.classes == whole.classes == 3
        assert shown.crowds == (), "half of three classes is nothing special"

    @pytest.mark.parametrize(("epoch", "model"), [(0, "source"), (1, "adapted")])
    def test_a_class_that_holds_most_images_is_named(self, tmp_path: Path, epoch: int, model: str) -> None:
        """Of the source-only model it is a finding of its own."""
        (tmp_path / "predictions").mkdir()
        for n in (0, 1):
            predicted = np.array([2] * 80 + [0] * 20) if n == epoch else np.arange(100) % 7
            np.savez(tmp_path / "predictions" / f"epoch-{n:03}.npz", predicted=predicted)
        classes = ("dog", "elephant", "guitar", "giraffe", "horse", "house", "person")
        result = {"chosen_epoch": 1, "chosen_model": "adapted"}
        data = {"source": {"classes": dict.fromkeys(classes, 10)}}
        shown = sections.histogram(record(run=tmp_path, classes=classes, data=data, result=result))
        (crowd,) = shown.crowds
        assert (crowd.model, crowd.name, crowd.share) == (model, "guitar", 0.8)
        assert says(crowd.sentence, "80% of the target images", "one class, guitar", "14% of the source")
        assert ("no sign of harm" in crowd.sentence) == (model == "source")
        assert shown.rows[0].name == "guitar", "what differs most comes first"
        assert shown.crowded(model, "guitar")
        assert not shown.crowded("adapted" if model == "source" else "source", "guitar")


class TestPairs:
    def test_counts_per_class_and_round(self) -> None:
        rounds = [
            pairs(1, [(0, 0, True), (0, 1, False), (1, 1, True)], proposed=3, epoch=1),
            pairs(2, [(0, 0, True), (0, 0, True), (2, 1, False), (2, 0, False)], proposed=4, epoch=3),
        ]
        found = sections.pair_counts(record(rounds=rounds))
        assert [(r.number, r.proposed, r.kept) for r in found.rounds] == [(1, 3, 2), (2, 4, 2)]
        by_name = {row.name: (row.kept, row.rejected) for row in found.by_class}
        assert by_name == {"a": ((1, 2), (1, 0)), "b": ((1, 0), (0, 0)), "c": ((0, 0), (0, 2))}
        assert found.complete
        assert found.largest == 2

    def test_of_many_classes_those_that_lose_most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sections, "SHOWN_CLASSES", 1)
        rounds = [pairs(1, [(0, 0, True), (1, 1, True), (1, 0, False), (2, 2, True)])]
        found = sections.pair_counts(record(rounds=rounds))
        assert [row.name for row in found.by_class] == ["b"]
        assert found.classes == 3
        only_kept = [pairs(1, [(0, 0, True), (0, 0, True), (1, 1, True), (1, 1, True), (2, 2, True)], complete=False)]
        assert [row.name for row in sections.pair_counts(record(rounds=only_kept)).by_class] == ["c"]

    def test_an_older_run_knows_its_rejected_pairs_by_number_alone(self, old_run: Path) -> None:
        found = sections.pair_counts(read_record(old_run))
        assert not found.complete
        lines = [json.loads(line) for line in (old_run / "log.jsonl").read_text().splitlines()]
        logged = [(line["proposed"], line["kept"]) for line in lines if line["event"] == "pairs"]
        assert [(r.proposed, r.kept) for r in found.rounds] == logged

    def test_no_pairs(self) -> None:
        assert isinstance(sections.pair_counts(record()), Missing)
