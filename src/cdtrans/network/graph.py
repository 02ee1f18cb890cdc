"""A computation recorded as a CUDA graph."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Out = TypeVar("Out")


class CudaGraph(Generic[Out]):
    """A function of tensors, recorded once and replayed for every input of the same shapes. A small model is launched
    kernel by kernel more slowly than a GPU computes it; a graph launches all kernels at once.

    The function must have run before. It reads `inputs`, fixed buffers, and the weights where they are, so that a graph
    follows training; the next replay overwrites its result. The recording itself computes nothing."""

    def __init__(self, function: Callable[..., Out], *inputs: Tensor) -> None:
        self.inputs = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(inputs[0].device)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads prepare batches
            self.output = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Out:
        for buffer, x in zip(self.inputs, inputs, strict=True):
            buffer.copy_(x)
        self.graph.replay()
        return self.output
