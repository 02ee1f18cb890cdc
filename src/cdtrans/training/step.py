"""One training step as a function of its input tensors: plain, or compiled and replayed as one CUDA graph."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from cdtrans.device import autocast
from cdtrans.screen import Screen
from cdtrans.training.optimisation import Optimisation

WARM_UP = 3  # steps before anything is timed: libraries load, algorithms are chosen
TIMED = 5  # plain steps that are timed to see what compiling would save
COMPILE_SECONDS = 40.0  # what compiling a step costs at first, measured on an H200's host (docs/results/speed.md)
COMPILE_SAVES = 0.35  # of a plain step's time, likewise
GRAPH_STEPS = 50  # fewer steps ahead than this are not worth capturing

Losses = Callable[..., tuple[Tensor, ...]]


class Step:
    """Calling it with a batch trains on it and gives the losses, [k], without waiting for the device.

    Every step is a real one: the first are plain and timed, then (`plan="auto"`) the step is compiled if the steps
    ahead will repay it, and captured as a CUDA graph. A batch of another shape than the captured one, such as the last
    one of an epoch, is run plainly. On the CPU, and with fp16's loss scaler, which looks at the gradients, all are."""

    def __init__(
        self, losses: Losses, optimisation: Optimisation, *, plan: str, steps_ahead: int, screen: Screen
    ) -> None:
        self.losses, self.optimisation, self.screen = losses, optimisation, screen
        self.plan, self.ahead = plan, steps_ahead
        self.capturable = optimisation.device.type == "cuda" and not optimisation.scaler.is_enabled() and plan != "off"
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.replay: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.ahead -= 1
        if not self.capturable:
            return self._train(self.losses, *inputs)
        shapes = [x.shape for x in inputs]
        self.shapes = self.shapes or shapes
        if shapes != self.shapes:
            return self._train(self.losses, *inputs)
        if self.replay is not None:
            return self.replay(*inputs)
        self.calls += 1
        if self.calls == WARM_UP:
            self._synchronise()
            self.started = time.monotonic()
        elif self.calls == WARM_UP + TIMED:
            self._synchronise()
            self._decide((time.monotonic() - self.started) / TIMED)
        elif self.calls > WARM_UP + TIMED + WARM_UP:
            self.replay = self._capture(inputs)
            return self.replay(*inputs)
        return self._train(self.losses, *inputs)

    def _decide(self, seconds: float) -> None:
        """Compile if that saves more time than it takes, capture if there are steps enough."""
        saving = self.ahead * seconds * COMPILE_SAVES
        if self.plan == "full" or (self.plan == "auto" and saving > COMPILE_SECONDS):
            self.losses = torch.compile(self.losses, dynamic=False)
            self.screen.say(f"compiling the training step: {1000 * seconds:.0f} ms each, {self.ahead} ahead")
        elif self.plan == "auto" and self.ahead < GRAPH_STEPS:
            self.capturable = False

    def _train(self, losses: Losses, *inputs: Tensor) -> Tensor:
        with autocast(self.optimisation.device, self.optimisation.config.precision):
            values = torch.stack(losses(*inputs))  # [k]
        self.optimisation.step(values.sum())
        return values.detach()

    def _capture(self, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        """Record a step on buffers of its own; replaying copies a batch into them and runs the recording."""
        buffers = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        self._synchronise()
        with torch.cuda.graph(graph):
            values = self._train(self.losses, *buffers)

        def replay(*batch: Tensor) -> Tensor:
            for buffer, x in zip(buffers, batch, strict=True):
                buffer.copy_(x)
            graph.replay()
            return values

        return replay

    def _synchronise(self) -> None:
        torch.cuda.synchronize(self.optimisation.device)
