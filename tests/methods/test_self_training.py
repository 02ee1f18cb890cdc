"""RPLL and MRKLD+LRENT, by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Method, Round
from cdtrans.methods.mrkld_lrent import MRKLDLRENT, balanced_labels, uniform_divergence
from cdtrans.methods.rpll import RPLL, rectified_loss
from cdtrans.network.encoding import Encoded
from cdtrans.network.network import Network
from cdtrans.pairing.pairs import Domains, Proposals
from support import tiny_batch, tiny_method

PROGRESS, ALPHA = torch.zeros(()), 0.25
P = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.5, 0.45, 0.05], [0.55, 0.4, 0.05], [0.3, 0.6, 0.1]]).double()


def test_the_rectified_loss_by_hand() -> None:
    primary, auxiliary = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    variance = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)  # KL(auxiliary || primary)
    expected = math.exp(-variance) * -math.log(0.2) + variance
    assert float(rectified_loss(primary, auxiliary, torch.tensor([1]))) == pytest.approx(expected)


def test_the_divergence_from_uniform_is_that_of_torch() -> None:
    logits = torch.randn(5, 3).double()
    uniform = torch.full((5, 3), 1 / 3).double()
    expected = F.kl_div(logits.log_softmax(dim=1), uniform, reduction="batchmean")
    torch.testing.assert_close(uniform_divergence(logits), expected)
    assert float(uniform_divergence(torch.zeros(2, 3))) == pytest.approx(0, abs=1e-6)


class TestBalancedLabels:
    def test_the_most_confident_of_each_class_are_selected(self) -> None:
        # predicted as 0: confidences .9 .6 .55 .5, half of them is two: lambda_0 = .6; as 1: .6 alone; as 2: nobody
        _, selected = balanced_labels(P, 0.5, ALPHA)
        assert selected.tolist() == [True, True, False, False, True]

    def test_labels_are_the_balanced_predictions_sharpened(self) -> None:
        thresholds = torch.tensor([0.6, 0.6, 1.0]).double()
        expected = (P / thresholds) ** 4
        torch.testing.assert_close(balanced_labels(P, 0.5, ALPHA)[0], expected / expected.sum(dim=1, keepdim=True))

    def test_a_rare_class_gets_images_that_lean_to_it(self) -> None:
        p = torch.tensor([[0.9, 0.1], [0.55, 0.45], [0.6, 0.4], [0.49, 0.51]]).double()
        labels, selected = balanced_labels(p, 0.01, ALPHA)  # lambda = .9 and .51
        assert selected.tolist() == [True, False, False, True]
        assert labels.argmax(dim=1).tolist() == [0, 1, 1, 1], "0.45 of 0.51 is more than 0.55 of 0.9"

    def test_an_image_near_two_thresholds_is_selected(self) -> None:
        """Z = 2 * 0.9^4 = 1.31; near one threshold alone it is 0.9^4, and the image is left."""
        p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [0.45, 0.45, 0.1], [0.45, 0.1, 0.45]]).double()
        p[0, 0] = p[1, 1] = 0.51  # so that classes 0 and 1 have a threshold, and 2 has 1
        labels, selected = balanced_labels(p, 0.01, ALPHA)
        ratio = torch.tensor([0.45 / 0.51, 0.45 / 0.51, 0.1]).double() ** 4
        assert selected.tolist() == [True, True, bool(ratio.sum() > 1), False]
        assert selected[2]
        torch.testing.assert_close(labels[2], ratio / ratio.sum())


class TestPlans:
    LABELS = torch.arange(9) % 3

    @pytest.fixture
    def domains(self) -> Domains:
        torch.manual_seed(0)
        source = Encoded(torch.randn(9, 4), torch.randn(9, 3))
        return Domains(source, self.LABELS, Encoded(torch.randn(6, 4), 3 * torch.randn(6, 3)))

    @staticmethod
    def planned(kind: type[Method], domains: Domains, number: int = 1) -> Proposals:
        plan: Proposals = tiny_method(kind).plan(domains, Round(number, 4, 1), torch.Generator().manual_seed(0))
        return plan

    def test_rpll_has_every_target_image_with_its_prediction(self, domains: Domains) -> None:
        pairs = self.planned(RPLL, domains).pairs()
        predicted = domains.target.logits.argmax(dim=1)
        assert sorted(pairs.source.tolist()) == list(range(9)), "the larger side once"
        assert set(pairs.target.tolist()) == set(range(6))
        assert torch.equal(pairs.target_labels.argmax(dim=1), predicted[pairs.target])
        assert (pairs.target_labels.amax(dim=1) == 1).all()
        assert torch.equal(pairs.source_labels, self.LABELS[pairs.source])
        assert pairs.coupled

    def test_mrkld_lrent_has_those_that_are_selected_and_more_in_later_rounds(self, domains: Domains) -> None:
        for number, share in ((1, 0.2), (2, 0.3), (3, 0.4), (4, 0.5)):
            labels, selected = balanced_labels(domains.target.logits.softmax(dim=1), share, ALPHA)
            result = self.planned(MRKLDLRENT, domains, number)
            assert set(result.target.tolist()) == set(selected.nonzero().squeeze(1).tolist())
            assert torch.equal(result.pairs().target_labels, labels[result.target])
            assert result.coupled


class TestLosses:
    BATCH = tiny_batch()._replace(y_t=torch.rand(6, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=1))

    def assert_plain(self, losses: dict[str, Tensor], network: Network) -> Tensor:
        """Both are cross-entropies. Returns the target's logits."""
        source, target = (network.encode(x).logits for x in (self.BATCH.x_s, self.BATCH.x_t))
        torch.testing.assert_close(losses["loss_source"], F.cross_entropy(source, self.BATCH.y_s))
        torch.testing.assert_close(losses["loss_target"], F.cross_entropy(target, self.BATCH.y_t))
        return target

    def test_without_stochastic_depth_rpll_is_plain_pseudo_labels(self) -> None:
        method = tiny_method(RPLL)
        losses = method.losses(self.BATCH, PROGRESS)
        assert list(losses) == ["loss_source", "loss_target"]
        self.assert_plain(losses, method.network)

    def test_two_draws_of_stochastic_depth_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method, predictions = tiny_method(RPLL), []
        method.network.drops_paths = True
        method.network.keep.fill_(0.5)
        monkeypatch.setattr(
            "cdtrans.methods.rpll.rectified_loss",
            lambda primary, auxiliary, y: predictions.extend((primary, auxiliary)) or primary.sum(),
        )
        method.losses(self.BATCH, PROGRESS)
        assert not torch.equal(*predictions)

    def test_mrkld_lrent_has_a_term_for_being_sure(self) -> None:
        assert MRKLDLRENT.Options().divergence == 0.1
        for weight in (0.1, 0.7):
            method = tiny_method(MRKLDLRENT, divergence=weight)
            losses = method.losses(self.BATCH, PROGRESS)
            assert list(losses) == ["loss_source", "loss_target", "loss_divergence"]
            target = self.assert_plain(losses, method.network)
            torch.testing.assert_close(losses["loss_divergence"], weight * uniform_divergence(target))
