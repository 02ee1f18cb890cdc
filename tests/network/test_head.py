"""Heads: the authors' bottleneck norm and bias-free classifier, a plain linear layer, or a probe that standardises."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cdtrans.network.network import CLASSIFIER_STD, AnyHead, BottleneckHead, Head, MeanHead, Output, build_head


def test_no_neck_is_a_plain_linear_layer_with_a_bias() -> None:
    torch.manual_seed(0)
    head = Head(8, 3, "none")
    feature = torch.randn(5, 8)
    out = head(feature)
    assert out.feature is feature
    assert not head.classifier.bias.any()
    assert head.classifier.bias.requires_grad
    nn.init.ones_(head.classifier.bias)
    torch.testing.assert_close(head(feature).logits, feature @ head.classifier.weight.T + 1)
    assert {name for name, _ in head.named_parameters()} == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("neck", ["batchnorm", "none"])
def test_the_classifier_starts_as_the_authors_does(neck: str) -> None:
    torch.manual_seed(0)
    weight = Head(500, 400, neck).classifier.weight
    assert weight.std().item() == pytest.approx(CLASSIFIER_STD, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-5)
    assert CLASSIFIER_STD == 0.001


@pytest.mark.parametrize(
    "head",
    [Head(4, 3, "standardise"), MeanHead(4, 3, heads=2, hidden=5), BottleneckHead(4, 3, bottleneck=5)],
    ids=lambda head: type(head).__name__,
)
def test_a_head_is_built_again_from_what_it_says_of_itself(head: AnyHead) -> None:
    again = build_head(head.spec, 4, 3, neck="batchnorm")
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in head.state_dict().items()}
    assert build_head({}, 4, 3, neck="none").state_dict().keys() == {"classifier.weight", "classifier.bias"}


def test_another_domain_is_standardised_by_its_own_statistics() -> None:
    """So a shift and a scale of all its features change nothing."""
    torch.manual_seed(0)
    head = Head(4, 3, "standardise").eval()
    torch.nn.init.normal_(head.classifier.weight)
    x = torch.randn(50, 4)
    plain, moved = (head.of_another_domain(head(y)) for y in (x, 3 * x + 7))
    torch.testing.assert_close(moved.logits, plain.logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(head(3 * x + 7).logits, head(x).logits, atol=1e-1), "by the target's they would"
    other = Head(4, 3, "batchnorm").eval()
    out = Output(*other(x))
    assert other.of_another_domain(out) is out


def test_another_domain_may_be_kept_elsewhere_than_the_classifier() -> None:
    """Encoded images are on the CPU while a Mac's GPU has the network. Fake tensors have devices that are not here."""
    with FakeTensorMode():
        with torch.device("cuda"):
            head = Head(4, 3, "standardise")
        out = head.of_another_domain(Output(torch.randn(5, 4), torch.zeros(5, 3)))
        assert head.classifier.weight.device.type == "cuda"
        assert out.feature.device.type == out.logits.device.type == "cpu"
