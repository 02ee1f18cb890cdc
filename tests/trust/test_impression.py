"""What is remembered of a model."""

import torch
from torch.nn import functional as F

from cdtrans.model.encoding import Encoded
from cdtrans.pairing.pairs import Domains
from cdtrans.trust.impression import cross_validated, impression, views


def test_cross_validation_tells_labels_from_shuffled_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(200) % 4).sort().values  # in the order of the classes, as a source is
    features = F.one_hot(labels, 4) + 0.3 * torch.randn(200, 4, generator=generator)
    features = torch.cat([features, torch.randn(200, 40, generator=generator)], dim=1)
    assert cross_validated(features, labels, 4) > 0.9
    shuffled = labels[torch.randperm(200, generator=generator)]
    assert cross_validated(features, shuffled, 4) < 0.4


def test_without_source_images_the_target_is_all_that_is_remembered() -> None:
    features, logits = torch.randn(6, 4), torch.randn(6, 3)
    domains = Domains(Encoded(features[:0], logits[:0]), torch.zeros(0, dtype=torch.long), Encoded(features, logits))
    found = impression(domains)
    assert not found.has_source
    assert torch.equal(found.target_logits, logits)
    arrays = views(found, found)
    assert (len(arrays["source_labels"]), len(arrays["target_before"])) == (0, 6)
