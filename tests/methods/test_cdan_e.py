"""CDAN+E by hand: the multilinear map and its randomised form, the weights by entropy, DANN as a special case."""

import math

import pytest
import torch
from torch import nn

from cdtrans.methods.cdan_e import CDANE, MultilinearMap, certainty
from cdtrans.methods.dann import domain_loss
from cdtrans.network.network import Output
from support import tiny_batch, tiny_method


def outputs() -> tuple[Output, Output]:
    torch.manual_seed(1)
    features, logits = torch.randn(2, 6, 16), torch.randn(2, 6, 3)
    features.requires_grad_()
    logits.requires_grad_()
    return Output(features[0], logits[0]), Output(features[1], logits[1])


def test_the_map_has_every_product_of_a_feature_and_a_probability() -> None:
    h = MultilinearMap(2, 2, 100, 1)(torch.tensor([[2.0, 3.0]]), torch.tensor([[0.25, 0.75]]))
    assert h.tolist() == [[0.5, 0.75, 1.5, 2.25]]


def test_a_long_map_is_randomised_and_keeps_inner_products_on_average() -> None:
    torch.manual_seed(0)
    f, p = torch.randn(4, 10), torch.randn(4, 8).softmax(dim=1)
    exact, randomised = MultilinearMap(10, 8, 80, 16), MultilinearMap(10, 8, 79, 40_000)
    assert (exact.length, randomised.length) == (80, 40_000)
    h = randomised(f, p)
    expected = (f @ f.T) * (p @ p.T)  # inner products of the exact map
    torch.testing.assert_close(exact(f, p) @ exact(f, p).T, expected)
    torch.testing.assert_close(h @ h.T, expected, atol=0.05, rtol=0.05)
    assert {"r_f", "r_g"} == set(randomised.state_dict()), "its matrices are saved with a run"


def test_certain_images_count_twice_as_much_as_the_least_certain_can() -> None:
    sure, unsure = [100.0, 0.0], [0.0, 0.0]
    weights = certainty(torch.tensor([sure, unsure]), torch.tensor(1.0))
    e = torch.tensor([2.0, 1 + math.exp(-math.log(2))])
    torch.testing.assert_close(weights, e / e.mean())


def test_the_entropies_gradient_is_reversed_and_the_sum_of_weights_is_constant() -> None:
    """By hand: d/dH of sum_i c_i e_i / mean(e) with a constant mean is -c_i exp(-H_i) / mean(e), times -lambda."""
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0]], requires_grad=True)
    c, strength = torch.tensor([1.0, 5.0]), torch.tensor(0.5)
    (c * certainty(logits, strength)).sum().backward()
    free = logits.detach().clone().requires_grad_()
    log_p = free.log_softmax(dim=1)
    h = -(log_p.exp() * log_p).sum(dim=1)
    mean = (1 + torch.exp(-h)).mean().item()
    (c * torch.exp(-h.detach()) / mean * strength * h).sum().backward()
    torch.testing.assert_close(logits.grad, free.grad)


@pytest.mark.parametrize("entropy", [True, False])
def test_predictions_get_gradient_through_the_weights_alone(entropy: bool) -> None:
    method, (source, target) = tiny_method(CDANE, entropy=entropy, hidden=8), outputs()
    loss = method.domain(source, target, torch.tensor(1.0))
    to_feature, to_logits = torch.autograd.grad(loss, [source.feature, source.logits], allow_unused=True)
    assert to_feature.abs().max() > 0
    assert (to_logits is not None) == entropy


def test_the_weighted_loss_by_hand() -> None:
    """A critic that says its first input: logits 1 and -1 of the source, 2 and 0 of the target."""
    critic = nn.Flatten(0)
    source, target = torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [0.0]])
    weights = torch.tensor([1.5, 0.5]), torch.tensor([0.25, 1.75])
    loss = domain_loss(critic, source, target, torch.tensor(1.0), weights)

    def error(x: float) -> float:
        return math.log(1 + math.exp(x))

    of_source, of_target = 1.5 * error(-1) + 0.5 * error(1), 0.25 * error(2) + 1.75 * error(0)
    assert float(loss) == pytest.approx((of_source + of_target) / 4)


def test_the_critic_reads_a_randomised_map_if_features_times_classes_are_many() -> None:
    short, long = (tiny_method(CDANE, hidden=8, largest_map=largest, projection=12) for largest in (48, 47))
    assert [method.critic[0].in_features for method in (short, long)] == [48, 12]
    assert long.losses(tiny_batch(), torch.tensor(0.5))["loss_domain"].isfinite()
