"""The losses of both stages against the authors' vectors."""

import pytest
import torch

from cdtrans.model.cross_attention import Branches, three_branches
from cdtrans.model.head import Output
from cdtrans.training.losses import Terms, adaptation_losses, distillation_loss, source_loss


def test_adaptation_losses_equal_the_authors(tiny: tuple) -> None:
    model, g = tiny
    losses = adaptation_losses(
        three_branches(model.train(), g["x_s"], g["x_t"]), g["y_s"], g["y_t"], detach_teacher=False
    )
    for name, loss in zip(("source", "target", "distill"), losses, strict=True):
        torch.testing.assert_close(loss.detach(), g[f"train/loss_{name}"], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("detach", "prefix"), [(False, "grad/"), (True, "grad_detached_teacher/")])
def test_gradients_equal_the_authors(tiny: tuple, detach: bool, prefix: str) -> None:
    model, g = tiny
    sum(adaptation_losses(three_branches(model.train(), g["x_s"], g["x_t"]), g["y_s"], g["y_t"], detach)).backward()
    named = dict(model.named_parameters())
    ours = {"base.": "backbone.", "bottleneck.": "head.neck.", "classifier.": "head.classifier."}
    golden = {k.removeprefix(prefix): v for k, v in g.items() if k.startswith(prefix)}
    assert len(golden) >= 4
    for name, gradient in golden.items():
        old = next(o for o in ours if name.startswith(o))
        grad = named[ours[old] + name.removeprefix(old)].grad
        torch.testing.assert_close(grad, gradient, atol=1e-9, rtol=1e-9)


def test_source_loss_equals_the_authors(tiny: tuple) -> None:
    model, g = tiny
    out = model.train().encode(g["x_s"])
    loss = source_loss(out.logits, g["y_s"], 0.1)
    loss.backward()
    torch.testing.assert_close(out.logits.detach(), g["pretrain/logits"], atol=1e-10, rtol=0)
    torch.testing.assert_close(loss.detach(), g["pretrain/loss_smooth01"], atol=0, rtol=1e-7)
    torch.testing.assert_close(model.head.classifier.weight.grad, g["pretrain/grad_classifier"], atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(
        model.backbone.blocks[0].attn.qkv.weight.grad, g["pretrain/grad_qkv0"], atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(model.head.neck.running_mean, g["pretrain/running_mean_after"], atol=1e-10, rtol=0)
    torch.testing.assert_close(model.head.neck.running_var, g["pretrain/running_var_after"], atol=1e-10, rtol=0)


def test_distillation_is_least_where_the_student_agrees() -> None:
    """Eq. 8 as printed would be maximised; with the minus sign it is least when p = q."""
    teacher = torch.tensor([[2.0, 0.0, -1.0]])
    agreeing = distillation_loss(teacher, teacher)
    assert agreeing < distillation_loss(teacher.flip(1), teacher)
    entropy = -(teacher.softmax(1) * teacher.log_softmax(1)).sum()
    torch.testing.assert_close(agreeing, entropy)


def test_a_detached_teacher_gets_no_gradient() -> None:
    s, t, c = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    out = Branches(Output(s, s), Output(t, t), Output(c, c))
    sum(adaptation_losses(out, torch.zeros(2).long(), torch.ones(2).long(), detach_teacher=True)).backward()
    assert c.grad is None
    assert t.grad is not None


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (Terms(), ("source", "target", "distillation")),
        (Terms("cls", "cls", "cls"), ("source", "target", "source_target")),
        (Terms("cls", "none", "cls"), ("source", "target")),
        (Terms("none", "none", "cls"), ("target",)),
        (Terms("cls", "none", "none"), ("source",)),
    ],
)
def test_the_rows_of_table_6_have_the_losses_they_name(terms: Terms, expected: tuple[str, ...]) -> None:
    s, t, c = (torch.randn(4, 3) for _ in range(3))
    y_s, y_t = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 1, 0, 0])
    every = {
        "source": torch.nn.functional.cross_entropy(s, y_s),
        "target": torch.nn.functional.cross_entropy(t, y_t),
        "distillation": distillation_loss(t, c),
        "source_target": torch.nn.functional.cross_entropy(c, y_s),  # the true label of the two
    }
    losses = adaptation_losses(Branches(Output(s, s), Output(t, t), Output(c, c)), y_s, y_t, False, terms)
    assert terms.names() == tuple(f"loss_{name}" for name in expected)
    assert [float(loss) for loss in losses] == [float(every[name]) for name in expected]
