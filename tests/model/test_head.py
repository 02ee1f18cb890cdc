"""The head: the authors' bottleneck norm and bias-free classifier, or a plain linear layer."""

import pytest
import torch
from torch import nn

from cdtrans.model.head import CLASSIFIER_STD, Head


def test_the_neck_is_the_authors_batch_norm_with_its_bias_frozen_at_zero() -> None:
    head = Head(8, 3, "batchnorm")
    assert type(head.neck) is nn.BatchNorm1d
    assert (head.neck.eps, head.neck.momentum) == (1e-5, 0.1)
    assert not head.neck.bias.requires_grad
    assert not head.neck.bias.any()
    assert head.neck.weight.requires_grad
    assert head.classifier.bias is None


def test_training_moves_everything_but_the_frozen_bias() -> None:
    torch.manual_seed(0)
    head = Head(8, 3, "batchnorm")
    head(torch.randn(5, 8)).logits.square().sum().backward()
    assert head.neck.bias.grad is None
    assert head.neck.weight.grad is not None
    assert head.classifier.weight.grad is not None


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


def test_the_feature_is_the_one_after_the_neck(tiny) -> None:
    """In eval mode, from the authors' features to their bottleneck output and logits."""
    model, g = tiny
    out = model.eval().head(g["eval/feat_t"])
    torch.testing.assert_close(out.feature, g["eval/bn_t"], rtol=0, atol=1e-10)
    torch.testing.assert_close(out.logits, g["eval/logits_t"], rtol=0, atol=1e-10)
    assert not torch.allclose(out.feature, g["eval/feat_t"])
