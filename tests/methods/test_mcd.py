"""MCD by hand: the discrepancy, the balance term, and what each kind of update may change."""

import math

import pytest
import torch

from cdtrans.methods.cgdm import CGDM
from cdtrans.methods.mcd import MCD, balance
from support import Updates, tiny_batch, tiny_method


def test_the_discrepancy_is_the_mean_difference_over_images_and_classes() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert float(MCD.discrepancy(p, q)) == pytest.approx(0.125)


def test_balance_is_least_for_classes_that_are_predicted_equally_often() -> None:
    even, odd = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert float(balance(even)) == pytest.approx(math.log(2), abs=1e-4)
    assert balance(even) < balance(odd)


def test_the_weight_of_the_discrepancy_grows_with_the_number_of_classes() -> None:
    assert tiny_method(MCD, hidden=8).trade_off == pytest.approx(1.0)
    assert tiny_method(MCD, hidden=8, trade_off=0.5).trade_off == 0.5


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (MCD, ["loss_source", "loss_discrepancy"]),
        (CGDM, ["loss_source", "loss_target", "loss_discrepancy", "loss_gradients"]),
    ],
)
def test_a_step_is_a_then_b_then_four_times_c(kind: type[MCD], names: list[str]) -> None:
    method = tiny_method(kind, hidden=8)
    update = Updates(method)
    losses = method.train_step(tiny_batch(), torch.tensor(0.5), update)
    assert update.modules == [{"network", "classifiers"}, {"classifiers"}, *[{"network"}] * 4]
    assert list(losses) == names


def test_served_is_the_mean_of_both_classifiers_on_the_same_backbone() -> None:
    method = tiny_method(MCD, hidden=8).eval()
    served, x = method.served(), tiny_batch().x_t
    first, second = method.classifiers.each(method.network.features(x))
    torch.testing.assert_close(served.encode(x).logits, (first + second) / 2)
    assert served.backbone is method.network.backbone
