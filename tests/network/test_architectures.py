"""Promises for every family of backbone."""

from functools import cache

import pytest
import torch

from architectures import CROSS, OTHERS, Small, images, small_network
from cdtrans.methods.cdtrans import CDTrans, branch_features
from cdtrans.network.blocks import embed
from cdtrans.network.network import Network
from slow_attention import slow_features
from support import raises

pytestmark = pytest.mark.slow  # many networks, or processes: seconds in all

EVERY = {**CROSS, **OTHERS}
network_of = cache(lambda family: small_network(EVERY[family]))  # no test changes one
TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
ROUNDED = {"atol": 1e-5, "rtol": 1e-5}  # rotary positions that timm computes in float32


@pytest.fixture(params=CROSS)
def cross(request: pytest.FixtureRequest) -> tuple[Network, Small]:
    return network_of(request.param), CROSS[request.param]


@pytest.mark.parametrize("family", EVERY)
@torch.no_grad()
def test_encode_is_timms_forward_and_the_head(family: str) -> None:
    network, small = network_of(family), EVERY[family]
    x = images(small.size, 0)
    feature = network.backbone(x)
    assert feature.shape == (2, network.dim)
    assert feature[0].sub(feature[1]).abs().max() > 1e-6, "features that tell images apart"
    torch.testing.assert_close(network.features(x), feature, **TOLERANCE)
    for ours, theirs in zip(network.encode(x), network.head(feature), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    outputs = network.encode_each(x, images(small.size, 1, count=1))
    torch.testing.assert_close(outputs[0].feature, network.head(feature).feature, **TOLERANCE)
    assert outputs[1].feature.shape == (1, network.dim)
    names = {name.split(".")[0] for name in network.state_dict()}
    assert names == {"backbone", "head"}


@pytest.mark.parametrize("family", EVERY)
def test_which_of_them_have_cross_attention(family: str) -> None:
    network, small = network_of(family), EVERY[family]
    assert network.runs_blocks == (family in CROSS)
    if family in CROSS:
        CDTrans.check(network, small.name)
        return
    with raises("backbone-misfit"):
        CDTrans.check(network, small.name)


@pytest.mark.parametrize("first_block_residual", [True, False])
def test_one_batch_and_its_gradients_are_those_of_attention_written_out(
    cross: tuple[Network, Small], first_block_residual: bool
) -> None:
    network, small = cross
    source, target = images(small.size, 0, count=1), images(small.size, 1, count=1)
    tolerance = ROUNDED if getattr(network.backbone, "rope_mixed", False) else TOLERANCE
    fast = torch.cat(branch_features(network, source, target, first_block_residual=first_block_residual))
    slow = torch.cat(slow_features(network.backbone, source, target, first_block_residual))
    torch.testing.assert_close(fast, slow, **tolerance)
    parameters, weight = list(network.backbone.parameters()), torch.randn_like(slow)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), parameters, allow_unused=True) for x in (fast, slow))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


def test_only_what_the_pooling_reads_is_computed_in_the_last_block(cross: tuple[Network, Small]) -> None:
    (network, small), rows = cross, []
    backbone, x = network.backbone, images(small.size, 0)
    hook = backbone.blocks[-1].mlp.register_forward_hook(lambda mlp, inputs, output: rows.append(output.shape[1]))
    branch_features(network, x, x)
    hook.remove()
    read = 1 if backbone.global_pool == "token" and backbone.num_prefix_tokens else embed(backbone, x).x.shape[1]
    assert rows == [read]
