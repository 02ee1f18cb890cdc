"""A network that computes a batch in parts gives what it gives at once: features, losses, gradients."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from architectures import CROSS, OTHERS, Small, images, small_network
from cdtrans.methods.cdtrans import branch_features
from cdtrans.network.network import Network
from support import small_gpu

pytestmark = pytest.mark.slow  # many networks, or processes: seconds in all

BATCH = 5  # does not divide by 2 or 3
VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 4, "num_heads": 2}
TINY = Small("vit_tiny_patch16_224", VIT | {"drop_path_rate": 0.5})
DROPPING = Small("vit_tiny_patch16_224", VIT | {"patch_drop_rate": 0.5, "pos_drop_rate": 0.2})
in_parts = pytest.mark.parametrize(("parts", "recompute"), [(2, False), (3, False), (BATCH, False), (BATCH, True)])
Forward = Callable[[Network, Tensor, Tensor], tuple[Tensor, ...]]


def one_by_one(network: Network, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return network.features_each(source, target)


CASES: dict[str, tuple[Small, Forward]] = {
    "stochastic depth": (TINY, one_by_one),
    "dropout of patches and positions": (DROPPING, one_by_one),
    "rotary positions": (CROSS["Eva: dinov3"], one_by_one),
    "rotary positions of each block": (CROSS["Eva: rotary positions of each block"], one_by_one),
    "attention pooling": (CROSS["ViT: siglip, attention pooling"], one_by_one),
    "three branches": (TINY, branch_features),
    "three branches, first_block_residual=False": (TINY, partial(branch_features, first_block_residual=False)),
    **{
        f"run by timm: {name}": (OTHERS[name], one_by_one)
        for name in ("convnext", "swin", "efficientnet, group norm", "ViT, parallel blocks")
    },
}


def computed(network: Network, forward: Forward, size: int, parts: int = 1, *, recompute: bool = False) -> list[Tensor]:
    """Features, the loss and all gradients of a training step, always from the same seed, and what is drawn next."""
    network = copy.deepcopy(network).train()
    network.compute_in_parts(parts, recompute_blocks=recompute)
    torch.manual_seed(1)
    features = forward(network, images(size, 0, BATCH), images(size, 1, BATCH))
    logits = torch.cat([network.head(feature).logits for feature in features])
    loss = F.cross_entropy(logits, torch.arange(len(logits)) % 5)
    loss.backward()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return [*features, loss, *gradients, *network.buffers(), torch.rand(3)]


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        error = 1e-10 if a.dtype == torch.float64 else 1e-5  # timm has learned rotary positions in float32
        torch.testing.assert_close(a, b, rtol=error, atol=error)


@in_parts
@pytest.mark.parametrize("name", CASES)
def test_the_same_features_losses_and_gradients(name: str, parts: int, recompute: bool) -> None:
    small, forward = CASES[name]
    network = small_network(small)
    whole = computed(network, forward, small.size)
    close(computed(network, forward, small.size, parts, recompute=recompute), whole)


def test_timms_own_recomputation_is_switched_on_and_off_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    convnext, other = small_network(OTHERS["convnext"]), small_network(OTHERS["edgenext"])
    monkeypatch.delattr(type(other.backbone), "set_grad_checkpointing")
    for network in (convnext, other):
        network.compute_in_parts(2, recompute_blocks=True)
    assert all(stage.grad_checkpointing for stage in convnext.backbone.stages)
    convnext.compute_in_parts(1)
    assert not any(stage.grad_checkpointing for stage in convnext.backbone.stages)


@pytest.mark.parametrize(("forward", "rows"), [(one_by_one, 4), (branch_features, 6)])
def test_no_more_images_at_once_forward_and_backward(
    forward: Forward, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five pairs in three parts: no part has more than two; each image is computed twice, or its blocks thrice."""
    calls, network = small_gpu(monkeypatch, 1000), small_network(TINY)
    all_rows = 4 * BATCH * (2 if forward is one_by_one else 3)  # four blocks
    for parts, recompute, times in ((1, False, 1), (3, False, 2), (3, True, 3)):
        calls.clear()
        computed(network, forward, TINY.size, parts, recompute=recompute)
        assert sum(calls) == pytest.approx(times * all_rows, abs=len(calls)), "the last block need not be finished"
        assert max(calls) == rows if parts > 1 else 2.5 * rows


def test_nothing_of_a_part_is_kept_until_the_backward_pass() -> None:
    network, x = small_network(TINY).train(), images(32, 0, BATCH)

    def kept(parts: int) -> int:
        network.compute_in_parts(parts)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            network.features(x)
        return sum(sizes)

    assert kept(2) == kept(BATCH) < kept(1) / 4


@torch.no_grad()
def test_a_teacher_in_a_training_step_is_computed_in_parts_and_encoding_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, network, x = small_gpu(monkeypatch, 1000), small_network(TINY), images(32, 0, 6)
    whole = network.features(x)
    network.compute_in_parts(3)
    calls.clear()
    torch.testing.assert_close(network.features(x), whole)
    assert set(calls) == {2}
    calls.clear()
    with torch.inference_mode():
        network.features(x)
    assert set(calls) == {6}


@pytest.mark.parametrize("forward", [one_by_one, branch_features])
def test_under_autocast_the_backward_pass_computes_in_the_same_precision(forward: Forward) -> None:
    network = small_network(TINY).float()

    def gradients(parts: int) -> list[Tensor]:
        model = copy.deepcopy(network).train()
        model.compute_in_parts(parts)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = forward(model, images(32, 0, BATCH).float(), images(32, 1, BATCH).float())
        assert model.backbone.blocks[0].mlp.fc1.weight.dtype == torch.float32
        torch.cat(features).float().square().sum().backward()
        return [p.grad for p in model.backbone.parameters()]

    for a, b in zip(gradients(3), gradients(1), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
