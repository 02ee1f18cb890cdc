"""Several processes that work as one, started by `torchrun` or another launcher: each takes a share of the images.

Every rank knows the whole plan (orders, labels, pairs) and computes the whole loss: only the images are shared out. The
features of all ranks are gathered before the head, so that its bottleneck norm sees the same batch as on one rank. So
the result does not depend on the number of ranks, except for rounding. With one rank every function here does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from cdtrans.errors import CdtransError, Interrupted, PeerLost, counted
from cdtrans.runtime import launcher
from cdtrans.runtime.device import pick_device
from cdtrans.runtime.signals import StopSignals


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the rank that writes and prints."""
    return rank() == 0


def from_main(value: Any) -> Any:
    """The main rank's value, on every rank: for a decision that rounding must not split."""
    if world() == 1:
        return value
    box = [value]
    with talking():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def take_gpu() -> None:
    """Let the ranks of this machine take its GPUs in turn, so that 'cuda' is another one for each of them."""
    if torch.cuda.is_available():
        torch.cuda.set_device(launcher.local_rank() % torch.cuda.device_count())


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the other ranks, if a launcher started several, and leave them at the end. They train on the device with
    this name, and each needs a GPU of its own, unlike those of `predict`."""
    several = launcher.world() > 1 and not dist.is_initialized()
    if not several:
        yield
        return
    take_gpu()
    mine = pick_device(device)
    if mine.type == "mps":
        raise CdtransError("Several processes cannot train on the device 'mps'; start one, or use --device cpu.")
    store, number, count = next(rendezvous("env://"))
    if mine.type == "cuda":
        require_own_gpu(store, number, count, mine, device)
    dist.init_process_group("nccl" if mine.type == "cuda" else "gloo", store=store, rank=number, world_size=count)
    try:
        yield
    except PeerLost as error:
        if StopSignals.received is not None:
            raise Interrupted(StopSignals.received) from error  # the main rank has saved and gone ahead
        raise CdtransError(
            f"Rank {rank()} lost contact with the other processes of this run. The last saved state is intact: run the "
            "same command again to resume, with any number of processes."
        ) from error
    finally:
        dist.destroy_process_group()


def require_own_gpu(store: Any, number: int, count: int, mine: torch.device, device: str) -> None:
    """Refuse ranks that share a GPU: NCCL would fail, but only in the middle of the run. GPUs are compared by their
    identity, because a launcher may show each process only its own."""
    store.set(f"gpu/{number}", str(torch.cuda.get_device_properties(mine).uuid))
    if len({store.get(f"gpu/{other}") for other in range(count)}) == count:
        return
    if device not in ("auto", "cuda"):
        raise CdtransError(
            f"--device {device} is one GPU for all {count} processes, and each needs its own; use --device cuda."
        )
    gpus = torch.cuda.device_count()
    raise CdtransError(
        f"{count} processes cannot train on {counted(gpus, 'GPU')}, because each needs its own; start one "
        "process per GPU, or use --device cpu."
    )


class Finish:
    """Lets rank 0 wait until the work of all ranks is done, however long it takes. Needs no process group."""

    def __init__(self) -> None:
        self.store = next(rendezvous("env://"))[0]

    def arrive(self) -> None:
        self.store.add("done", 1)

    def reached(self) -> bool:
        return int(self.store.add("done", 0)) >= launcher.world()


@contextmanager
def talking() -> Iterator[None]:
    """Around a collective operation: if it fails, another rank has ended. gloo raises a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost from error


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        with talking():
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


def random_rows(x: Tensor, count: int) -> Tensor:
    """`count` random numbers from 0 to 1 for each row of x. Every rank draws for the rows of all ranks and takes its
    own, so that ranks with equal shares draw what one rank would: [len(x), count]."""
    drawn = torch.rand(world() * len(x), count, device=x.device)
    return drawn.chunk(world())[rank()]


def average_gradients(parameters: list[Tensor]) -> None:
    """The mean over the ranks, in one message, of the parameters that have a gradient: the same ones on every rank.
    Every rank has computed the whole loss, of which its backbone saw only its own rows: `gather` has made up for that,
    so that the mean is the gradient of the whole batch."""
    trained = [p for p in parameters if p.grad is not None]
    if world() == 1 or not trained:
        return
    flat = torch.cat([p.grad.flatten() for p in trained])  # type: ignore[union-attr]
    with talking():
        dist.all_reduce(flat)
    flat /= world()
    for p, g in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = g.view_as(p)


def share_buffers(module: nn.Module) -> None:
    """Give every rank the main rank's running statistics: they may differ where ranks drew different dropout masks."""
    if world() > 1:
        with talking():
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        counts = torch.zeros(world(), dtype=torch.long, device=x.device)
        counts[rank()] = len(x)
        with talking():
            dist.all_reduce(counts)
        most = int(counts.max())
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])  # messages must be of one size
        parts = [torch.empty_like(padded) for _ in range(world())]
        with talking():
            dist.all_gather(parts, padded.contiguous())
        start = int(counts[: rank()].sum())
        ctx.mine = slice(start, start + len(x))
        return torch.cat([part[:n] for part, n in zip(parts, counts.tolist(), strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][ctx.mine] * world()  # world() times, because the gradients are averaged over the ranks
