"""One training step as a function of its input tensors: plain, or replayed as one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from cdtrans.runtime.device import autocast
from cdtrans.runtime.ranks import world
from cdtrans.training.optimisation import Optimisation

WARM_UP = 3  # plain steps before the capture: libraries load, kernels are built, algorithms are chosen
GRAPH_STEPS = 50  # fewer steps ahead than this are not worth capturing

Train = Callable[..., dict[str, Tensor]]  # a batch -> losses by name; it has updated the weights


class Step:
    """Calling it with a batch trains on it and returns the losses, [k], without waiting for the device; `names` says
    what they are.

    Every step is a real one: the first are plain, then the step is captured as a CUDA graph, because a small model is
    launched kernel by kernel more slowly than a GPU computes it. A batch of another shape than the captured one, such
    as the last one of an epoch, is run plainly. On the CPU, and with fp16's loss scaler, which looks at the gradients,
    all are."""

    def __init__(self, train: Train, optimisation: Optimisation, plan: str, *, capturable: bool = True) -> None:
        self.train, self.optimisation, self.plan = train, optimisation, plan
        self.ahead = 0  # steps until the end of the stage; the stage keeps it up to date
        self.names: tuple[str, ...] = ()
        on_gpu = optimisation.device.type == "cuda" and not optimisation.scaler.is_enabled()
        self.capturable = capturable and on_gpu and plan != "off" and world() == 1
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = [x.shape for x in inputs]
        self.shapes = self.shapes or shapes
        if not self.capturable or shapes != self.shapes:
            return self._train(*inputs)
        self.calls += 1
        if self.calls <= WARM_UP:
            self.capturable = self.plan == "graph" or self.ahead >= GRAPH_STEPS
            return self._train(*inputs)
        if self.graph is None:
            self._capture(inputs)
        assert self.graph is not None, "just captured"
        for buffer, x in zip(self.buffers, inputs, strict=True):
            buffer.copy_(x)
        self.graph.replay()
        return self.values

    def _train(self, *inputs: Tensor) -> Tensor:
        self.optimisation.start_step()
        with autocast(self.optimisation.device, self.optimisation.config.precision):
            losses = self.train(*inputs)
        self.names = tuple(losses)
        return torch.stack([loss.detach() for loss in losses.values()])  # [k]

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        """Record a step that reads its batch from the buffers; the recording itself trains on nothing."""
        self.buffers = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.optimisation.device)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # others may be preparing batches
            self.values = self._train(*self.buffers)
