"""What must hold for every family of backbone."""

from functools import cache

import pytest
import torch

from architectures import CROSS, OTHERS, Small, images, small_network
from cdtrans.errors import CdtransError
from cdtrans.methods.cdtrans import branch_features, require_cross_attention, three_branches
from cdtrans.network.network import Network
from slow_attention import slow_features

pytestmark = pytest.mark.slow  # many networks, or processes: seconds in all

EVERY = {**CROSS, **OTHERS}
network_of = cache(lambda family: small_network(EVERY[family]))  # no test changes one
TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
ROUNDED = {"atol": 1e-5, "rtol": 1e-5}  # rotary positions that timm computes in float32


@pytest.fixture(params=CROSS)
def cross(request: pytest.FixtureRequest) -> tuple[Network, Small]:
    return network_of(request.param), CROSS[request.param]


def test_there_are_many() -> None:
    assert len(EVERY) >= 70


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
        require_cross_attention(network.backbone, small.name)
        return
    with pytest.raises(CdtransError) as error:
        require_cross_attention(network.backbone, small.name)
    assert f"'{small.name}'" in str(error.value)
    assert "--method" in str(error.value)


@torch.no_grad()
def test_equal_images_give_three_equal_branches(cross: tuple[Network, Small]) -> None:
    network, small = cross
    x = images(small.size, 0)
    out = three_branches(network, x, x)
    torch.testing.assert_close(out.source.logits, out.target.logits, **TOLERANCE)
    torch.testing.assert_close(out.source_target.logits, out.target.logits, **TOLERANCE)


@torch.no_grad()
def test_source_and_target_branch_are_plain_forwards(cross: tuple[Network, Small]) -> None:
    network, small = cross
    source, target = images(small.size, 0), images(small.size, 1)
    feature_s, feature_t, feature_c = branch_features(network, source, target)
    torch.testing.assert_close(feature_s, network.backbone(source), **TOLERANCE)
    torch.testing.assert_close(feature_t, network.backbone(target), **TOLERANCE)
    assert (feature_c - feature_s).abs().max() > 1e-6
    assert (feature_c - feature_t).abs().max() > 1e-6


@torch.no_grad()
def test_pairs_are_independent(cross: tuple[Network, Small]) -> None:
    network, small = cross
    source, target, other = images(small.size, 0), images(small.size, 1), images(small.size, 2)
    before = branch_features(network, source, target)
    source[1], target[1] = other[0], other[1]
    after = branch_features(network, source, target)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a[0], b[0], **TOLERANCE)
        assert (a[1] - b[1]).abs().max() > 1e-6


@pytest.mark.parametrize("first_block_residual", [True, False])
@torch.no_grad()
def test_one_batch_equals_attention_written_out(cross: tuple[Network, Small], first_block_residual: bool) -> None:
    network, small = cross
    source, target = images(small.size, 0), images(small.size, 1)
    fast = branch_features(network, source, target, first_block_residual=first_block_residual)
    tolerance = ROUNDED if getattr(network.backbone, "rope_mixed", False) else TOLERANCE
    slow = slow_features(network.backbone, source[:1], target[:1], first_block_residual)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a[:1], b, **tolerance)
