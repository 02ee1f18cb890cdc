"""The curve through answers about single images."""

import numpy as np
import pytest

from cdtrans.record.probabilities import fit_curve, logistic


def scored(share: float, apart: float, images: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Scores, with mean 0 and variance 1, and whether each image belongs to no class."""
    rng = np.random.default_rng(0)
    none = rng.random(images) < share
    scores = rng.normal(size=images) + apart * none
    return (scores - scores.mean()) / scores.std(), none


def h_score(none: np.ndarray, rejected: np.ndarray) -> float:
    kept, found = (~rejected[~none]).mean(), rejected[none].mean()
    return float(2 * kept * found / (kept + found))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("apart", [3.0, 5.0])
def test_a_dozen_or_two_answers_place_the_cut_and_tell_the_share(share: float, apart: float) -> None:
    scores, none = scored(share, apart)
    asked = np.argsort(scores)[np.linspace(0, len(scores) - 1, 24).round().astype(int)]
    curve = fit_curve(scores, scores[asked], none[asked])
    best = max(h_score(none, scores > cut) for cut in np.quantile(scores, np.linspace(0.02, 0.98, 49)))
    assert h_score(none, scores > curve.cut) > best - 0.06
    assert curve.share == pytest.approx(share, abs=0.1)
    assert curve.share == pytest.approx(logistic(curve.intercept + curve.slope * scores).mean())


def test_answers_of_one_kind() -> None:
    scores, _ = scored(0.3, 4.0)
    asked = scores[:24]
    assert fit_curve(scores, asked, np.zeros(24, dtype=bool)) is None
    assert fit_curve(scores, asked[:0], np.zeros(0, dtype=bool)) is None
    every = fit_curve(scores, asked, np.ones(24, dtype=bool))
    assert every.share > 0.9
    opposite = fit_curve(scores, np.array([-2.0, 2.0]), np.array([True, False]))
    assert opposite.slope > 0, "a higher score never speaks for a class"
