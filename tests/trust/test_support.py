"""The support of predictions by the source's labels, crowded classes, and what is kept of a model."""

import dataclasses

import pytest
import torch
from sklearn.metrics import cohen_kappa_score
from torch.nn import functional as F

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.narrowing import Numbering
from cdtrans.pairing.pairs import Domains, TargetLabels
from cdtrans.trust import support as module
from cdtrans.trust.support import Evidence, cross_validated, impression, kappa, nearest_labels, shifted, views

EVEN = [10] * 7


def test_kappa_is_cohens() -> None:
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 5):
        a, b = torch.randint(classes, (2, 200), generator=generator)
        b = torch.where(torch.rand(200, generator=generator) < 0.4, a, b)
        assert kappa(a, b) == pytest.approx(cohen_kappa_score(a.numpy(), b.numpy()))
    assert kappa(a, a) == 1
    assert kappa(torch.zeros(9, dtype=torch.long), torch.zeros(9, dtype=torch.long)) == 0, "no evidence in one class"


def test_shifted_is_total_variation() -> None:
    assert shifted(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])) == 0.25
    assert shifted(torch.tensor([0, 0]), torch.tensor([1, 2, 2, 1])) == 1.0


def clusters(labels: torch.Tensor, seed: int, move: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(8, 16, generator=torch.Generator().manual_seed(9))
    return centers[labels] + 0.2 * torch.randn(len(labels), 16, generator=generator) + move


def domains(source_labels: torch.Tensor, target_labels: torch.Tensor) -> Domains:
    """The target is moved and stretched, which its own statistics take back."""
    source, target = clusters(source_labels, 1), 3 * clusters(target_labels, 2, move=5.0)
    blank = torch.zeros(len(source), 8), torch.zeros(len(target), 8)
    return Domains(Encoded(source, blank[0]), source_labels, Encoded(target, blank[1]))


def evidence_of(source: torch.Tensor, target: torch.Tensor) -> Evidence:
    return Evidence.of(domains(source, target), 8, 16, pretrained=True)._replace(learnable=torch.tensor(1.0))


def test_right_predictions_are_supported_wrong_ones_and_other_classes_are_not() -> None:
    source, target = torch.arange(120) % 4, torch.arange(80) % 4
    evidence = evidence_of(source, target)
    assert evidence.nearest.shape == (80, 10)
    right = evidence.support(target)
    assert right.first > 0.95
    assert right.mean > 0.95
    assert right.shift == 0
    assert evidence.support((target + 1) % 4).first < 0
    some = evidence._replace(nearest=evidence.nearest[target < 2], reference=evidence.reference[target < 2])
    assert some.support(target[target < 2]).shift == 0.5
    weak = evidence._replace(learnable=torch.tensor(0.5))
    assert weak.support(target).first == pytest.approx(2 * right.first)


def test_a_large_target_is_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.arange(120) % 4, torch.arange(80) % 4
    monkeypatch.setattr(module, "MOST_IMAGES", 27)
    evidence = evidence_of(source, target)
    assert evidence.nearest.shape == (27, 10)
    assert evidence.reference.shape == (27,)
    assert evidence.support(target).first > 0.95, "the same images are asked about"
    assert evidence.stayed(target, target) < 0.05, "and have a reference"


def test_stayed_counts_predictions_of_the_source_only_model_that_the_reference_changed() -> None:
    source, target = torch.arange(120) % 4, torch.arange(80) % 4
    evidence = evidence_of(source, target)
    assert evidence.reference.equal(target), "these clusters are easy"
    assert (float(evidence.agreement), float(evidence.steady)) == (1.0, 1.0)
    start = torch.where(torch.arange(80) < 20, (target + 1) % 4, target)
    assert evidence.stayed(start, start) == 0.25, "the source-only model itself"
    assert evidence.stayed(target, start) == 0, "a model that agrees with the reference"
    half = torch.where(torch.arange(80) < 10, start, target)
    assert evidence.stayed(half, start) == 0.125
    assert evidence.stayed((target + 2) % 4, start) == 0, "one that moved elsewhere"


def test_a_target_without_classes_has_a_reference_that_is_neither_agreed_upon_nor_steady() -> None:
    source, noise = torch.arange(120) % 4, torch.randn(80, 16, generator=torch.Generator().manual_seed(0))
    easy = domains(source, torch.arange(80) % 4)
    hard = dataclasses.replace(easy, target=Encoded(noise, torch.zeros(80, 8)))
    evidence = Evidence.of(hard, 8, 16, pretrained=True)
    assert evidence.agreement < 0.9
    assert evidence.steady < 0.9


def test_labels_that_the_user_gave_are_no_part_of_the_reference() -> None:
    """Else the estimate would count them as evidence about the other images."""
    source, target = torch.arange(120) % 4, torch.arange(80) % 4
    wrong = TargetLabels(torch.arange(40), (target[:40] + 1) % 4)
    evidence = Evidence.of(dataclasses.replace(domains(source, target), given=wrong), 8, 16, pretrained=True)
    assert evidence.reference.equal(target)


def test_fewer_source_images_than_neighbours() -> None:
    source, target = torch.arange(4), torch.arange(8) % 4
    assert nearest_labels(domains(source, target), torch.ones(4, dtype=torch.bool)).shape == (8, 4)


def test_cross_validation_tells_labels_from_shuffled_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(200) % 4).sort().values  # in the order of the classes, as a source is
    features = F.one_hot(labels, 4) + 0.3 * torch.randn(200, 4, generator=generator)
    features = torch.cat([features, torch.randn(200, 40, generator=generator)], dim=1)
    assert cross_validated(features, labels, 4) > 0.9
    shuffled = labels[torch.randperm(200, generator=generator)]
    assert cross_validated(features, shuffled, 4) < 0.4


def test_without_source_images_the_target_is_all_that_is_remembered() -> None:
    features, logits = torch.randn(6, 4), torch.randn(6, 3)
    domains = Domains(Encoded(features[:0], logits[:0]), torch.zeros(0, dtype=torch.long), Encoded(features, logits))
    found = impression(domains)
    assert not found.has_source
    assert torch.equal(found.target_logits, logits)
    evidence = Evidence.of(domains, 3, 4, pretrained=True)
    arrays = views(found, found, evidence, Numbering.of(evidence.occurs, domains.source_labels))
    assert (len(arrays["source_labels"]), len(arrays["target_before"])) == (0, 6)
