"""Heads: what a card must say of them, and other domains than the target."""

import torch

from cdtrans.model.head import Head, Output, build_head


def test_a_head_that_standardises_is_built_again_from_what_it_says_of_itself() -> None:
    head = Head(4, 3, "standardise")
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
