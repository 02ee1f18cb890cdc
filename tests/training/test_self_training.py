"""RPLL and MRKLD+LRENT, by hand."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.config import Config
from cdtrans.model.network import Network
from cdtrans.pairing.pairs import search_pairs
from cdtrans.training.losses import rectified_loss, uniform_divergence
from cdtrans.training.self_training import (
    MODEL_DIVERGENCE,
    balanced_labels,
    portion,
    self_trained,
    self_training_losses,
    shuffled,
)
from cdtrans.training.state import step_seed

P = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.5, 0.45, 0.05], [0.55, 0.4, 0.05], [0.3, 0.6, 0.1]]).double()


class TestRectifiedLoss:
    def test_by_hand(self) -> None:
        primary, auxiliary = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
        variance = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
        expected = math.exp(-variance) * -math.log(0.2) + variance
        assert float(rectified_loss(primary, auxiliary, torch.tensor([1]))) == pytest.approx(expected)

    def test_equal_predictions_leave_the_cross_entropy(self) -> None:
        logits, labels = torch.randn(7, 4), torch.randint(4, (7,))
        torch.testing.assert_close(rectified_loss(logits, logits, labels), F.cross_entropy(logits, labels))

    def test_labels_may_be_soft(self) -> None:
        logits, other, labels = torch.randn(7, 4), torch.randn(7, 4), torch.randint(4, (7,))
        soft = F.one_hot(labels, 4).float()
        torch.testing.assert_close(rectified_loss(logits, other, soft), rectified_loss(logits, other, labels))


def test_the_divergence_from_uniform_is_that_of_torch() -> None:
    logits = torch.randn(5, 3).double()
    uniform = torch.full((5, 3), 1 / 3).double()
    expected = F.kl_div(logits.log_softmax(dim=1), uniform, reduction="batchmean")
    torch.testing.assert_close(uniform_divergence(logits), expected)
    assert float(uniform_divergence(torch.zeros(2, 3))) == pytest.approx(0, abs=1e-6)


class TestBalancedLabels:
    def test_the_most_confident_of_each_class_are_selected(self) -> None:
        # predicted as 0: confidences .9 .6 .55 .5, half of them is two: lambda_0 = .6; as 1: .6 alone; as 2: nobody
        found = balanced_labels(P, 0.5)
        assert found.selected.tolist() == [True, True, False, False, True]

    def test_labels_are_the_balanced_predictions_sharpened(self) -> None:
        thresholds = torch.tensor([0.6, 0.6, 1.0]).double()
        expected = (P / thresholds) ** 4
        torch.testing.assert_close(balanced_labels(P, 0.5).labels, expected / expected.sum(dim=1, keepdim=True))

    def test_a_rare_class_gets_images_that_lean_to_it(self) -> None:
        p = torch.tensor([[0.9, 0.1], [0.55, 0.45], [0.6, 0.4], [0.49, 0.51]]).double()
        found = balanced_labels(p, 0.01)  # lambda = .9 and .51
        assert found.selected.tolist() == [True, False, False, True]
        assert found.labels.argmax(dim=1).tolist() == [0, 1, 1, 1], "0.45 of 0.51 is more than 0.55 of 0.9"

    def test_all_of_them(self) -> None:
        assert balanced_labels(P, 1.0).selected.all()


def test_the_portion_grows_over_the_rounds() -> None:
    config = Config(epochs=40, rebuild_every=10)
    assert [portion(epoch, config) for epoch in (1, 11, 21, 31)] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert portion(1, Config(epochs=4, rebuild_every=10)) == 0.2


def test_shuffled_has_each_once_before_any_comes_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.tensor([3, 5, 8])
    assert sorted(shuffled(indices, 3, generator).tolist()) == [3, 5, 8]
    assert sorted(shuffled(indices, 7, generator).bincount()[indices].tolist()) == [2, 2, 3]


class TestSelfTrained:
    def found(self, method: str, sources: int = 9) -> tuple:
        torch.manual_seed(0)
        labels = torch.arange(sources) % 3
        features, logits = torch.randn(sources, 4), 3 * torch.randn(6, 3)
        found = search_pairs(features, labels, torch.randn(6, 4), logits)
        config = Config(self_training=method, epochs=4, rebuild_every=2)  # type: ignore[arg-type]
        return found, logits, config

    def test_rpll_has_every_target_image_with_its_prediction(self) -> None:
        found, logits, config = self.found("rpll")
        pairs = self_trained(found, logits, 1, config).pairs()
        assert sorted(pairs.source.tolist()) == list(range(9)), "the larger side once"
        assert set(pairs.target.tolist()) == set(range(6))
        assert torch.equal(pairs.target_labels.argmax(dim=1), logits.argmax(dim=1)[pairs.target])
        assert (pairs.target_labels.amax(dim=1) == 1).all()
        assert torch.equal(pairs.source_labels, found.labels[pairs.source])

    def test_mrkld_lrent_has_those_that_are_selected(self) -> None:
        found, logits, config = self.found("mrkld_lrent", sources=3)
        for epoch, share in ((1, 0.2), (3, 0.5)):
            expected = balanced_labels(logits.softmax(dim=1), share)
            result = self_trained(found, logits, epoch, config)
            assert set(result.target.tolist()) == set(expected.selected.nonzero().squeeze(1).tolist())
            assert torch.equal(result.pairs().target_labels, expected.labels[result.target])

    def test_what_is_written_of_a_round_is_what_was_taught(self) -> None:
        found, logits, config = self.found("rpll")
        result = self_trained(replace(found, centers=(logits.argmax(dim=1) + 1) % 3), logits, 1, config)
        assert result.arrays()["target_labels"].tolist() == logits.argmax(dim=1)[result.target].tolist()

    def test_what_meets_is_not_drawn_by_the_generator_of_the_epoch_s_order(self) -> None:
        found, logits, config = self.found("rpll")
        drawn = self_trained(found, logits, 1, config).source
        generator = torch.Generator().manual_seed(step_seed(config.seed, "adaptation", 1, 0))
        assert drawn.tolist() != torch.randperm(9, generator=generator).tolist()

    def test_it_depends_on_seed_and_epoch_alone(self) -> None:
        found, logits, config = self.found("rpll")
        first, again = (self_trained(found, logits, 1, config) for _ in range(2))
        later = self_trained(found, logits, 3, config)
        assert torch.equal(first.source, again.source)
        assert not torch.equal(first.source, later.source)


Tiny = tuple[Network, dict[str, Tensor]]


class TestLosses:
    @pytest.fixture
    def batch(self) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        soft = torch.rand(4, 5).double().softmax(dim=1)
        return *(torch.randn(4, 3, 32, 32).double() for _ in range(2)), torch.tensor([0, 1, 2, 3]), soft

    def test_without_stochastic_depth_rpll_is_plain_pseudo_labels(self, tiny: Tiny, batch: tuple[Tensor, ...]) -> None:
        model, (x_s, x_t, y_s, y_t) = tiny[0].train(), batch
        losses, names = self_training_losses(model, "rpll")
        assert names == ("loss_source", "loss_target")
        source, target = losses(x_s, x_t, y_s, y_t)
        torch.testing.assert_close(source, F.cross_entropy(model.encode(x_s).logits, y_s))
        torch.testing.assert_close(target, F.cross_entropy(model.encode(x_t).logits, y_t))

    def test_two_draws_of_stochastic_depth_differ(
        self, tiny: Tiny, batch: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, (x_s, x_t, y_s, y_t) = tiny[0].train(), batch
        model.drops_paths = True
        model.keep.fill_(0.5)
        seen: list[Tensor] = []
        kept: Callable[..., Tensor] = rectified_loss
        monkeypatch.setattr(
            "cdtrans.training.self_training.rectified_loss",
            lambda primary, auxiliary, labels: seen.extend((primary, auxiliary)) or kept(primary, auxiliary, labels),
        )
        self_training_losses(model, "rpll")[0](x_s, x_t, y_s, y_t)
        assert not torch.equal(*seen)

    def test_mrkld_lrent_has_a_term_for_being_sure(self, tiny: Tiny, batch: tuple[Tensor, ...]) -> None:
        model, (x_s, x_t, y_s, y_t) = tiny[0].train(), batch
        losses, names = self_training_losses(model, "mrkld_lrent")
        assert names == ("loss_source", "loss_target", "loss_divergence")
        _, target, divergence = losses(x_s, x_t, y_s, y_t)
        logits = model.encode(x_t).logits
        torch.testing.assert_close(target, F.cross_entropy(logits, y_t))
        torch.testing.assert_close(divergence, MODEL_DIVERGENCE * uniform_divergence(logits))
