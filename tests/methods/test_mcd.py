"""MCD by hand: the discrepancy, the balance term, and what each kind of update may change."""

import math
from collections.abc import Sequence

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor

from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.mcd import MCD, balance
from cdtrans.network.network import Head, Network


def make_method(**options: object) -> MCD:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0)
    network = Network(vit, Head(16, 3, "batchnorm"))
    return MCD(network, MCD.Options(hidden=8, **options), Sizes(3, 10, 10)).train()  # type: ignore[arg-type]


def batch() -> Batch:
    torch.manual_seed(1)
    x = torch.randn(2, 6, 3, 16, 16)
    return Batch(x[0], torch.arange(6) % 3, x[1], torch.zeros(6).long(), torch.arange(6), torch.ones(6))


def test_the_discrepancy_is_the_mean_difference_over_images_and_classes() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert float(MCD.discrepancy(p, q)) == pytest.approx(0.125)


def test_balance_is_least_for_classes_that_are_predicted_equally_often() -> None:
    even, odd = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert float(balance(even)) == pytest.approx(math.log(2), abs=1e-4)
    assert balance(even) < balance(odd)


def test_the_weight_of_the_discrepancy_grows_with_the_number_of_classes() -> None:
    assert make_method().trade_off == pytest.approx(1.0)
    assert make_method(trade_off=0.5).trade_off == 0.5


class Recorded:
    """In place of the optimiser: which parameters each update is for, and the gradients they get."""

    def __init__(self, method: MCD) -> None:
        self.names = {id(p): name for name, p in method.named_parameters()}
        self.updates: list[set[str]] = []
        self.losses: list[float] = []

    def __call__(self, loss: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        assert parameters is not None
        gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        assert all(gradient is not None for gradient in gradients), "every parameter of the update takes part in it"
        self.updates.append({self.names[id(p)].split(".")[0] for p in parameters})
        self.losses.append(float(loss.detach()))


def test_a_step_is_a_then_b_then_four_times_c() -> None:
    method = make_method()
    update = Recorded(method)
    losses = method.train_step(batch(), torch.tensor(0.5), update)
    assert update.updates == [{"network", "classifiers"}, {"classifiers"}, *[{"network"}] * 4]
    assert list(losses) == ["loss_source", "loss_discrepancy"]
    assert losses["loss_source"].item() == update.losses[0]


def test_identical_classifiers_have_no_discrepancy_and_c_no_gradient() -> None:
    method = make_method(dropout=0.0)
    first, second = method.classifiers.heads
    second.load_state_dict(first.state_dict())
    features = method.features(batch().x_t)[0]
    discrepancy = method.discrepancy(*method.predictions(features))
    assert float(discrepancy.detach()) == 0
    gradients = torch.autograd.grad(discrepancy, list(method.network.backbone.parameters()), allow_unused=True)
    assert all(gradient is None or gradient.abs().max() == 0 for gradient in gradients)


def test_served_is_the_mean_of_both_classifiers_on_the_same_backbone() -> None:
    method = make_method().eval()
    served, x = method.served(), batch().x_t
    first, second = method.classifiers.each(method.network.features(x))
    torch.testing.assert_close(served.encode(x).logits, (first + second) / 2)
    assert served.backbone is method.network.backbone
