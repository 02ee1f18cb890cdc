"""One training step as a function of its input tensors: plain, or compiled and replayed as one CUDA graph."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from cdtrans.device import autocast
from cdtrans.ranks import world
from cdtrans.screen import Screen
from cdtrans.training.optimisation import Optimisation

WARM_UP = 3  # steps before anything is timed: libraries load, algorithms are chosen
TIMED = 5  # plain steps that are timed to see what compiling would save
COMPILE_SECONDS = 40.0  # what compiling costs at first: 24 to 31 s beside an H200, and some margin
COMPILE_SAVES = 0.35  # of a plain step's time: 41 % for DeiT-small on an H200, less some margin
GRAPH_STEPS = 50  # fewer steps ahead than this are not worth capturing

Losses = Callable[..., tuple[Tensor, ...]]


class Step:
    """Calling it with a batch trains on it and gives the losses, [k], without waiting for the device.

    Every step is a real one: the first are plain and timed, then (`plan="auto"`) the step is compiled if the steps
    ahead will repay it, and captured as a CUDA graph. A batch of another shape than the captured one, such as the last
    one of an epoch, is run plainly. On the CPU, and with fp16's loss scaler, which looks at the gradients, all are."""

    def __init__(self, losses: Losses, optimisation: Optimisation, plan: str, screen: Screen) -> None:
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
        """Compile if that saves more time than it takes, capture if there are steps enough."""
        saving = self.ahead * seconds * COMPILE_SAVES
        if self.plan == "full" or (self.plan == "auto" and saving > COMPILE_SECONDS):
            self.losses = torch.compile(self.plain_losses, dynamic=False)
            self.screen.say(f"compiling the training step: {1000 * seconds:.0f} ms each, {self.ahead} ahead")
        elif self.plan == "auto" and self.ahead < GRAPH_STEPS:
            self.capturable = False

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
