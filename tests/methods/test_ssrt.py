"""SSRT by hand: the perturbed tokens, the refinement, and the safe training's decisions."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from cdtrans.methods import ssrt
from cdtrans.methods.ssrt import MEANINGFUL, SSRT, SafeTraining, perturbing, refinement, three
from cdtrans.network.blocks import Tokens, run_blocks
from support import tiny_batch, tiny_method

make_method = partial(tiny_method, SSRT, depth=3, hidden=8)


def test_tokens_are_moved_towards_the_neighbour_s_before_one_block() -> None:
    vit = make_method().network.backbone.eval()
    torch.manual_seed(2)
    tokens = torch.randn(6, 5, 16)  # 3 sources, 3 targets: the last one has no neighbour
    plain = vit.blocks[0](tokens)
    target = plain[3:]
    moved = torch.lerp(target, target[[1, 0, 2]], 0.3)
    by_hand = vit.norm(vit.blocks[2](vit.blocks[1](torch.cat([plain, moved]))))[:, 0]  # [9, D]
    features = run_blocks(
        vit, Tokens(three(tokens), [None] * 3), None, perturbing({id(vit.blocks[1]): torch.tensor(0.3)})
    )
    torch.testing.assert_close(features.unflatten(0, (3, 3)).transpose(0, 1).flatten(0, 1), by_hand)


def test_the_perturbation_has_no_gradient() -> None:
    """A perturbed image teaches its own tokens, and its neighbour's not."""
    vit = make_method().network.backbone
    tokens = torch.randn(4, 5, 16, requires_grad=True)
    features = run_blocks(
        vit, Tokens(three(tokens), [None] * 3), None, perturbing({id(vit.blocks[0]): torch.tensor(0.3)})
    )
    (gradient,) = torch.autograd.grad(features[2, 0], tokens)
    assert [bool(g.abs().max() > 0) for g in gradient] == [False, False, True, False]


def test_in_parts_the_features_are_the_same() -> None:
    method, batch = make_method(), tiny_batch(6)
    strength, found = torch.tensor(0.3), []
    for parts in (1, 2, 6):  # two pairs stay together, however many parts there are
        method.network.compute_in_parts(parts)
        torch.manual_seed(3)
        found.append(torch.stack(method.features(batch.x_s, batch.x_t, strength)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    assert not torch.allclose(found[0][1], found[0][2])


def test_refinement_is_either_divergence_of_the_confident() -> None:
    p = torch.tensor([[0.8, 0.1, 0.1], [0.35, 0.35, 0.3], [0.5, 0.3, 0.2]])
    q = torch.tensor([[0.6, 0.2, 0.2], [0.9, 0.05, 0.05], [0.3, 0.35, 0.35]])

    def divergence(a: Tensor, b: Tensor, rows: list[int]) -> float:
        return sum(float((a[i] * (a[i] / b[i]).log()).sum()) for i in rows) / len(rows)

    expected = {round(divergence(p, q, [0, 2]), 4), round(divergence(q, p, [0, 1]), 4)}
    torch.manual_seed(0)
    found = {round(float(refinement(p.log(), q.log(), 0.4)), 4) for _ in range(20)}
    assert found == expected
    assert float(refinement(p.log(), q.log(), 0.99)) == 0


@pytest.mark.parametrize(("progress", "r"), [(0.0, 0.0), (0.05, math.sin(math.pi / 4)), (0.1, 1.0), (0.7, 1.0)])
def test_r_rises_over_a_period(progress: float, r: float) -> None:
    assert float(SafeTraining(0.1).strength(torch.tensor(progress))) == pytest.approx(r, abs=1e-6)


def predicted(classes: int) -> Tensor:
    """Logits of a batch in which so many classes are predicted."""
    return torch.eye(8)[torch.arange(16) % classes]


@pytest.fixture
def every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssrt, "MEANINGFUL", 1)


def lived(*periods: list[int]) -> tuple[SafeTraining, list[bool]]:
    """A run of ten periods of 16 steps, the first of which have so many distinct classes in equally long parts; and
    after each of these whether it went back."""
    safe, steps, returns = SafeTraining(0.1), 16, []
    for number, classes in enumerate([*periods, [8]]):
        for step in range(steps):
            progress = torch.tensor((number + step / steps) / 10)
            ended, failed = safe.look_back(progress)
            assert bool(ended) == (step == 0 and number > 0)
            returns += [bool(failed)] if ended else []
            if number == len(periods):
                break  # only to look back
            safe.count(predicted(classes[step * len(classes) // steps]), progress)
    return safe, returns


@pytest.mark.parametrize(
    ("periods", "returns"),
    [
        (([6], [6], [6]), [False, False, False]),
        (([6], [5], [4]), [False, False, False]),  # a drop of 1 is none
        (([6], [4], [6]), [False, True, False]),
        (([6], [4], [4]), [False, True, True]),  # no comparison with a period that was undone
        (([6, 4],), [True]),
        (([6] * 15 + [4],), [True]),  # the finest scale
        (([4], [6]), [False, False]),
    ],
)
@pytest.mark.usefixtures("every_step_counts")
def test_it_goes_back_where_fewer_classes_are_predicted(periods: tuple[list[int], ...], returns: list[bool]) -> None:
    assert lived(*periods)[1] == returns


@pytest.mark.usefixtures("every_step_counts")
def test_r_starts_anew_after_a_return_and_rises_more_slowly_after_a_second() -> None:
    once, _ = lived([6], [6], [4])
    assert float(once.strength(torch.tensor(0.3))) == 0
    assert float(once.strength(torch.tensor(0.4))) == pytest.approx(1)
    twice, _ = lived([6], [6], [4], [4])
    assert float(twice.strength(torch.tensor(0.4))) == 0
    assert float(twice.strength(torch.tensor(0.5))) == pytest.approx(math.sin(math.pi / 4), abs=1e-5)


def test_averages_of_few_steps_do_not_count() -> None:
    safe = SafeTraining(0.1)
    for step in range(MEANINGFUL):  # in all: no part of the period has as many
        safe.count(predicted(8 if 2 * step < MEANINGFUL else 2), torch.tensor(0.1 * step / MEANINGFUL))
    assert not safe.look_back(torch.tensor(0.1))[1]
    assert safe.steps[0].sum() == MEANINGFUL


def test_a_return_restores_network_and_critic_and_a_period_s_end_saves_them() -> None:
    method, batch = make_method(), tiny_batch(4)
    start = [x.clone() for x in (*method.network.state_dict().values(), *method.critic.state_dict().values())]

    def current() -> list[Tensor]:
        return [*method.network.state_dict().values(), *method.critic.state_dict().values()]

    def disturb() -> None:
        with torch.no_grad():
            for parameter in (*method.network.parameters(), *method.critic.parameters()):
                parameter += 1

    disturb()
    method.safe.steps[1], method.safe.classes[1] = 50.0, torch.tensor([6.0 * 50] * 8 + [3.0 * 50] * 8)
    method.go_back_or_on(torch.tensor(0.1))
    for a, b in zip(current(), start, strict=True):
        torch.testing.assert_close(a, b)
    disturb()
    method.go_back_or_on(torch.tensor(0.2))  # nothing fell: this is the new snapshot
    torch.testing.assert_close(method.network.head.classifier.weight, method.snapshot[0].head.classifier.weight)
    assert (method.network.head.classifier.weight > 0.5).all()
    calls = []
    method.train_step(batch, torch.tensor(0.25), lambda loss, parameters=None: calls.append(loss))
    assert len(calls) == 1
