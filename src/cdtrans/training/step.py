"""One training step as a function of its input tensors: plain, or compiled and replayed as one CUDA graph."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdtrans.device import autocast
from cdtrans.model.branches import CDTrans
from cdtrans.ranks import world
from cdtrans.screen import Screen
from cdtrans.training.optimisation import Optimisation

WARM_UP = 3  # steps before anything is timed: libraries load, algorithms are chosen
TIMED = 5  # plain steps that are timed to see what compiling would save
GRAPH_STEPS = 50  # fewer steps ahead than this are not worth capturing

Losses = Callable[..., tuple[Tensor, ...]]


class Compilation(NamedTuple):
    """What is compiled, what that costs, and what it saves."""

    seconds: float  # at first, beside an H200 (docs/results/speed.md), and some margin
    saves: float  # of a plain step's time, for DeiT-small there, less some margin


COMPILATIONS = {"blocks": Compilation(13.0, 0.28), "full": Compilation(60.0, 0.31)}


class Step:
    """Calling it with a batch trains on it and gives the losses, [k], without waiting for the device.

    Every step is a real one: the first are plain and timed, then (`plan="auto"`) the step is compiled if the steps
    ahead will repay it, and captured as a CUDA graph. A batch of another shape than the captured one, such as the last
    one of an epoch, is run plainly. On the CPU, and with fp16's loss scaler, which looks at the gradients, all are."""

    def __init__(self, model: CDTrans, losses: Losses, optimisation: Optimisation, plan: str, screen: Screen) -> None:
        self.model = model
        self.losses = self.plain_losses = losses
        self.optimisation, self.screen = optimisation, screen
        self.plan = plan
        self.ahead = 0  # steps until the end of the stage; the stage keeps it up to date
        self.capturable = optimisation.device.type == "cuda" and not optimisation.scaler.is_enabled() and plan != "off"
        self.capturable &= world() == 1
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = [x.shape for x in inputs]
        self.shapes = self.shapes or shapes
        if not self.capturable or shapes != self.shapes:
            return self._train(self.plain_losses, *inputs)
        self.calls += 1
        if self.calls <= WARM_UP + TIMED:
            self._time_and_decide(inputs)
            return self._train(self.plain_losses, *inputs)
        for buffer, x in zip(self.buffers, inputs, strict=True):
            buffer.copy_(x)
        if self.calls == WARM_UP + TIMED + 1 and self.losses is not self.plain_losses:
            return self._train_compiled()
        if self.calls <= WARM_UP + TIMED + WARM_UP:
            return self._train(self.losses, *self.buffers)
        if self.graph is None:
            self._capture()
        assert self.graph is not None, "just captured"
        self.graph.replay()
        return self.values

    def _time_and_decide(self, inputs: tuple[Tensor, ...]) -> None:
        if self.calls == WARM_UP:
            torch.cuda.synchronize(self.optimisation.device)
            self.started = time.monotonic()
        elif self.calls == WARM_UP + TIMED:
            torch.cuda.synchronize(self.optimisation.device)
            self.buffers = [x.clone() for x in inputs]  # every later step reads its batch from here
            self._decide((time.monotonic() - self.started) / TIMED)

    def _decide(self, seconds: float) -> None:
        """Compile what saves most beyond what it costs, if anything does; capture if there are steps enough."""
        compiled = self.plan
        if self.plan == "auto":
            gains = {name: self.ahead * seconds * c.saves - c.seconds for name, c in COMPILATIONS.items()}
            best = max(gains, key=lambda name: gains[name])
            compiled = best if gains[best] > 0 else "graph"
        if compiled == "full":
            self.losses = torch.compile(self.plain_losses, dynamic=False)
        elif compiled == "blocks":
            self.losses = self._with_compiled_blocks()
        if compiled in COMPILATIONS:
            self.screen.say(f"compiling the training step: {1000 * seconds:.0f} ms each, {self.ahead} ahead")
        elif self.plan == "auto" and self.ahead < GRAPH_STEPS:
            self.capturable = False

    def _with_compiled_blocks(self) -> Losses:
        """The losses with one transformer block compiled, which serves for all but the last: that one computes the
        rows that are read, so it would be compiled for itself, and it is short. Nearly as fast as the whole, and ready
        in a fraction of the time. Encoding goes on as before."""
        compiled, plain = torch.compile(self.model.block, dynamic=False), self.model.block

        def block(block: Any, x: Tensor, scales: Tensor | None, *, rows: int | None, cross: bool) -> Tensor:
            run = compiled if rows is None else plain
            return run(block, x, scales, rows=rows, cross=cross)

        def losses(*inputs: Tensor) -> tuple[Tensor, ...]:
            self.model.block = block
            try:
                return self.plain_losses(*inputs)
            finally:
                self.model.block = plain

        return losses

    def _train(self, losses: Losses, *inputs: Tensor) -> Tensor:
        with autocast(self.optimisation.device, self.optimisation.config.precision):
            values = torch.stack(losses(*inputs))  # [k]
        self.optimisation.step(values.sum())
        return values.detach()

    def _train_compiled(self) -> Tensor:
        """The step in which compilation happens. A machine that cannot compile, for want of a C compiler say, must not
        end a run that works without; nothing has been learnt yet when compilation fails."""
        try:
            return self._train(self.losses, *self.buffers)
        except Exception as error:
            self.screen.warn(f"The step could not be compiled and runs without ({type(error).__name__}).")
            self.losses = self.plain_losses
            return self._train(self.losses, *self.buffers)

    def _capture(self) -> None:
        """Record a step on the buffers; the recording itself trains on nothing."""
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.optimisation.device)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # others may be preparing batches
            self.values = self._train(self.losses, *self.buffers)
