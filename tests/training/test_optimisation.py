"""Schedule, parameter groups and one whole step against the authors' vectors; a method's own modules and updates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

from cdtrans.config import CDTransOptions, make_config
from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.cdtrans import CDTrans
from cdtrans.training.optimisation import FLOOR, Optimisation, cosine_rate, learning_rate, parameter_groups
from support import from_authors_names

CPU = torch.device("cpu")


class Critical(nn.Module):
    """A network and a critic beside it, as a method has them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        self.critic = nn.Linear(2, 2)


def make_optimisation(module: nn.Module, **values: Any) -> Optimisation:
    """Without what would hide the gradients: no momentum, no weight decay, one rate."""
    how = {"precision": "fp32", "momentum": 0.0, "weight_decay": 0.0, "bias_lr_factor": 1.0, "warmup_epochs": 0}
    network = getattr(module, "network", None)
    return Optimisation(module, make_config(how | values), lr=0.1, epochs=40, device=CPU, network=network)


def moved(module: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each submodule has gone."""
    names = ("network.backbone", "network.head", "critic")
    after = module.state_dict()
    return {
        name: sum(float((after[k] - x).square().sum()) for k, x in before.items() if k.startswith(name)) ** 0.5
        for name in names
    }


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in module.state_dict().items()}


@pytest.mark.parametrize("epochs", range(1, 10))
def test_a_run_shorter_than_its_warm_up_reaches_the_rate_and_falls_again(epochs: int) -> None:
    rates = [learning_rate(e, epochs, 1.0) for e in range(1, epochs + 1)]
    assert max(rates) >= 0.66
    assert rates == sorted(rates[: (epochs + 1) // 2]) + sorted(rates[(epochs + 1) // 2 :], reverse=True)
    assert epochs < 3 or rates[-1] < max(rates)


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 1.0, 3.0])
def test_one_cosine_over_all_steps_rises_and_falls_whatever_the_warm_up(warmup: float) -> None:
    rates = [cosine_rate(n / 100, warmup) for n in range(101)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(1.0)
    assert top == 100 * min(warmup, 0.5)
    assert rates == sorted(rates[:top]) + sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(FLOOR)


def test_vectors_and_tokens_have_no_weight_decay_where_matrices_alone_decay() -> None:
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0)
    groups = parameter_groups(vit, 1.0, decay_vectors=False)
    free = {id(p) for group in groups if group.get("weight_decay") == 0.0 for p in group["params"]}
    named = dict(vit.named_parameters())
    assert {name for name, p in named.items() if id(p) in free} == {
        name for name, p in named.items() if p.ndim == 1 or name in ("cls_token", "pos_embed")
    }
    assert not [group for group in parameter_groups(vit, 1.0) if "weight_decay" in group], "the authors' decays all"


@pytest.mark.parametrize(
    ("name", "base"), [("pretrain_default", 8e-3), ("pretrain_visda", 5e-4), ("uda_default", 8e-3), ("uda_visda", 5e-5)]
)
def test_schedule_equals_the_authors(golden: Callable, name: str, base: float) -> None:
    table = golden("cdtrans_tiny")[f"lr/{name}"]
    epochs = len(table)
    for factor, column in ((1.0, 0), (2.0, 1)):
        ours = [learning_rate(e, epochs, base, factor) for e in range(1, epochs + 1)]
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), table[:, column], atol=1e-15, rtol=1e-12)


def test_the_authors_ten_epochs_of_warm_up_are_theirs_and_may_be_left_out() -> None:
    """Stage 1 has ten epochs and a warm-up of ten: it rises to the ninth and ends at the floor."""
    rates = [learning_rate(e, 10, 1.0) for e in range(1, 11)]
    assert rates == pytest.approx([0.01 + 0.099 * e for e in range(1, 10)] + [FLOOR])
    rates = [learning_rate(e, 10, 1.0, warmup=0) for e in range(1, 11)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.97


def test_one_step_equals_the_authors(tiny: tuple) -> None:
    model, g = tiny
    optimisation = Optimisation(model, make_config({"precision": "fp32"}), lr=0.008, epochs=40, device=CPU)
    optimisation.start_epoch(1)
    rates = [group["lr"] for group in optimisation.optimizer.param_groups]
    assert rates == pytest.approx([float(g["step/lr_weight"]), float(g["step/lr_bias"])], rel=1e-12)
    count = len(g["x_t"])
    batch = Batch(g["x_s"], g["y_s"], g["x_t"], g["y_t"], torch.arange(count), torch.ones(count))
    method = CDTrans(model, CDTransOptions(), Sizes(5, 10, 10)).train()
    method.train_step(batch, torch.zeros(()), optimisation.update)
    after = from_authors_names({k[14:]: v for k, v in g.items() if k.startswith("sd_after_step/")})
    state = model.state_dict()
    assert state.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(state[name], value, atol=1e-9, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_every_trainable_parameter_is_in_one_group(tiny: tuple) -> None:
    model, _ = tiny
    grouped = [id(p) for group in parameter_groups(model, 2.0) for p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trainable)
    assert id(model.head.neck.bias) not in grouped


@pytest.mark.parametrize("updates", [1, 3])
def test_a_loss_that_is_not_finite_is_remembered_with_its_step(updates: int) -> None:
    """Several updates are one step."""
    model = torch.nn.Linear(2, 1)
    optimisation = make_optimisation(model)
    for value, expected in ((1.0, None), (torch.nan, 2), (torch.nan, 2)):
        optimisation.start_step()
        for _ in range(updates):
            optimisation.update(model(torch.full((1, 2), value)).sum())
        assert optimisation.first_bad_step() == expected


def test_rates_are_those_of_the_innermost_submodule_named() -> None:
    module = Critical()
    rates = {"critic": 10.0, "network": 0.5, "network.head": 2.0, "net": 99.0}
    groups = parameter_groups(module, 2.0, rates)
    of = {id(p): (group["rate"], group["factor"]) for group in groups for p in group["params"]}
    assert {name: of[id(p)] for name, p in module.named_parameters()} == {
        "network.backbone.weight": (0.5, 1.0),
        "network.backbone.bias": (0.5, 2.0),
        "network.head.weight": (2.0, 1.0),
        "network.head.bias": (2.0, 2.0),
        "critic.weight": (10.0, 1.0),
        "critic.bias": (10.0, 2.0),
    }


@pytest.mark.parametrize("epoch", [1, 5, 10, 25, 40])
def test_a_rate_is_relative_to_the_learning_rate_in_every_epoch_and_0_is_none(epoch: int) -> None:
    module = Critical()
    config = make_config({"precision": "fp32", "bias_lr_factor": 1.0})
    rates = {"critic": 10.0, "network.head": 0.0}
    optimisation = Optimisation(module, config, lr=0.1, epochs=40, device=CPU, rates=rates, network=module.network)
    shown = optimisation.start_epoch(epoch)
    lrs = {id(p): group["lr"] for group in optimisation.optimizer.param_groups for p in group["params"]}
    assert lrs[id(module.network["backbone"].weight)] == shown == learning_rate(epoch, 40, 0.1)
    assert lrs[id(module.critic.weight)] == pytest.approx(10 * shown)
    assert lrs[id(module.network["head"].weight)] == 0


@pytest.mark.parametrize("adapting", [True, False])
def test_a_stage_2_as_long_as_its_warm_up_rises_to_the_middle(adapting: bool) -> None:
    """Stage 1 of the authors is as long as its warm-up and rises to the end."""
    module = Critical()
    config = make_config({"precision": "fp32", "warmup_epochs": 10})
    network: Any = module.network if adapting else None
    made = Optimisation(module, config, lr=1.0, epochs=10, device=CPU, network=network)
    rates = [made.start_epoch(epoch) for epoch in range(1, 11)]
    assert rates.index(max(rates)) == (5 if adapting else 8)


def test_early_layers_learn_more_slowly_whatever_the_method() -> None:
    """A method's own factor counts too; the authors' recipe has one rate."""
    backbone = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    module = Critical()
    module.network = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(16, 2)})

    def rates(**values: Any) -> dict[str, float]:
        config = make_config({"precision": "fp32"} | values)
        factors = {"critic": 10.0, "network.backbone.norm": 3.0}
        made = Optimisation(module, config, lr=1.0, epochs=9, device=CPU, rates=factors, network=module.network)
        of_parameter = {p: group["rate"] for group in made.optimizer.param_groups for p in group["params"]}
        return {name: of_parameter[p] for name, p in module.named_parameters()}

    decayed = rates(layer_decay=0.5, backbone_rate=0.1)
    blocks = [decayed[f"network.backbone.blocks.{n}.attn.qkv.weight"] for n in range(3)]
    assert blocks == pytest.approx([0.025, 0.05, 0.1]), "the norm belongs to the last block"
    assert decayed["network.backbone.patch_embed.proj.weight"] == pytest.approx(0.0125)
    assert decayed["network.backbone.norm.weight"] == pytest.approx(0.3)
    assert decayed["network.head.weight"] == 1.0
    assert decayed["critic.weight"] == 10.0
    assert {rate for name, rate in rates().items() if "backbone" in name} == {1.0, 3.0}
    assert rates(backbone_rate=0.0)["network.backbone.cls_token"] == 0.0


def test_the_gradients_of_network_and_method_are_clipped_apart() -> None:
    module = Critical()
    before = copied(module)
    optimisation = make_optimisation(module, clip_norm=1.0)
    shown = optimisation.start_epoch(1)
    loss = 1000 * sum(p.sum() for p in module.critic.parameters()) + 0.01 * sum(
        p.sum() for p in module.network.parameters()
    )
    optimisation.update(loss)
    gone = moved(module, before)
    assert gone["critic"] == pytest.approx(shown, rel=1e-4), "a norm of 1"
    assert gone["network.backbone"] == pytest.approx(shown * 0.01 * 6**0.5, rel=1e-3), "as if the critic were not there"
    loss = 1000 * sum(p.sum() for p in module.network.parameters())
    before = copied(module)
    optimisation.update(loss)
    gone = moved(module, before)
    assert gone["critic"] == 0
    assert (gone["network.backbone"] ** 2 + gone["network.head"] ** 2) ** 0.5 == pytest.approx(shown, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_update_of_some_parameters_leaves_all_others_alone(optimizer: str) -> None:
    """Also what would move them without a gradient: momentum and weight decay."""
    module = Critical()
    optimisation = make_optimisation(module, optimizer=optimizer, momentum=0.9, weight_decay=0.1)
    optimisation.start_epoch(1)

    def loss() -> torch.Tensor:
        x = module.network["head"](module.network["backbone"](torch.ones(3, 2)))
        return module.critic(x).square().sum()

    optimisation.update(loss())  # all: now everything has a momentum
    for own in ("critic", "network.backbone", "network.head"):
        before = copied(module)
        optimisation.update(loss(), list(module.get_submodule(own).parameters()))
        gone = moved(module, before)
        assert gone.pop(own) > 0
        assert set(gone.values()) == {0.0}
    before = copied(module)
    optimisation.update(loss())
    assert min(moved(module, before).values()) > 0, "and without a choice all move again"
