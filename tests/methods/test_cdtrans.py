"""CDTrans: its losses and their gradients against the authors' vectors, and what its options decide. Its pairs are in
tests/pairing/test_pairs.py."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.config import CDTransOptions
from cdtrans.methods.base import Batch, Sizes
from cdtrans.methods.cdtrans import Branches, CDTrans, branch_losses, distillation_loss
from cdtrans.network.network import Network, Output
from support import from_authors_names

PROGRESS = torch.zeros(())
NAMES = ("loss_source", "loss_target", "loss_distillation")
Tiny = tuple[Network, dict[str, Tensor]]


def golden_losses(tiny: Tiny, **options: Any) -> dict[str, Tensor]:
    network, g = tiny
    index = torch.arange(len(g["x_t"]))
    batch = Batch(g["x_s"], g["y_s"], g["x_t"], g["y_t"], index, torch.ones(len(index)))
    method = CDTrans(network.train(), CDTransOptions(**options), Sizes(5, 10, 10))
    return method.losses(batch, PROGRESS)


def of_logits(s: Tensor, t: Tensor, c: Tensor) -> Branches:
    return Branches(Output(s, s), Output(t, t), Output(c, c))


def test_losses_equal_the_authors(tiny: Tiny) -> None:
    losses = golden_losses(tiny)
    assert tuple(losses) == NAMES
    for name, loss in zip(("source", "target", "distill"), losses.values(), strict=True):
        torch.testing.assert_close(loss.detach(), tiny[1][f"train/loss_{name}"], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("detach", "prefix"), [(False, "grad/"), (True, "grad_detached_teacher/")])
def test_gradients_equal_the_authors(tiny: Tiny, detach: bool, prefix: str) -> None:
    network, g = tiny
    torch.stack(list(golden_losses(tiny, detach_teacher=detach).values())).sum().backward()
    named = dict(network.named_parameters())
    golden = from_authors_names({k.removeprefix(prefix): v for k, v in g.items() if k.startswith(prefix)})
    assert len(golden) >= 4
    for name, gradient in golden.items():
        torch.testing.assert_close(named[name].grad, gradient, atol=1e-9, rtol=1e-9)


def test_distillation_is_least_where_the_student_agrees() -> None:
    """Eq. 8 as printed would be maximised; with the minus sign it is least when p = q."""
    teacher = torch.tensor([[2.0, 0.0, -1.0]])
    agreeing = distillation_loss(teacher, teacher)
    assert agreeing < distillation_loss(teacher.flip(1), teacher)
    entropy = -(teacher.softmax(1) * teacher.log_softmax(1)).sum()
    torch.testing.assert_close(agreeing, entropy)


@pytest.mark.parametrize(
    ("source", "source_target", "target", "expected"),
    [
        ("cls", "dtl", "cls", ["source", "target", "distillation"]),
        ("cls", "cls", "cls", ["source", "target", "source_target"]),
        ("cls", "none", "cls", ["source", "target"]),
        ("none", "none", "cls", ["target"]),
        ("cls", "none", "none", ["source"]),
        ("none", "dtl", "none", ["distillation"]),
    ],
)
def test_the_rows_of_table_6_have_the_losses_they_name(
    source: str, source_target: str, target: str, expected: list[str]
) -> None:
    s, t, c = (torch.randn(4, 3) for _ in range(3))
    y_s, y_t = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 1, 0, 0])
    every = {
        "source": F.cross_entropy(s, y_s),
        "target": F.cross_entropy(t, y_t),
        "distillation": distillation_loss(t, c),
        "source_target": F.cross_entropy(c, y_s),  # the true label of the two
    }
    options = CDTransOptions(loss_source=source, loss_source_target=source_target, loss_target=target)  # type: ignore[arg-type]
    losses = branch_losses(of_logits(s, t, c), y_s, y_t, options)
    assert list(losses) == [f"loss_{name}" for name in expected]
    assert [float(loss) for loss in losses.values()] == [float(every[name]) for name in expected]


@pytest.mark.parametrize("residual", [True, False])
def test_the_first_block_s_residual_is_an_option(tiny: Tiny, residual: bool) -> None:
    losses = golden_losses(tiny, first_block_residual=residual)
    same = torch.allclose(losses["loss_distillation"], tiny[1]["train/loss_distill"], atol=1e-10)
    assert same == residual, "the authors' code has it"
