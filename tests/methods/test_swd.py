"""SWD by hand: the sliced Wasserstein distance of two sets of predictions."""

import pytest
import torch
from torch.nn import functional as F

from cdtrans.methods.swd import SWD, sliced_wasserstein

P, Q = (torch.randn(20, 5, generator=torch.Generator().manual_seed(i)).softmax(dim=1) for i in (0, 1))
R = F.normalize(torch.randn(5, 128, generator=torch.Generator().manual_seed(2)), dim=0)


def test_by_hand_along_both_axes() -> None:
    p, q = torch.tensor([[0.1, 0.9], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]])
    # sorted along the first axis: .1 .6 and .2 .7, along the second: .4 .9 and .3 .8: every difference is 0.1
    assert float(sliced_wasserstein(p, q, torch.eye(2))) == pytest.approx(0.01)


def test_it_is_symmetric_and_0_for_equal_sets_in_any_order() -> None:
    assert float(sliced_wasserstein(P, P, R)) == 0
    assert float(sliced_wasserstein(P, P.flip(0), R)) == pytest.approx(0, abs=1e-12)
    assert float(sliced_wasserstein(P, Q, R)) == float(sliced_wasserstein(Q, P, R)) > 0


def test_directions_have_length_1_and_are_drawn_anew() -> None:
    torch.manual_seed(0)
    first, second = SWD.discrepancy(P, Q), SWD.discrepancy(P, Q)
    assert first != second
    torch.manual_seed(0)
    drawn = torch.randn(5, 128)
    torch.testing.assert_close(first, sliced_wasserstein(P, Q, drawn / drawn.square().sum(dim=0).sqrt()))
