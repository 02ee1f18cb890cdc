"""Scores of images that the graphs do not reach: of a large target, new ones, and of a run without source images."""

import numpy as np
import pytest
import torch

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.occurring import score_of_nearest
from cdtrans.pairing.pairs import Domains
from cdtrans.record.outcome import NoClassCurve
from cdtrans.record.probabilities import no_class, no_class_cut
from cdtrans.trust import support
from cdtrans.trust.support import Evidence, evenly


def two_groups(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features around two far points, and which of the two, [N] each."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(count) % 2
    return torch.randn(count, 6, generator=generator) * 0.1 + (2.0 * group[:, None] - 1), group


def test_an_image_has_the_score_of_those_near_it() -> None:
    (known, group), (new, of_new) = two_groups(60, 0), two_groups(9, 1)
    scores = torch.where(group == 1, 2.0, -1.0)
    torch.testing.assert_close(score_of_nearest(new, known, scores), torch.where(of_new == 1, 2.0, -1.0))


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_images_than_neighbours_are_enough(count: int) -> None:
    known, new = two_groups(count, 0)[0], two_groups(4, 1)[0]
    assert score_of_nearest(new, known, torch.ones(count)).tolist() == pytest.approx([1.0] * 4)


def test_every_image_of_a_large_target_has_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    features, group = two_groups(100, 0)
    scores = torch.where(group == 1, 2.0, -1.0) + torch.arange(100) / 1000
    assert support.of_every_image(scores, features) is scores
    monkeypatch.setattr(support, "MOST_IMAGES", 31)
    some = evenly(features, 31)
    every = support.of_every_image(scores[some], features)
    torch.testing.assert_close(every[some], scores[some])
    assert (every - scores).abs().max() < 0.2


def test_without_source_images_it_is_the_doubt_of_the_model() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 0.0, 9.0], [1.0, 1.0, 0.0]])
    none = Encoded(torch.zeros(0, 4), torch.zeros(0, 3))
    domains = Domains(none, torch.zeros(0, dtype=torch.long), Encoded(torch.zeros(3, 4), logits))
    evidence = [
        Evidence.of(domains, 3, 4, pretrained=True, told=told, notice=False)
        for told in (None, torch.tensor([True, True, False]))
    ]
    every, two = (each.no_class for each in evidence)
    assert every.argsort().tolist()[-1] == 2
    assert every[1] < 0 < every[2]
    torch.testing.assert_close(two.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert two[1] > every[1], "of the classes that occur, the second image is like neither"


def test_the_curve_makes_scores_probabilities() -> None:
    scores = np.array([-1.0, 0.0, 2.0])
    np.testing.assert_allclose(no_class(scores, None), [0.268941, 0.5, 0.880797], atol=1e-6)
    curve = NoClassCurve(intercept=-1.0, slope=2.0, cut=0.5, share=0.3)
    np.testing.assert_allclose(no_class(scores, curve), [0.047426, 0.268941, 0.952574], atol=1e-6)
    assert no_class_cut(curve) == pytest.approx(0.5)
    assert no_class_cut(NoClassCurve(0.0, 1.0, float("inf"), 0.0)) == 1.0, "no image is above it"
