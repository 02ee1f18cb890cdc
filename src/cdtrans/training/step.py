"""One training step as a function of its input tensors: plain, or replayed as one CUDA graph, and in as many parts as
the GPU's memory needs."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from cdtrans.errors import DeviceError
from cdtrans.network.graph import CudaGraph
from cdtrans.network.network import Network, has_batchnorm
from cdtrans.runtime.device import TOO_LITTLE, autocast, free_memory, ran_out, until_it_fits
from cdtrans.runtime.ranks import world
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Range, check_value
from cdtrans.training.optimisation import Optimisation

WARM_UP = 3  # plain steps before the capture: libraries load, kernels are built, algorithms are chosen
GRAPH_STEPS = 50  # fewer steps ahead than this are not worth capturing

Train = Callable[..., dict[str, Tensor]]  # a batch -> losses by name; it has updated the weights


class Memory:
    """How the networks of a stage compute a batch: at once, or in parts. It is part of the state, so that a resumed run
    starts with the size that fitted.

    The backbone computes the parts and the head gets the whole batch, so that the result is the same but for rounding.
    Only dropout, and the stochastic depth of backbones other than ViTs, are drawn anew for each part. The first remedy
    is twice as many parts, down to one image or pair in each; the last is to compute each block again in the backward
    pass."""

    def __init__(self, module: nn.Module, unit: str, screen: Screen) -> None:
        """`module` has all networks of the stage; a batch is of so many of the `unit`, such as 'pairs'."""
        self.module, self.unit, self.screen = module, unit, screen
        self.networks = [network for network in module.modules() if isinstance(network, Network)]
        self._set(1, recompute_blocks=False)

    def use_less(self, count: int) -> None:
        """Compute batches of this size in smaller parts from now on. If there is nothing left to try, say so."""
        batch = f"{TOO_LITTLE} for {count} {self.unit} at once"
        if world() > 1:  # the others already wait for this rank, with parts of their own size
            raise DeviceError(
                "gpu-memory",
                f"{batch} in one process of {world()}; use a smaller --batch-size or fewer processes per GPU.",
            )
        if any(has_batchnorm(network.backbone) for network in self.networks):
            raise DeviceError(
                "gpu-memory",
                f"{batch}, and the backbone's BatchNorm layers need all of them; use a smaller --batch-size, or a "
                "backbone without BatchNorm, such as deit_small or convnext_tiny.",
            )
        if self.parts < count:
            self._set(min(2 * self.parts, count), recompute_blocks=False)
            how = f"it computes {-(-count // self.parts)} at a time"
        elif not self.recompute_blocks:
            self._set(self.parts, recompute_blocks=True)
            how = "it computes one at a time, and each block again in the backward pass"
        else:
            raise DeviceError(
                "gpu-memory",
                f"{TOO_LITTLE} for this backbone, even one image at a time; use a smaller --backbone or --crop, or a "
                "smaller --batch-size if other programs use the GPU too.",
            )
        self.screen.say(f"{batch}: {how} (slower; the losses are still those of the whole batch).")

    def _set(self, parts: int, *, recompute_blocks: bool) -> None:
        self.parts, self.recompute_blocks = parts, recompute_blocks
        for network in self.networks:
            network.compute_in_parts(parts, recompute_blocks=recompute_blocks)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "recompute_blocks": self.recompute_blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = check_value(state["parts"], Annotated[int, Range(1)], "parts")
        self._set(parts, recompute_blocks=check_value(state["recompute_blocks"], bool, "recompute_blocks"))


class Step:
    """Calling it with a batch trains on it and returns the losses, [k], without waiting for the device; `names` are
    theirs.

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
        self.graph: CudaGraph[Tensor] | None = None

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
        buffers = [(buffer, buffer.clone()) for buffer in self.memory.module.buffers()]  # such as running statistics

        def use_less() -> None:
            had_graph = self.graph is not None
            self.graph, self.capturable = None, False
            self.optimisation.repeat_step()
            if not had_graph:
                self.memory.use_less(len(inputs[0]) or len(inputs[1]))  # there may be no source images
            for buffer, before in buffers:
                buffer.copy_(before)
            torch.manual_seed(torch.initial_seed())  # the seed of the step again

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
            self.graph = CudaGraph(self._train, *inputs)
        except Exception as error:  # the end of the capture may fail after the GPU ran out of memory
            if not ran_out(error):
                raise
        if self.graph is None:
            self.capturable = False
            self.optimisation.optimizer.zero_grad(set_to_none=True)
            free_memory()
            torch.manual_seed(torch.initial_seed())
            self.memory.screen.say(f"{TOO_LITTLE} to replay a step as a CUDA graph: steps run one by one (slower).")
