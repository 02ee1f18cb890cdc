"""TVT by hand: the transferability of patches, the attention it changes, and the model that is served with it."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from timm.models import VisionTransformer
from torch.nn import functional as F

from cdtrans.config import make_config
from cdtrans.methods.tvt import TVT, information
from cdtrans.network.blocks import Transferability, bits
from cdtrans.network.network import Head, Network
from cdtrans.network.weights import build_model, make_card
from cdtrans.serving.portable import timm_file
from support import raises, tiny_batch, tiny_method
from tiny_task import TINY

make_method = partial(tiny_method, TVT, depth=2, hidden=8)


def test_a_critic_that_cannot_tell_gives_one_bit_and_a_sure_one_none() -> None:
    quarter = -0.75 * math.log2(0.75) - 0.25 * math.log2(0.25)
    logits = torch.tensor([0.0, math.log(3), -math.log(3), 100.0, -100.0])
    assert bits(logits).tolist() == pytest.approx([1, quarter, quarter, 0, 0], abs=1e-6)


@pytest.mark.parametrize("registers", [0, 2])
def test_the_class_token_s_attention_is_multiplied_and_not_normalised_again(registers: int) -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0, reg_tokens=registers
    ).eval()
    network = Network(vit, Head(16, 3, "batchnorm"), transferability=Transferability(vit)).eval()
    with torch.no_grad():
        network.transferability.critic[4].bias += 1.0  # far from one bit
    x = tiny_batch(4).x_t
    tokens, block = vit.blocks[0](vit._pos_embed(vit.patch_embed(x))), vit.blocks[1]
    q, k, v = block.attn.qkv(block.norm1(tokens)).view(4, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)  # [B, heads, N, d] each
    tau = bits(network.transferability.critic(k[:, :, 1 + registers :]))  # [B, heads, patches]
    tau = torch.cat([torch.ones(4, 2, 1 + registers), tau], dim=2)
    attention = (q[:, :, :1] @ k.mT / 8**0.5).softmax(dim=-1) * tau[:, :, None]  # [B, heads, 1, N]
    token = tokens[:, :1] + block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
    by_hand = vit.norm(token + block.mlp(block.norm2(token)))[:, 0]
    torch.testing.assert_close(network.features(x), by_hand)
    assert not torch.allclose(Network(vit, network.head).features(x), by_hand, atol=1e-3)


def test_training_runs_the_network_that_is_served() -> None:
    method, batch = make_method(), tiny_batch(4)
    with torch.no_grad():
        method.network.head.classifier.weight.normal_()  # so that small differences of features show
        method.transferability.critic[4].bias += 1.0
    found = method.losses(batch, torch.tensor(0.5))["loss_source"]
    served, plain = (
        F.cross_entropy(network.train().encode_together(batch.x_s, batch.x_t)[0].logits, batch.y_s)
        for network in (method.served(), method.network)
    )
    torch.testing.assert_close(found, served)
    assert abs(float((found - plain).detach())) > 0.01


def test_the_patch_critic_is_right_where_it_calls_the_source_s_patches_source(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method()
    said = torch.cat([torch.full((4, 4, 2), 10.0), torch.full((4, 4, 2), -10.0)])  # source, then target
    monkeypatch.setattr(method.transferability, "logits", lambda keys: said)
    assert float(method.losses(tiny_batch(4), torch.tensor(0.5))["loss_patches"]) == pytest.approx(0, abs=1e-4)
    monkeypatch.setattr(method.transferability, "logits", lambda keys: -said)
    assert float(method.losses(tiny_batch(4), torch.tensor(0.5))["loss_patches"]) == pytest.approx(0.1, rel=1e-3)


def test_the_patch_critic_learns_and_the_keys_get_its_gradient_reversed() -> None:
    method, batch = make_method(), tiny_batch(4)

    def gradients(progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        loss = method.losses(batch, torch.tensor(progress))["loss_patches"]
        critic, keys = method.transferability.critic[0].weight, method.network.backbone.blocks[1].attn.qkv.weight
        of_critic, of_keys = torch.autograd.grad(loss, (critic, keys))
        return of_critic, of_keys

    at_0, at_1, half = gradients(0.0), gradients(1.0), gradients(math.log(3) / 10)  # lambda: 0, 1, 1/2
    assert at_0[0].abs().max() > 0
    torch.testing.assert_close(at_1[0], at_0[0])
    assert at_0[1].abs().max() == 0
    torch.testing.assert_close(half[1], at_1[1] / 2, rtol=1e-3, atol=1e-7)
    with torch.no_grad():  # a step against this gradient makes the critic's loss rise
        before = method.losses(batch, torch.tensor(1.0))["loss_patches"]
        method.network.backbone.blocks[1].attn.qkv.weight -= 30 * at_1[1]
        assert method.losses(batch, torch.tensor(1.0))["loss_patches"] > before


def test_the_classifier_s_loss_trains_the_patch_critic_too() -> None:
    method = make_method()
    loss = method.losses(tiny_batch(4), torch.tensor(0.5))["loss_source"]
    (gradient,) = torch.autograd.grad(loss, method.transferability.critic[0].weight)
    assert gradient.abs().max() > 0


def test_in_parts_the_losses_and_gradients_are_the_same() -> None:
    method, batch = make_method(), tiny_batch(4)
    found = []
    for parts, recompute in ((1, False), (3, False), (3, True)):
        method.network.compute_in_parts(parts, recompute_blocks=recompute)
        losses = method.losses(batch, torch.tensor(0.5))
        total = torch.stack(list(losses.values())).sum()
        found.append(
            [*losses.values(), *torch.autograd.grad(total, [p for p in method.parameters() if p.requires_grad])]
        )
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_information_is_in_bits() -> None:
    assert float(information(100 * torch.eye(4))) == pytest.approx(2)
    assert float(information(torch.zeros(3, 4))) == pytest.approx(0, abs=1e-6)
    assert float(information(100 * torch.eye(4)[[1, 1]])) == pytest.approx(0, abs=1e-6)
    losses = make_method().losses(tiny_batch(4), torch.tensor(0.5))
    assert -0.1 * math.log2(3) <= float(losses["loss_information"].detach()) <= 0


def test_timm_cannot_hold_the_patch_critic() -> None:
    card = make_card(make_config(TINY, {"precision": "fp32"}), ("a", "b"), stage="adaptation", epoch=1)  # type: ignore[arg-type]
    card = replace(card, transferability=True)
    with raises("no-timm-model"):
        timm_file(build_model(card).eval(), card)
