"""CDAN+TN, MSTN+DSBN and DCAN by hand, on a small ResNet with gates: what each domain has of its own, and that an
ordinary network is served."""

import copy
import functools
import math
from typing import Any

import pytest
import timm
import torch
from timm.layers.squeeze_excite import SqueezeExcite
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.methods import method_class
from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.cdan_tn import TransNorm
from cdtrans.methods.dcan import KERNELS, bandwidths, neighbour_mmd, set_mmd
from cdtrans.network.network import Head, Network, Output, PerDomain, build_head, with_layers
from support import tiny_batch

NAMES = ("cdan_tn", "mstn_dsbn", "dcan")
BatchNorm = nn.modules.batchnorm._BatchNorm
PROGRESS = torch.tensor(0.5)


def make_network() -> Network:
    return copy.deepcopy(first_network())


@functools.cache
def first_network() -> Network:
    torch.manual_seed(0)
    backbone = timm.create_model("test_resnet", num_classes=0, block_args={"attn_layer": "se"}, zero_init_last=False)
    network = Network(backbone, Head(backbone.num_features, 3, "batchnorm"))
    network.train().encode(tiny_batch().x_s)  # statistics unlike those of a new network
    return network


def made(name: str, network: Network | None = None, **options: Any) -> Any:
    kind = method_class(name)
    sizes = {"hidden": 8} if name != "dcan" else {"correction": 8}
    return kind(network or make_network(), kind.Options(**sizes, **options), Sizes(3, 10, 10)).train()


def batch() -> Batch:
    """Target images are brighter."""
    found = tiny_batch()
    return found._replace(x_t=2 * found.x_t + 1)


def step(method: Any) -> dict[str, Tensor]:
    losses: dict[str, Tensor] = method.losses(batch(), PROGRESS)
    torch.stack(list(losses.values())).sum().backward()
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        method.after_step(batch(), PROGRESS)
    return losses


def norms(network: Network) -> list[Any]:
    return [x for x in network.backbone.modules() if isinstance(x, BatchNorm)]


@pytest.mark.parametrize("name", NAMES)
class TestAll:
    def test_it_starts_as_the_source_only_network(self, name: str) -> None:
        expected = make_network().eval().encode(batch().x_t)
        method = made(name).eval()
        torch.testing.assert_close(method.network.encode(batch().x_t).logits, expected.logits)

    def test_an_ordinary_network_is_served(self, name: str) -> None:
        method = made(name)
        step(method)
        served = method.served().eval()
        plain = make_network()
        head = build_head(served.head.spec, plain.dim, 3, "batchnorm")
        loaded = Network(plain.backbone, head).eval()
        loaded.load_state_dict(served.state_dict())
        torch.testing.assert_close(loaded.encode(batch().x_t), served.encode(batch().x_t))
        assert not torch.equal(served.encode(batch().x_t).logits, make_network().eval().encode(batch().x_t).logits)


def test_a_network_with_other_layers_shares_the_rest() -> None:
    network = make_network()
    other = with_layers(network, BatchNorm, lambda x: nn.Identity())
    assert not norms(other)
    assert len(norms(network)) > 5
    ours, theirs = dict(network.named_parameters()), dict(other.named_parameters())
    assert theirs.keys() < ours.keys()
    assert all(theirs[name] is ours[name] for name in theirs)


class TestDomainSpecificBatchNorm:
    def test_training_is_a_pass_of_each_domain_through_its_own_network(self) -> None:
        method = made("mstn_dsbn")
        source, target = method.network.features_each(batch().x_s, batch().x_t)
        alone = make_network()
        torch.testing.assert_close(source, alone.features(batch().x_s))
        torch.testing.assert_close(target, make_network().features(batch().x_t))

    def test_the_source_does_not_reach_the_target_s_norms(self) -> None:
        method = made("mstn_dsbn")
        method.losses(batch(), PROGRESS)["loss_source"].backward()
        assert all(norm.weight.grad is None or not norm.weight.grad.any() for norm in norms(method.plain))
        assert method.plain.head.neck.weight.grad is None
        assert method.source_neck.weight.grad.any()
        own = [x.source for x in method.network.modules() if isinstance(x, PerDomain)]
        assert len(own) == len(norms(method.plain))
        assert all(norm.weight.grad.any() for norm in own)


class TestTransNorm:
    def layer(self) -> TransNorm:
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        return TransNorm(norm).train()

    def test_alpha_by_hand(self) -> None:
        layer = self.layer()
        one, eps = torch.ones(4), layer.served.eps
        mean = torch.tensor([0.0, 1.0, 3.0, 0.0])
        likeness = 1 / (1 + mean / (1 + eps) ** 0.5)  # 1, 1/2, 1/4, 1
        found = layer.alpha(mean, one, torch.zeros(4), one)
        torch.testing.assert_close(found, 4 * likeness / likeness.sum())
        assert float(found.mean()) == pytest.approx(1)

    def test_each_domain_by_its_own_statistics_and_alpha_without_gradient(self) -> None:
        layer = self.layer()
        halves = [torch.randn(3, 4, 2, 2), 2 + torch.randn(3, 4, 2, 2)]
        x = torch.cat(halves).requires_grad_()
        y = layer(x)
        moments = [(h.mean(dim=(0, 2, 3)), h.var(dim=(0, 2, 3))) for h in halves]
        scale = 1 + layer.alpha(*moments[0], *moments[1])
        again = torch.cat(halves).requires_grad_()
        normed = [F.batch_norm(h, None, None, layer.weight, layer.bias, training=True) for h in again.chunk(2)]
        expected = scale[:, None, None] * torch.cat(normed)
        torch.testing.assert_close(y, expected)
        weights = torch.randn_like(y)
        torch.testing.assert_close(
            torch.autograd.grad((y * weights).sum(), x), torch.autograd.grad((expected * weights).sum(), again)
        )
        torch.testing.assert_close(layer.source_mean, 0.1 * moments[0][0])
        torch.testing.assert_close(layer.served.running_mean, 0.1 * moments[1][0])

    def test_what_is_served_is_the_layer_with_running_statistics(self) -> None:
        layer = self.layer()
        for shift in (0.0, 1.0, 2.0):
            layer(torch.cat([torch.randn(6, 4, 2, 2), shift + 2 * torch.randn(6, 4, 2, 2)]))
        layer.serve()
        mean, variance = layer.served.running_mean, layer.served.running_var
        assert mean is not None
        assert variance is not None
        x = torch.randn(3, 4, 2, 2)
        normed = F.batch_norm(x, mean, variance, layer.weight, layer.bias)
        alpha = layer.alpha(layer.source_mean, layer.source_var, mean, variance)
        assert alpha.std() > 0.01
        torch.testing.assert_close(layer.eval()(x), (1 + alpha[:, None, None]) * normed)

    def test_scale_and_shift_are_trained_and_not_those_that_are_served(self) -> None:
        method = made("cdan_tn")
        trained = {name for name, p in method.named_parameters() if p.requires_grad}
        layers = [name for name, x in method.network.named_modules() if isinstance(x, TransNorm)]
        assert layers
        for name in layers:
            assert {f"network.{name}.weight", f"network.{name}.bias"} <= trained
            assert f"network.{name}.served.weight" not in trained


class TestDCAN:
    def test_discrepancy_of_neighbours_by_hand(self) -> None:
        x, y = torch.tensor([[0.0], [1.0], [2.5]]), torch.tensor([[0.0], [3.0], [1.0]])

        def k(i: int, j: int, a: Tensor = x, b: Tensor = x) -> float:
            return math.exp(-(float(a[i % 3, 0] - b[j % 3, 0]) ** 2) / 2)

        terms = [k(i, i + 1) + k(i, i + 1, y, y) - k(i, i + 1, x, y) - k(i + 1, i, x, y) for i in range(3)]
        assert float(neighbour_mmd(x, y, [2.0])) == pytest.approx(sum(terms) / 3)
        far = neighbour_mmd(torch.zeros(2, 1), torch.full((2, 1), 9.0), [2.0])
        assert float(far) == pytest.approx(2.0)  # 1 + 1 - 0 - 0
        assert float(neighbour_mmd(x, x, [2.0])) == 0
        torch.testing.assert_close(neighbour_mmd(x, y, [1.0, 2.0]), sum(neighbour_mmd(x, y, [h]) for h in (1.0, 2.0)))

    def test_widths_are_multiples_of_the_mean_squared_distance(self) -> None:
        torch.manual_seed(0)
        x, y = torch.randn(5, 3), torch.randn(5, 3) + 1
        every = torch.cdist(torch.cat([x, y]), torch.cat([x, y])).square()
        mean = every.sum() / (10 * 9)
        torch.testing.assert_close(torch.stack(bandwidths(x, y)), mean * torch.tensor(KERNELS))

    def test_discrepancy_of_parts_is_that_of_all_pairs(self) -> None:
        torch.manual_seed(0)
        x, y = torch.randn(5, 3), torch.randn(5, 3)
        members = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
        subsets = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()

        def mean(a: Tensor, b: Tensor) -> Tensor:
            return torch.exp(-torch.cdist(a, b).square() / 1.5).mean()

        a, b = x[:2], y[[1, 3, 4]]
        expected = (mean(a, a) + mean(b, b) - 2 * mean(a, b)) / 3  # the two others have an empty part
        torch.testing.assert_close(set_mmd(x, y, members, subsets, [1.5]), expected)
        assert float(set_mmd(x, x, members[:1], members[:1].bool(), [1.5])) == pytest.approx(0, abs=1e-6)

    def test_the_first_layer_of_a_gate_is_separate_and_the_second_shared(self) -> None:
        method = made("dcan")
        gates = [x for x in method.network.modules() if isinstance(x, PerDomain)]
        assert [x.target for x in gates] == [x for x in method.plain.modules() if isinstance(x, SqueezeExcite)]
        for gate in gates:
            assert gate.source.fc1.weight is not gate.target.fc1.weight
            assert torch.equal(gate.source.fc1.weight, gate.target.fc1.weight)
            assert gate.source.fc2.weight is gate.target.fc2.weight

    def test_norms_of_the_backbone_are_frozen_in_every_respect(self) -> None:
        method = made("dcan")
        before = [(x.running_mean.clone(), x.weight.clone()) for x in norms(method.served())]
        step(method)
        for (mean, weight), norm in zip(before, norms(method.served()), strict=True):
            assert torch.equal(norm.running_mean, mean)
            assert torch.equal(norm.weight, weight)

    def test_feature_and_logits_are_corrected(self) -> None:
        method = made("dcan").eval()
        f, z = method.network.head.classify(torch.randn(4, method.network.dim))
        corrected = f + method.head.of_feature(f)
        z = method.network.head.classifier(corrected)
        torch.testing.assert_close(method.head.correct(Output(f, z)), Output(corrected, z + method.head.of_logits(z)))

    def test_the_losses_are_the_paper_s(self) -> None:
        method = made("dcan", sampled=0.0)
        losses = method.losses(batch(), PROGRESS)
        source, target = method.network.encode_together(batch().x_s, batch().x_t)
        corrected = method.head.correct(target)
        p_s, p_t = source.logits.softmax(dim=1), corrected.logits.softmax(dim=1)
        widths = bandwidths(source.feature, corrected.feature)
        apart = neighbour_mmd(source.feature, corrected.feature, widths) + neighbour_mmd(p_s, p_t, [1.68])
        torch.testing.assert_close(losses["loss_discrepancy"], 1.5 * apart)
        torch.testing.assert_close(losses["loss_entropy"], -0.1 * (p_t * p_t.log()).sum(dim=1).mean())
        torch.testing.assert_close(losses["loss_source"], F.cross_entropy(source.logits, batch().y_s))
        assert losses["loss_correction"].item() == 0, "without a random subset"
        assert made("dcan", sampled=2.9).losses(batch(), PROGRESS)["loss_correction"].item() > 0
