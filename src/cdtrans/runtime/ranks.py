"""Several processes that work as one, started by `torchrun` or `accelerate launch`: each takes a share of the images.

Every rank knows the whole plan (orders, labels, pairs) and computes the whole loss: only the images are shared out. The
features of all ranks are gathered before the head, so that its bottleneck norm sees the same batch as on one rank; that
makes the result independent of the number of ranks but for rounding, which statistics of each rank's own share would
not. One rank alone is the plain case, and every function here then does nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cdtrans.errors import CdtransError, Interrupted
from cdtrans.runtime.signals import StopSignals


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """The rank that writes and speaks."""
    return rank() == 0


def from_main(value: Any) -> Any:
    """The main rank's value, on every rank: for a decision that rounding must not split."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def joined() -> Iterator[None]:
    """Join the other ranks, if a launcher started several, and part from them at the end."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if not several:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    except RuntimeError as error:
        if not _lost_a_peer(error):
            raise
        if StopSignals.received is not None:
            raise Interrupted(StopSignals.received) from error  # the main rank has saved and gone ahead
        raise CdtransError(
            f"Rank {rank()} lost touch with the other processes of this run; the last saved state is whole: give the "
            "same command again to go on, with as many processes as you like."
        ) from error
    finally:
        dist.destroy_process_group()


def _lost_a_peer(error: RuntimeError) -> bool:
    """gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def share(count: int) -> slice:
    """This rank's part of `count` things in order; the parts differ by one at most."""
    return slice(count * rank() // world(), count * (rank() + 1) // world())


def part(batch: slice) -> slice:
    """This rank's part of a batch."""
    mine = share(batch.stop - batch.start)
    return slice(batch.start + mine.start, batch.start + mine.stop)


def gather(x: Tensor) -> Tensor:
    """Every rank's rows in the order of the ranks, [n, ...] -> [sum of n, ...]; gradient flows to one's own rows."""
    return x if world() == 1 else _Gather.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def average_gradients(parameters: list[Tensor]) -> None:
    """The mean over the ranks, in one message. Every rank has computed the whole loss, of which its backbone saw only
    its own rows: `gather` has made up for that, so that the mean is the gradient of the whole batch."""
    if world() == 1:
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= world()
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        counts = torch.zeros(world(), dtype=torch.long, device=x.device)
        counts[rank()] = len(x)
        dist.all_reduce(counts)
        most = int(counts.max())
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])  # messages must be of one size
        parts = [torch.empty_like(padded) for _ in range(world())]
        dist.all_gather(parts, padded.contiguous())
        start = int(counts[: rank()].sum())
        ctx.mine = slice(start, start + len(x))
        return torch.cat([part[:n] for part, n in zip(parts, counts.tolist(), strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][ctx.mine] * world()  # world() times, because the gradients are averaged over the ranks
