"""What is remembered of a model."""

import torch

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains
from cdtrans.trust.impression import impression, views


def test_without_source_images_the_target_is_all_that_is_remembered() -> None:
    features, logits = torch.randn(6, 4), torch.randn(6, 3)
    domains = Domains(Encoded(features[:0], logits[:0]), torch.zeros(0, dtype=torch.long), Encoded(features, logits))
    found = impression(domains)
    assert not found.has_source
    assert torch.equal(found.target_logits, logits)
    arrays = views(found, found)
    assert (len(arrays["source_labels"]), len(arrays["target_before"])) == (0, 6)
