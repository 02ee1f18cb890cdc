"""Adjusted mutual information is scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.metrics.cluster import expected_mutual_information as theirs

from cdtrans.trust.mutual_information import adjusted_mutual_information, expected_mutual_information


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 300), k=st.integers(1, 12), m=st.integers(1, 12), same=st.floats(0, 1)
)
@settings(max_examples=200, deadline=None)
def test_it_is_that_of_scikit_learn(seed: int, n: int, k: int, m: int, same: float) -> None:
    """Labellings that agree on a share of the things, with numbers that no thing has among the labels."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, k, n) * 2
    second = np.where(rng.random(n) < same, first, rng.integers(0, m, n) * 3)
    ours = adjusted_mutual_information(first, second)
    assert ours == pytest.approx(adjusted_mutual_info_score(first, second), abs=1e-9)
    assert ours == pytest.approx(adjusted_mutual_information(second, first), abs=1e-9)


def test_what_chance_gives_is_that_of_scikit_learn_for_many_classes() -> None:
    """As in DomainNet, and one class that most things are in."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 345, 4096), np.where(rng.random(4096) < 0.7, 7, rng.integers(0, 345, 4096))
    table = contingency_matrix(first, second, sparse=True)
    ours = expected_mutual_information(np.bincount(first), np.bincount(second)[np.unique(second)])
    assert ours == pytest.approx(theirs(table, 4096), rel=1e-9)


def test_known_values() -> None:
    x = np.array([0, 0, 1, 1, 2, 2])
    assert adjusted_mutual_information(x, x) == pytest.approx(1)
    assert adjusted_mutual_information(x, (x + 1) % 3) == pytest.approx(1), "names do not matter"
    assert adjusted_mutual_information(x, np.zeros(6, int)) == pytest.approx(0)
    independent = [
        adjusted_mutual_information(x.repeat(20), np.random.default_rng(s).permutation(x.repeat(20))) for s in range(40)
    ]
    assert np.mean(independent) == pytest.approx(0, abs=0.01), "not even by chance"
