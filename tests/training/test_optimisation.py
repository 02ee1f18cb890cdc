"""Schedule, parameter groups and one whole step against the authors' vectors."""

import pytest
import torch

from cdtrans.config import Config, make_config
from cdtrans.model.cross_attention import three_branches
from cdtrans.training.losses import adaptation_losses
from cdtrans.training.optimisation import Optimisation, learning_rate, parameter_groups
from support import from_authors_names

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "base"), [("pretrain_default", 8e-3), ("pretrain_visda", 5e-4), ("uda_default", 8e-3), ("uda_visda", 5e-5)]
)
def test_schedule_equals_the_authors(golden, name: str, base: float) -> None:
    table = golden("cdtrans_tiny")[f"lr/{name}"]
    epochs = len(table)
    for factor, column in ((1.0, 0), (2.0, 1)):
        ours = [learning_rate(e, epochs, base, factor) for e in range(1, epochs + 1)]
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), table[:, column], atol=1e-15, rtol=1e-12)


def test_warm_up_may_be_left_out() -> None:
    rates = [learning_rate(e, 10, 1.0, warmup=0) for e in range(1, 11)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.97


def test_one_step_equals_the_authors(tiny: tuple) -> None:
    model, g = tiny
    optimisation = Optimisation(model, make_config({"precision": "fp32"}), lr=0.008, epochs=40, device=CPU)
    optimisation.start_epoch(1)
    rates = [group["lr"] for group in optimisation.optimizer.param_groups]
    assert rates == pytest.approx([float(g["step/lr_weight"]), float(g["step/lr_bias"])], rel=1e-12)
    losses = adaptation_losses(
        three_branches(model.train(), g["x_s"], g["x_t"]), g["y_s"], g["y_t"], detach_teacher=False
    )
    optimisation.step(torch.stack(losses).sum())
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


def test_a_loss_that_is_not_finite_is_remembered_with_its_step() -> None:
    model = torch.nn.Linear(2, 1)
    optimisation = Optimisation(model, make_config({"precision": "fp32"}), lr=0.1, epochs=1, device=CPU)
    optimisation.step(model(torch.ones(1, 2)).sum())
    assert optimisation.first_bad_step() is None
    optimisation.step(model(torch.full((1, 2), torch.nan)).sum())
    optimisation.step(model(torch.full((1, 2), torch.nan)).sum())
    assert optimisation.first_bad_step() == 2


def test_adamw_is_a_choice() -> None:
    config = make_config({"optimizer": "adamw", "precision": "fp32"})
    assert isinstance(
        Optimisation(torch.nn.Linear(2, 1), config, lr=0.1, epochs=1, device=CPU).optimizer, torch.optim.AdamW
    )
    assert Config().optimizer == "sgd"
