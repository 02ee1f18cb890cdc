"""A step that is captured, or computed in parts for lack of GPU memory, learns what a plain one learns."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.config import make_config
from cdtrans.methods import method_class
from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.network import Head, Network
from cdtrans.run.pipeline import make_method
from cdtrans.runtime.device import free_memory
from cdtrans.runtime.screen import Screen
from cdtrans.training import step as step_module
from cdtrans.training.adaptation import training_step
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import GRAPH_STEPS, WARM_UP, Memory, Step
from support import raises, says, small_gpu

PAIRS, CLASSES = 6, 4
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def network_of(backbone: nn.Module | None = None, drop_path: float = 0.3) -> Network:
    torch.manual_seed(0)
    vit = backbone or VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0, drop_path_rate=drop_path
    )
    return Network(vit, Head(vit.num_features, CLASSES, "batchnorm"))


class Training:
    """A few steps of a method. The rate changes on the way, as it does between epochs."""

    def __init__(
        self,
        method: str = "cdtrans",
        network: Network | None = None,
        device: str = "cpu",
        plan: str = "off",
        *,
        ahead: int = 10_000,
        capturable: bool = True,
    ) -> None:
        kind = method_class(method)
        options = {"hidden": 8} if method in ("dann", "mcd") else {}
        config = make_config({"precision": "fp32", "method": method, "method_args": options})
        network = network or network_of()
        self.method: Method = make_method(kind, network, config, Sizes(CLASSES, PAIRS, PAIRS)).to(device).train()
        self.optimisation = Optimisation(
            self.method, config, lr=0.05, epochs=40, device=torch.device(device), network=network
        )
        self.memory = Memory(self.method, "pairs", Screen())
        train = training_step(self.method, self.optimisation)
        self.step = Step(train, self.optimisation, self.memory, plan, capturable=capturable)
        self.step.ahead, self.device = ahead, device

    def train(self, steps: int = 4, done: int = 0, *, odd: int = -1) -> list[Tensor]:
        """The losses of each step after those that are done. The batch of the step `odd` has another size."""
        losses = []
        for n in range(done, steps):
            self.optimisation.start_epoch(5 + n // 5)
            generator = torch.Generator().manual_seed(n)
            pairs = PAIRS // 2 if n == odd else PAIRS
            size = self.method.network.backbone.patch_embed.img_size[0] if self.method.network.runs_blocks else 32
            x = torch.randn(2, pairs, 3, size, size, generator=generator)
            x += 2 * torch.randn(2, pairs, 3, 1, 1, generator=generator)  # features of mere noise would hardly differ
            y = torch.randint(CLASSES, (2, pairs), generator=generator)
            batch = Batch(x[0], y[0], x[1], F.one_hot(y[1], CLASSES).float(), torch.arange(pairs), torch.ones(pairs))
            torch.manual_seed(n)
            losses.append(self.step(*(t.to(self.device) for t in (*batch, torch.tensor(n / steps)))).clone())
        return losses

    def result(self) -> list[Tensor]:
        state = self.optimisation.state_dict()["optimizer"]["state"]
        moments = [x for of_parameter in state.values() for x in of_parameter.values() if isinstance(x, Tensor)]
        return [*self.method.state_dict().values(), *moments, self.optimisation.taken]


def close(ours: list[Tensor], theirs: list[Tensor], **error: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-4, "atol": 1e-5} | error))


def out_of_memory(*anything: Any) -> Any:
    raise torch.cuda.OutOfMemoryError


# Less memory


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["cdtrans", "dann", "rpll", "mrkld_lrent", "cotraining"])
def test_every_method_learns_the_same_with_less_memory(
    name: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, running statistics, teachers and the optimiser; a try that failed has left nothing behind."""
    plain = Training(name)
    expected = plain.train()
    assert capsys.readouterr().out == ""
    limited = Training(name)
    losses = limited.train(1)
    small_gpu(monkeypatch, 9, in_backward=in_backward)  # a step has up to 18
    losses += limited.train(done=1)
    assert limited.memory.parts == 2
    close(losses, expected)
    close(limited.result(), plain.result())
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("update", range(6))
def test_an_update_made_before_memory_ran_out_is_not_made_again(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MCD makes six updates in a step. Its weights are the same; its running statistics have seen the first loss again
    with the weights after the updates, which is logged then."""
    plain, disturbed = Training("mcd"), Training("mcd")
    plain.train(1)
    real, made = disturbed.optimisation.update, 0

    def runs_out_once(*passed: Any) -> None:
        nonlocal made
        made += 1
        if made == update + 1:
            out_of_memory()
        real(*passed)

    monkeypatch.setattr(disturbed.optimisation, "update", runs_out_once)
    disturbed.step.train = training_step(disturbed.method, disturbed.optimisation)
    disturbed.train(1)
    assert disturbed.memory.parts == 2
    assert made == 6 + update + 1
    for (name, a), b in zip(disturbed.method.named_parameters(), plain.method.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for (name, a), b in zip(disturbed.method.named_buffers(), plain.method.buffers(), strict=True):
        assert "num_batches" not in name or a == b, name
    assert int(disturbed.optimisation.taken) == 1


def test_remedies_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    training, tried = Training(), []
    needed = [(2, False), (4, False), (6, False), (6, True)]

    def train(*batch: Tensor) -> dict[str, Tensor]:
        network = training.method.network
        tried.append((network.parts, network.recompute_blocks))
        if tried[-1] != needed[-1]:
            out_of_memory()
        return {"loss": batch[0].sum()}

    training.step.train = train
    training.train(1)
    assert tried == [(1, False), *needed]
    lines = capsys.readouterr().out.splitlines()
    for line, words in zip(lines, ("3 at a time", "2 at a time", "1 at a time", "each block again"), strict=True):
        assert says(line, "too little memory", "6 pairs", words)
    needed.append((0, False))
    with raises("gpu-memory"):
        training.train(1)


def test_what_cannot_be_helped_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm needs the whole batch; the other ranks wait for this one; weights have no smaller parts."""
    resnet = Training("dann", network_of(timm.create_model("test_resnet", num_classes=0)))
    resnet.step.train = out_of_memory
    heavy = Training()
    monkeypatch.setattr(heavy.optimisation.optimizer, "step", out_of_memory)
    for training in (resnet, heavy):
        with raises("gpu-memory"):
            training.train(1)
        assert training.memory.parts == 1
    monkeypatch.setattr(step_module, "world", lambda: 2)
    small_gpu(monkeypatch, 9)
    with raises("gpu-memory"):
        Training().train(1)


def test_another_error_is_not_taken_for_it() -> None:
    training, tries = Training(), []

    def train(*batch: Tensor) -> dict[str, Tensor]:
        tries.append(batch)
        raise RuntimeError("shapes differ")

    training.step.train = train
    with pytest.raises(RuntimeError, match="shapes differ"):
        training.train(1)
    assert len(tries) == 1


def test_the_state_carries_it() -> None:
    before, after = Training("cotraining"), Training("cotraining")
    for _ in range(4):
        before.memory.use_less(PAIRS)
    after.memory.load_state_dict(before.memory.state_dict())
    networks = [m for m in after.method.modules() if isinstance(m, Network)]
    assert len(networks) == 2, "the teacher is one"
    assert [(n.parts, n.recompute_blocks) for n in networks] == [(6, True)] * 2
    Memory(after.method, "pairs", Screen())
    assert [(n.parts, n.recompute_blocks) for n in networks] == [(1, False)] * 2, "a new stage tries everything at once"


# Captured as a CUDA graph: here a stand-in, which runs the recorded step again when replayed


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    def make(network: Network | None = None, plan: str = "graph", ahead: int = 10_000) -> Training:
        training = Training(network=network, plan=plan, ahead=ahead)
        step = training.step

        class Graph:
            def replay(self) -> None:
                step.graph.output.copy_(step._train(*step.graph.inputs))

        @contextmanager
        def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
            before = copy.deepcopy((training.method.state_dict(), training.optimisation.state_dict()))
            taken = training.optimisation.taken.clone()
            try:
                yield
            except torch.cuda.OutOfMemoryError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            finally:
                training.method.load_state_dict(before[0])  # capturing trains on nothing
                training.optimisation.load_state_dict(before[1])
                training.optimisation.taken.copy_(taken)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", recording)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        step.capturable = True
        return training

    return make


def test_on_the_cpu_every_step_is_plain() -> None:
    training = Training(plan="auto")
    losses = training.train(WARM_UP + 1)
    assert training.step.graph is None
    assert all(loss.shape == (3,) and loss.isfinite().all() for loss in losses)
    assert training.step.names == ("loss_source", "loss_target", "loss_distillation")


def test_every_call_trains_once_on_its_own_batch(captured: Callable[..., Training]) -> None:
    """Plain, captured, and of another shape than the captured one."""
    plain, training = Training(network=network_of(drop_path=0.0)), captured(network_of(drop_path=0.0))
    close(training.train(12, odd=10), plain.train(12, odd=10))
    assert training.step.graph is not None
    close(training.result(), plain.result())
    assert int(training.optimisation.taken) == 1, "steps since the last start of an epoch"


@pytest.mark.parametrize(
    ("plan", "ahead", "expected"), [("auto", GRAPH_STEPS - 1, False), ("auto", GRAPH_STEPS, True), ("graph", 1, True)]
)
def test_it_is_captured_if_enough_steps_are_ahead_or_if_asked(
    plan: str, ahead: int, expected: bool, captured: Callable[..., Training]
) -> None:
    training = captured(plan=plan, ahead=ahead)
    training.train(WARM_UP + 1)
    assert (training.step.graph is not None) == expected


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_that_does_not_fit_leaves_plain_steps(
    failures: int, captured: Callable[..., Training], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor may a plain step fit then."""
    plain, training = Training(), captured()
    expected = plain.train(WARM_UP + 3)
    train, calls = training.step.train, []

    def fails(*batch: Tensor) -> dict[str, Tensor]:
        calls.append(batch)
        if WARM_UP < len(calls) <= WARM_UP + failures:
            torch.rand(1)
            out_of_memory()
        return train(*batch)

    training.step.train = fails
    close(training.train(WARM_UP + 3), expected)
    assert len(calls) == WARM_UP + 3 + failures, "it is tried once"
    assert training.step.graph is None
    assert training.memory.parts == failures
    close(training.result(), plain.result())
    assert len(capsys.readouterr().out.splitlines()) == failures


def test_before_a_step_is_split_the_graph_gives_up_its_memory(captured: Callable[..., Training]) -> None:
    """A batch of another shape runs plainly, while the graph holds the memory of a whole step."""
    training = captured()
    training.train(WARM_UP + 1)
    assert training.step.graph is not None
    train = training.step.train

    def no_room_beside_a_graph(*batch: Tensor) -> dict[str, Tensor]:
        return train(*batch) if training.step.graph is None else out_of_memory()

    training.step.train = no_room_beside_a_graph
    training.train(1, odd=0)
    assert training.step.graph is None
    assert training.memory.parts == 1


def test_steps_in_parts_are_not_captured(captured: Callable[..., Training]) -> None:
    """Also after a resume, when nothing has run out of memory yet."""
    training = captured()
    training.memory.load_state_dict({"parts": 2, "recompute_blocks": False})
    training.train(WARM_UP + 2)
    assert training.step.graph is None


# On a GPU


@needs_gpu
@pytest.mark.gpu
def test_captured_steps_equal_plain_ones_and_draw_fresh_numbers_from_the_seed() -> None:
    def train(plan: str, drop_path: float) -> tuple[Training, Tensor]:
        training = Training(network=network_of(drop_path=drop_path), device="cuda", plan=plan)
        return training, torch.stack(training.train(20, odd=18))

    (plain, plain_losses), (fast, fast_losses) = (train(plan, 0.0) for plan in ("off", "graph"))
    assert fast.step.graph is not None
    close([fast_losses], [plain_losses], atol=2e-4, rtol=2e-4)
    close(fast.result(), plain.result(), atol=2e-4, rtol=2e-3)
    (_, once), (_, again) = (train("graph", 0.5) for _ in range(2))
    close([once], [again], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(once[-1], fast_losses[-1])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"plan": "auto", "ahead": 20}, {"plan": "graph", "capturable": False}], ids=str)
def test_short_runs_and_methods_that_cannot_be_captured_are_left_alone(how: dict[str, Any]) -> None:
    training = Training(device="cuda", **how)
    training.train(20)
    assert training.step.graph is None


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_with_too_little_memory_trains_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use as much as a step in three parts needs, which is less than a whole one does."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding depends on the size of a batch

    def training() -> Training:
        torch.manual_seed(0)  # the same weights each time
        size = {"img_size": 224, "patch_size": 16, "embed_dim": 384, "num_heads": 6}
        return Training(network=network_of(VisionTransformer(**size, depth=12, num_classes=0)), device="cuda")

    def peak(parts: int) -> tuple[int, Training, list[Tensor]]:
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        made = training()
        made.memory.load_state_dict({"parts": parts, "recompute_blocks": False})
        losses = made.train(1)  # a second would magnify the rounding of the first
        return torch.cuda.max_memory_reserved(), made, losses

    whole, plain, expected = peak(1)
    weights = [x.cpu() for x in plain.result()]
    del plain
    parts, _, _ = peak(3)
    assert parts < 0.8 * whole
    free_memory()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((parts + 0.5 * (whole - parts)) / total)
    try:
        limited = training()
        losses = limited.train(1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limited.memory.parts > 1
    close(losses, expected, rtol=1e-2, atol=1e-3)
    close([x.cpu() for x in limited.result()], weights, rtol=1e-2, atol=1e-3)
