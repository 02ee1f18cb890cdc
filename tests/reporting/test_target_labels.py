"""The results with target labels, as the page shows them."""

import pytest

import cdtrans.reporting.target_labels as module
from cdtrans.reporting.target_labels import labelled_results
from run_folders import record

EVALUATION = {
    "accuracy": 0.7,
    "class_mean_accuracy": 0.6,
    "images": 10,
    "classes": ["a", "b", "c"],
    "per_class": {"a": 0.75, "b": 0.8, "c": None},
    "confusion": [[3, 1, 0], [0, 4, 2], [0, 0, 0]],
    "source_only_accuracy": 0.5,
    "accuracy_by_epoch": [0.5, 0.6, 0.7],
}


class TestLabelledResults:
    def test_the_numbers_of_eval(self) -> None:
        results = labelled_results(record(evaluation=EVALUATION))
        assert (results.accuracy, results.class_mean_accuracy, results.images, results.source_only) == (
            0.7,
            0.6,
            10,
            0.5,
        )
        assert results.classes == (("a", 4, 0.75), ("b", 6, 0.8), ("c", 0, None))
        assert results.matrix == ((3, 1, 0), (0, 4, 2), (0, 0, 0))
        assert results.confusions == (("b", "c", 2), ("a", "b", 1))
        assert results.curve.values == (0.5, 0.6, 0.7)
        assert results.curve.mark[2] == 0.7
        assert results.picture is None

    def test_a_large_matrix_is_a_picture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "TABLE_CLASSES", 2)
        results = labelled_results(record(evaluation=EVALUATION))
        assert results.matrix is None
        assert results.picture.startswith("data:image/png")

    def test_labels_of_other_images_have_no_history(self) -> None:
        short = {k: v for k, v in EVALUATION.items() if k not in ("source_only_accuracy", "accuracy_by_epoch")}
        results = labelled_results(record(evaluation=short))
        assert results.source_only is None
        assert results.curve is None

    def test_the_model_that_is_chosen_is_shown_whichever_was_scored(self) -> None:
        other = {"accuracy": 0.5, "accuracy_interval": [0.2, 0.8], "images": 10, "confusion": [[5, 5], [0, 0]]}
        both = EVALUATION | {"model": "adapted", "models": {"source": other, "adapted": EVALUATION}}
        both |= {"calibration": {"error": 0.1, "bins": []}, "classes": ["a", "b"]}
        assert labelled_results(record(evaluation=both | {"classes": ["a", "b", "c"]})).calibration
        source = {"chosen_epoch": 0, "chosen_model": "source", "judged_epoch": 2}
        results = labelled_results(record(evaluation=both, result=source))
        assert (results.accuracy, results.interval, results.matrix) == (0.5, (0.2, 0.8), ((5, 5), (0, 0)))
        assert results.calibration is None

    @pytest.mark.parametrize(("chosen", "command"), [("adapted", ""), ("source", "cdtrans choose run adapted")])
    def test_a_wrong_choice_has_the_command_that_mends_it(self, chosen: str, command: str) -> None:
        compared = EVALUATION | {"comparison": {"better": "adapted", "sentence": "So."}}
        result = {"chosen_epoch": 2, "chosen_model": chosen, "judged_epoch": 2}
        results = labelled_results(record(evaluation=compared, result=result))
        assert (results.compared, results.better, results.command) == ("So.", "adapted", command)

    def test_without_labels_it_says_how_to_give_them(self) -> None:
        assert "cdtrans eval" in labelled_results(record()).why

    def test_a_single_epoch_makes_no_curve(self) -> None:
        assert labelled_results(record(evaluation=EVALUATION | {"accuracy_by_epoch": [0.5]})).curve is None
