"""What an answer key says, as the page shows it."""

import pytest

import cdtrans.report.answers as module
from cdtrans.report.answers import answers
from run_folders import record

ANSWERS = {
    "accuracy": 0.7,
    "class_mean_accuracy": 0.6,
    "images": 10,
    "classes": ["a", "b", "c"],
    "per_class": {"a": 0.75, "b": 0.8, "c": None},
    "confusion": [[3, 1, 0], [0, 4, 2], [0, 0, 0]],
    "source_only_accuracy": 0.5,
    "accuracy_by_epoch": [0.5, 0.6, 0.7],
}


class TestAnswers:
    def test_what_the_key_says(self) -> None:
        found = answers(record(evaluation=ANSWERS))
        assert (found.accuracy, found.class_mean_accuracy, found.images, found.source_only) == (0.7, 0.6, 10, 0.5)
        assert found.classes == (("a", 4, 0.75), ("b", 6, 0.8), ("c", 0, None))
        assert found.matrix == ((3, 1, 0), (0, 4, 2), (0, 0, 0))
        assert found.confusions == (("b", "c", 2), ("a", "b", 1))
        assert found.curve.values == (0.5, 0.6, 0.7)
        assert found.curve.mark[2] == 0.7
        assert found.picture is None

    def test_a_large_matrix_is_a_picture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SHOWN_CONFUSION", 2)
        found = answers(record(evaluation=ANSWERS))
        assert found.matrix is None
        assert found.picture.startswith("data:image/png")

    def test_a_key_of_other_images_has_no_history(self) -> None:
        short = {k: v for k, v in ANSWERS.items() if k not in ("source_only_accuracy", "accuracy_by_epoch")}
        found = answers(record(evaluation=short))
        assert found.source_only is None
        assert found.curve is None

    def test_no_key_says_how_to_give_one(self) -> None:
        assert "cdtrans eval" in answers(record()).why

    def test_a_single_epoch_makes_no_curve(self) -> None:
        assert answers(record(evaluation=ANSWERS | {"accuracy_by_epoch": [0.5]})).curve is None
