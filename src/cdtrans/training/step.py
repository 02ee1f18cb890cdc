"""One training step as a function of its input tensors: plain, or replayed as one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from cdtrans.network.graph import Graph
from cdtrans.network.retry import until_it_fits
from cdtrans.runtime.device import TOO_LITTLE, autocast, free_memory, ran_out
from cdtrans.runtime.ranks import world
from cdtrans.training.memory import Memory
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
    all are.

    A step that the GPU has too little memory for is repeated with less: without the graph if there is one, then in more
    and more parts (`Memory`), which are not captured. It starts from the same random numbers and running statistics. An
    update that the failed try has made counts: only those after it are made."""

    def __init__(
        self, train: Train, optimisation: Optimisation, memory: Memory, plan: str, *, capturable: bool = True
    ) -> None:
        self.train, self.optimisation, self.memory, self.plan = train, optimisation, memory, plan
        self.ahead = 0  # steps until the end of the stage; the stage keeps it up to date
        self.names: tuple[str, ...] = ()
        on_gpu = optimisation.device.type == "cuda" and not optimisation.scaler.is_enabled()
        self.capturable = capturable and on_gpu and plan != "off" and world() == 1
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.graph: Graph[Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = [x.shape for x in inputs]
        self.shapes = self.shapes or shapes
        if not self.capturable or self.memory.parts > 1 or shapes != self.shapes:
            return self._plain(*inputs)
        self.calls += 1
        if self.calls <= WARM_UP:
            self.capturable = self.plan == "graph" or self.ahead >= GRAPH_STEPS
            return self._plain(*inputs)
        if self.graph is None:
            self._capture(inputs)
        if self.graph is None:
            return self._plain(*inputs)
        return self.graph(*inputs)

    def _plain(self, *inputs: Tensor) -> Tensor:
        self.optimisation.start_step()
        buffers = self.memory.buffers()

        def use_less() -> None:
            had_graph = self.graph is not None
            self.graph, self.capturable = None, False
            self.optimisation.repeat_step()
            if not had_graph:
                self.memory.use_less(len(inputs[0]) or len(inputs[1]))  # there may be no source images
            for buffer, before in buffers:
                buffer.copy_(before)
            torch.manual_seed(torch.initial_seed())  # as before the step

        return until_it_fits(lambda: self._losses(*inputs), use_less)

    def _train(self, *inputs: Tensor) -> Tensor:
        self.optimisation.start_step()
        return self._losses(*inputs)

    def _losses(self, *inputs: Tensor) -> Tensor:
        with autocast(self.optimisation.device, self.optimisation.config.precision):
            losses = self.train(*inputs)
        self.names = tuple(losses)
        return torch.stack([loss.detach() for loss in losses.values()])  # [k]

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        """Record a step; the recording itself trains on nothing."""
        try:
            self.graph = Graph(self._train, *inputs)
        except Exception as error:  # the end of the capture may fail after the GPU ran out of memory
            if not ran_out(error):
                raise
        if self.graph is None:
            self.capturable = False
            self.optimisation.optimizer.zero_grad(set_to_none=True)
            free_memory()
            torch.manual_seed(torch.initial_seed())
            self.memory.screen.say(f"{TOO_LITTLE} to replay a step as a CUDA graph: steps run one by one (slower).")
