"""SHOT by hand: information maximisation, the centres' labels, the frozen classifier."""

import torch
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Round, Sizes
from cdtrans.methods.shot import SHOT, SHOTIM
from cdtrans.network.encoding import Encoded
from cdtrans.pairing.pairs import Domains, Proposals
from support import tiny_batch, tiny_method

PROGRESS = torch.zeros(())


def make_method(kind: type[SHOTIM] = SHOT, **options: object) -> SHOTIM:
    return tiny_method(kind, **options)  # type: ignore[no-any-return]


def batch(weight: float = 1.0) -> Batch:
    return tiny_batch()._replace(y_t=torch.arange(6) % 3, weight=torch.full((6,), weight))


def domains() -> Domains:
    torch.manual_seed(0)
    source = Encoded(torch.randn(10, 5), torch.randn(10, 3))
    return Domains(source, torch.arange(10) % 3, Encoded(torch.randn(10, 5), 3 * torch.randn(10, 3)))


def planned(method: SHOTIM, number: int = 1) -> Proposals:
    return method.plan(domains(), Round(number, 4, number), torch.Generator().manual_seed(0))


def test_the_loss_is_the_paper_s() -> None:
    method = make_method()
    losses = method.losses(batch(), PROGRESS)
    logits = method.network.encode(batch().x_t).logits
    p = logits.softmax(dim=1)
    mean = p.mean(dim=0)
    entropies = -(p * p.log()).sum(dim=1).mean() + (mean * mean.log()).sum()
    expected = entropies + 0.3 * F.cross_entropy(logits, batch().y_t)
    torch.testing.assert_close(torch.stack(list(losses.values())).sum(), expected, atol=1e-4, rtol=0)


def test_without_labels_it_is_shot_im() -> None:
    expected = make_method(SHOTIM).losses(batch(), PROGRESS)
    for losses in (make_method(labels=0.0).losses(batch(), PROGRESS), make_method().losses(batch(0.0), PROGRESS)):
        assert losses.pop("loss_target").item() == 0
        assert {k: v.item() for k, v in losses.items()} == {k: v.item() for k, v in expected.items()}


def test_the_classifier_stays_and_all_else_learns() -> None:
    method = make_method()
    torch.stack(list(method.losses(batch(), PROGRESS).values())).sum().backward()
    without = {name for name, p in method.named_parameters() if p.grad is None}
    assert without == {"network.head.classifier.weight", "network.head.neck.bias"}, "the bias is frozen in stage 1 too"


def test_every_target_image_is_planned_once_with_its_centre_s_class() -> None:
    pairs = planned(make_method()).pairs()
    assert sorted(pairs.target.tolist()) == list(range(10))
    assert pairs.target_labels.tolist() == domains().centers[pairs.target].tolist()


def test_it_can_be_planned_without_source_images() -> None:
    method = make_method()
    method.sizes = Sizes(3, 0, 10)
    both = domains()
    alone = Domains(Encoded(both.source.features[:0], both.source.logits[:0]), both.source_labels[:0], both.target)
    pairs = method.plan(alone, Round(1, 4, 1), torch.Generator().manual_seed(0)).pairs()
    assert pairs.target_labels.tolist() == both.centers[pairs.target].tolist()
    assert (pairs.source == -1).all()
    assert pairs.summary()["sources_used"] == 0


def test_labels_may_begin_with_a_later_round() -> None:
    late = make_method(labels_from=2)
    assert planned(late, 1).pairs().weight.tolist() == [0.0] * 10
    assert planned(late, 2).pairs().weight.tolist() == planned(make_method(), 1).pairs().weight.tolist() == [1.0] * 10
