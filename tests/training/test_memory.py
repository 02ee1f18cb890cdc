"""A step that the GPU has too little memory for is computed in parts and learns the same."""

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

import cdtrans.training.step as memory_module
from cdtrans.config import make_config
from cdtrans.methods import method_class
from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.network import Head, Network
from cdtrans.run.resolve import make_method
from cdtrans.runtime.device import free_memory, ran_out
from cdtrans.runtime.screen import Screen
from cdtrans.training.adaptation import training_step
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import WARM_UP, Memory, Step
from support import error_says, says, small_gpu

PAIRS, CLASSES = 6, 4


def network_of(backbone: nn.Module | None = None) -> Network:
    torch.manual_seed(0)
    vit = backbone or VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0, drop_path_rate=0.3
    )
    return Network(vit, Head(vit.num_features, CLASSES, "batchnorm"))


class Training:
    """A few steps of a method."""

    def __init__(self, method: str = "cdtrans", backbone: nn.Module | None = None, device: str = "cpu") -> None:
        kind = method_class(method)
        options = {"hidden": 8} if method in ("dann", "mcd") else {}
        config = make_config({"precision": "fp32", "method": method, "method_args": options})
        network = network_of(backbone)
        self.method: Method = make_method(kind, network, config, Sizes(CLASSES, PAIRS, PAIRS)).to(device).train()
        self.optimisation = Optimisation(
            self.method, config, lr=0.05, epochs=40, device=torch.device(device), network=network
        )
        self.memory = Memory(self.method, "pairs", Screen())
        self.step = Step(training_step(self.method, self.optimisation), self.optimisation, self.memory, "off")
        self.step.ahead = 1000
        self.device = device
        self.optimisation.start_epoch(5)

    def train(self, steps: int = 4, done: int = 0) -> list[Tensor]:
        """The losses of each step after those that are done."""
        losses = []
        for n in range(done, steps):
            generator = torch.Generator().manual_seed(n)
            size = self.method.network.backbone.patch_embed.img_size[0] if self.method.network.runs_blocks else 32
            x = torch.randn(2, PAIRS, 3, size, size, generator=generator)
            x += 2 * torch.randn(2, PAIRS, 3, 1, 1, generator=generator)  # features of mere noise would hardly differ
            y = torch.randint(CLASSES, (2, PAIRS), generator=generator)
            batch = Batch(x[0], y[0], x[1], F.one_hot(y[1], CLASSES).float(), torch.arange(PAIRS), torch.ones(PAIRS))
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
    small_gpu(monkeypatch, 9, in_backward=in_backward)  # of at most 18 images
    losses += limited.train(done=1)
    assert limited.memory.parts == 2
    close(losses, expected)
    close(limited.result(), plain.result())
    said = capsys.readouterr().out
    assert says(said, "GPU", "too little memory", "6 pairs", "3 at a time", "slower")
    assert said.count("\n") == 1


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
            raise torch.cuda.OutOfMemoryError
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


def test_remedies_one_after_the_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    training, tried = Training(), []
    needed = [(2, False), (4, False), (6, False), (6, True)]

    def train(*batch: Tensor) -> dict[str, Tensor]:
        network = training.method.network
        tried.append((network.parts, network.recompute_blocks))
        if tried[-1] != needed[-1]:
            raise torch.cuda.OutOfMemoryError
        return {"loss": batch[0].sum()}

    training.step.train = train
    training.train(1)
    assert tried == [(1, False), *needed]
    lines = capsys.readouterr().out.splitlines()
    for line, words in zip(lines, ("3 at a time", "2 at a time", "1 at a time", "each block again"), strict=True):
        assert says(line, "too little memory", "6 pairs", words)
    needed.append((0, False))
    with error_says("too little memory", "one image at a time", "--backbone", "--batch-size"):
        training.train(1)


def test_a_backbone_with_batchnorm_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("dann", timm.create_model("test_resnet", num_classes=0))
    training.train(1)

    def train(*batch: Tensor) -> dict[str, Tensor]:
        raise torch.cuda.OutOfMemoryError

    training.step.train = train
    with error_says("too little memory", "6 pairs", "BatchNorm", "--batch-size", "convnext_tiny"):
        training.train(1)


def test_on_several_ranks_it_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for this rank in a collective operation, and would for ever."""
    monkeypatch.setattr(memory_module, "world", lambda: 2)
    training = Training()
    small_gpu(monkeypatch, 9)
    with error_says("too little memory", "one process of 2", "--batch-size"):
        training.train(1)


def test_weights_and_optimiser_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()

    def out_of_memory() -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(training.optimisation.optimizer, "step", out_of_memory)
    with error_says("too little memory", "weights", "optimiser", "--backbone"):
        training.train(1)
    assert training.memory.parts == 1, "it would not help"


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


class TestGraph:
    """With a stand-in for a CUDA graph, which runs the recorded step again when replayed."""

    @pytest.fixture
    def captured(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Training]:
        def make() -> Training:
            training = Training()
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
            step.capturable, step.plan = True, "graph"
            return training

        return make

    @pytest.mark.parametrize("failures", [1, 2])
    def test_a_capture_that_does_not_fit_leaves_plain_steps(
        self, failures: int, captured: Callable[[], Training], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Which may not fit either, then."""
        plain, training = Training(), captured()
        expected = plain.train(WARM_UP + 3)
        train, calls = training.step.train, []

        def fails(*batch: Tensor) -> dict[str, Tensor]:
            calls.append(batch)
            if WARM_UP < len(calls) <= WARM_UP + failures:
                torch.rand(1)
                raise torch.cuda.OutOfMemoryError
            return train(*batch)

        training.step.train = fails
        close(training.train(WARM_UP + 3), expected)
        assert len(calls) == WARM_UP + 3 + failures, "it is tried once"
        assert training.step.graph is None
        assert training.memory.parts == failures
        close(training.result(), plain.result())
        said = capsys.readouterr().out.splitlines()
        assert says(said[0], "too little memory", "CUDA graph", "one by one")
        assert len(said) == failures

    def test_another_error_during_a_capture_is_raised(self, captured: Callable[[], Training]) -> None:
        training = captured()
        train, calls = training.step.train, []

        def no_fourth(*batch: Tensor) -> dict[str, Tensor]:
            calls.append(batch)
            if len(calls) == WARM_UP + 1:
                raise ValueError("a mistake")
            return train(*batch)

        training.step.train = no_fourth
        with pytest.raises(ValueError, match="a mistake"):
            training.train(WARM_UP + 1)

    def test_before_a_step_is_split_the_graph_gives_up_its_memory(
        self, captured: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A batch of another shape runs plainly, while the graph holds the memory of a whole step."""
        training = captured()
        training.train(WARM_UP + 1)
        assert training.step.graph is not None
        training.step.shapes = [torch.Size([1])]  # so that the next batch has another shape than the captured one
        train = training.step.train

        def no_room_beside_a_graph(*batch: Tensor) -> dict[str, Tensor]:
            if training.step.graph is not None:
                raise torch.cuda.OutOfMemoryError
            return train(*batch)

        training.step.train = no_room_beside_a_graph
        training.train(1)
        assert training.step.graph is None
        assert training.memory.parts == 1

    def test_steps_in_parts_are_not_captured(self, captured: Callable[[], Training]) -> None:
        """Also after a resume, when nothing has run out of memory yet."""
        training = captured()
        training.memory.load_state_dict({"parts": 2, "recompute_blocks": False})
        training.train(WARM_UP + 2)
        assert training.step.graph is None


def test_what_follows_from_running_out_of_memory_is_recognised() -> None:
    caught: list[Exception] = []
    for first in (torch.cuda.OutOfMemoryError(), ValueError()):
        try:
            try:
                raise first
            except Exception:
                raise RuntimeError("capture ended")  # noqa: B904
        except RuntimeError as error:
            caught.append(error)
    assert [ran_out(error) for error in caught] == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_gpu_with_too_little_memory_trains_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use as much as a step in three parts needs, which is less than a whole one does."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding depends on the size of a batch

    def training() -> Training:
        torch.manual_seed(0)  # the same weights each time
        size = {"img_size": 224, "patch_size": 16, "embed_dim": 384, "num_heads": 6}
        return Training(backbone=VisionTransformer(**size, depth=12, num_classes=0), device="cuda")

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
