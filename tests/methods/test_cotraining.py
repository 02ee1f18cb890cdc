"""The start, the losses, the teacher and the length of co-training; and the classifier of `instant`."""

import math

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Round, Sizes
from cdtrans.methods.cotraining import FULL_PAIRS, CoTraining, follow
from cdtrans.methods.instant import Instant
from cdtrans.network.encoding import Encoded
from cdtrans.network.network import Head, Network
from cdtrans.pairing.pairs import Domains, TargetLabels

CLASSES, DIM = 3, 16


def network(taps: int = 2) -> Network:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=DIM, depth=3, num_heads=2, num_classes=0)
    return Network(vit, Head(DIM * taps, CLASSES, "none"), taps)


def method(images: int = 30, **options: float) -> CoTraining:
    return CoTraining(network(), CoTraining.Options(**options), Sizes(CLASSES, 24, images))  # type: ignore[arg-type]


def domains_of(net: Network, images: Tensor, target: Tensor) -> Domains:
    labels = torch.arange(len(images)) % CLASSES
    with torch.inference_mode():
        source, target_out = (Encoded(*net.eval().encode(x)) for x in (images, target))
    return Domains(source, labels, target_out)


@pytest.fixture
def domains() -> Domains:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(54, 3, 16, 16, generator=generator)
    for k in range(CLASSES):
        images[k::CLASSES, k] += 2.0
    return domains_of(network(), images[:24], images[24:])


def batch(seed: int = 0) -> Batch:
    x = torch.randn(2, 6, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(6) % CLASSES
    return Batch(x[0], y, x[1], F.one_hot(y, CLASSES).float(), torch.arange(6), torch.ones(6))


def plan(of: CoTraining | Instant, domains: Domains, number: int = 1):
    return of.plan(domains, Round(number, 4, number), torch.Generator().manual_seed(0))


def test_instant_serves_the_probe_that_fits_the_graphs_labels(domains: Domains) -> None:
    instant = Instant(network(), None, Sizes(CLASSES, 24, 30))
    pairs = plan(instant, domains)
    served = instant.served().eval()
    found = served.head.classify(domains.target.features).logits.argmax(dim=1)  # neck 'none': features as they are
    assert float((found == pairs.target_labels).float().mean()) > 0.9
    assert (pairs.source_labels == pairs.target_labels).all()


def test_co_training_starts_from_that_probe_and_so_does_its_teacher(domains: Domains) -> None:
    start, instant = method(), Instant(network(), None, Sizes(CLASSES, 24, 30))
    plan(start, domains), plan(instant, domains)
    for head in (start.head, start.teacher.head):
        for key, value in instant.probe.state_dict().items():
            torch.testing.assert_close(head.state_dict()[key], value)
    torch.testing.assert_close(start.source_norm.running_mean, domains.source.features.mean(dim=0))


def test_a_round_has_its_part_of_the_runs_pairs_with_soft_labels(domains: Domains) -> None:
    started = method(length=0.01)
    pairs = plan(started, domains)
    assert len(pairs.source) == math.ceil(0.01 * FULL_PAIRS / 4)
    assert pairs.target_labels.shape == (len(pairs.source), CLASSES)
    torch.testing.assert_close(started.shares.sum(), torch.tensor(1.0))
    counts = torch.bincount(pairs.target, minlength=30)
    assert counts.max() - counts.min() <= 1, "every image before any comes twice"


@pytest.mark.parametrize(("images", "times"), [(10, 1), (3976, 1), (15976, 2), (399_976, 10)])
def test_steps_grow_with_the_root_of_the_images(images: int, times: int) -> None:
    assert method(images=images).pairs == times * FULL_PAIRS


def test_the_losses_are_those_of_the_docstring(domains: Domains) -> None:
    """Without augmentation, so that each can be computed by hand."""
    m = method(mask=False, strong=False)
    plan(m, domains)
    m.train()
    one = batch()
    losses = m.losses(one, torch.tensor(0.0))
    assert not m.teacher.training
    with torch.no_grad():
        q = m.teacher.encode(one.x_t).logits.softmax(dim=1)
        f_s, f_t = m.network.features_each(one.x_s, one.x_t)
        norm = [(f - f.mean(dim=0)) / (f.var(dim=0, correction=0) + 1e-5).sqrt() for f in (f_s, f_t)]
        z_s, z_t = (m.head.classifier(f) for f in norm)
        t, p = (q + one.y_t) / 2, z_t.softmax(dim=1)
        target = -(t.amax(dim=1) * (t * p.log()).sum(dim=1)).mean()
        mean = p.mean(dim=0)
        entropy = -(p * p.log()).sum(dim=1).mean()
        information = 0.5 * (entropy + (mean * (mean / m.shares).log()).sum())
    torch.testing.assert_close(losses["loss_source"], F.cross_entropy(z_s, one.y_s, label_smoothing=0.1))
    torch.testing.assert_close(losses["loss_target"], target)
    torch.testing.assert_close(losses["loss_information"], information, atol=1e-4, rtol=1e-4)


def test_the_teacher_follows_fast_at_first_and_slowly_then() -> None:
    m = method(length=0.01)  # 192 pairs, 32 steps of 6
    with torch.no_grad():
        for p in m.network.backbone.parameters():
            p.add_(1.0)
    far = [float((m.network.backbone.cls_token - m.teacher.backbone.cls_token).mean())]
    for _ in range(3):
        m.after_step(batch(), torch.tensor(0.0))
        far.append(float((m.network.backbone.cls_token - m.teacher.backbone.cls_token).mean()))
    assert far[1] == pytest.approx(0.1 * far[0], rel=1e-4), "its decay is 1 / 10 at first"
    assert far[3] / far[2] == pytest.approx(3 / 12, rel=1e-3), "then n / (n + 9)"
    assert m.slowest(6) == pytest.approx(1 - 3 / 32), "at last an average of a third of the run"
    assert method().slowest(64) == pytest.approx(0.99)


def test_follow_moves_weights_and_statistics_and_leaves_counters() -> None:
    a, b = (Head(4, 2, "standardise") for _ in range(2))
    b.neck.running_mean.fill_(1.0)
    b.neck.num_batches_tracked.fill_(7)
    follow(a, b, torch.tensor(0.25))
    assert a.neck.running_mean.tolist() == [0.25] * 4
    assert int(a.neck.num_batches_tracked) == 0


@pytest.mark.parametrize(("taps", "leading"), [(1, 16), (2, 32), (3, 32)])
def test_the_first_view_is_the_last_two_blocks(taps: int, leading: int) -> None:
    assert network(taps).leading == leading


def test_a_given_label_is_taught_as_it_is_and_more_often() -> None:
    sizes, net = Sizes(3, 30, 30), network()
    m = CoTraining(net, CoTraining.Options(length=0.1, mask=False, strong=False), sizes)
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(2, 30, net.dim, generator=generator)
    labels = torch.arange(30) % 3
    given = TargetLabels(torch.tensor([4, 7]), torch.tensor([2, 0]))
    domains = Domains(Encoded(x, torch.zeros(30, 3)), labels, Encoded(z, torch.zeros(30, 3)), given)
    plan = m.plan(domains, Round(1, 1, 1), generator)
    assert m.given.nonzero().squeeze(1).tolist() == [4, 7]
    counts = plan.target.bincount(minlength=30)
    assert counts[[4, 7]].sum() > 0.125 * len(plan.target)
    assert plan.target_labels[plan.target == 4][0].tolist() == [0, 0, 1]
    taught, black = [], torch.zeros(2, 3, 16, 16)
    for i in (4, 5):  # the same soft label; only the first is a person's
        batch = Batch(black, labels[:2], black, torch.eye(3)[[2, 2]], torch.tensor([i, i]), torch.ones(2))
        torch.manual_seed(0)
        taught.append(float(m.eval().losses(batch, torch.tensor(0.5))["loss_target"].detach()))
    p = net.features(black[:1])
    log_p = m.head.classify(p).logits.log_softmax(dim=1)[0]
    assert taught[0] == pytest.approx(-float(log_p[2]), rel=1e-4)
    assert taught[1] != pytest.approx(taught[0], rel=1e-3)
