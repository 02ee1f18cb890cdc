"""Pairs made with target labels: the nearest of the true class (Table 5)."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from cdtrans.methods import METHODS, WITH_TARGET_LABELS, require_method
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains
from cdtrans.paper.known_pairs import GroundTruth, known_pairs_class
from cdtrans.paper.pair_labels import UNKNOWN, adapt_with_labels
from cdtrans.runtime.screen import Screen
from paired_labels import domains_of, planned
from support import error_says, raises
from tiny_task import make_source, make_task


class TestGroundTruth:
    def test_nearest_of_the_same_class_from_both_sides(self) -> None:
        angles_s, angles_t = torch.tensor([0.0, 10, 50, 90]), torch.tensor([2.0, 48, 60, 91, 89])
        labels, true = torch.tensor([0, 1, 0, 2]), torch.tensor([1, 0, 0, UNKNOWN, 1])
        source, target = (Encoded(directions(a), torch.randn(len(a), 3)) for a in (angles_s, angles_t))
        pairs = planned(GroundTruth, Domains(source, labels, target), true, mutual_pairs="once")
        listed = sorted(zip(pairs.source.tolist(), pairs.target.tolist(), strict=True))
        assert listed == [(0, 1), (1, 0), (1, 4), (2, 1), (2, 2)], "class 2 and the unknown image are in none"
        assert pairs.pairs().target_labels.tolist() == labels[pairs.source].tolist()
        assert pairs.arrays()["kept"].all()
        twice = planned(GroundTruth, Domains(source, labels, target), true)
        assert set(zip(twice.source.tolist(), twice.target.tolist(), strict=True)) == set(listed)
        assert len(twice.source) > len(listed)

    def test_without_a_known_image_it_is_one_sentence(self) -> None:
        with raises("no-labelled-image"):
            planned(GroundTruth, domains_of(), torch.full((10,), UNKNOWN))


def directions(degrees: Tensor) -> Tensor:
    radians = degrees.deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_only_ablations_have_these_methods() -> None:
    assert not set(WITH_TARGET_LABELS) & set(METHODS)
    for name in WITH_TARGET_LABELS:
        kind = known_pairs_class(name)
        assert kind is not None
        assert kind.uses_target_labels
        with error_says(f"'{name}'", "target labels", "cdtrans ablate"):
            require_method(name)


def test_two_targets_have_methods_of_their_own() -> None:
    """Else the labels of one run would be those of another."""
    one, two = (GroundTruth.with_labels(lambda n=n: torch.tensor([n])) for n in (1, 2))
    assert (one.true_labels().tolist(), two.true_labels().tolist()) == ([1], [2])
    assert not hasattr(GroundTruth, "true_labels")


@pytest.mark.parametrize(("method", "code"), [("cdtrans", "needs-no-labels"), ("ground_truth", "no-labelled-image")])
def test_a_method_without_labels_and_labels_of_other_images_are_refused(tmp_path: Path, method: str, code: str) -> None:
    settings = {"source_epochs": 1, "epochs": 1, "method": method}
    task = make_task(tmp_path / "task", **settings)
    places = {"source": str(task.source), "target": str(task.target)}
    task.config.write_text(yaml.safe_dump(yaml.safe_load(task.config.read_text()) | places))
    labels = make_source(tmp_path / "others", each=2)
    with raises(code):
        adapt_with_labels(labels=labels, config=task.config, out=tmp_path / "out", screen=Screen(quiet=True))
