"""Several processes that work as one, started by `torchrun` or another launcher: each takes a share of the images.

Every rank knows the whole plan (orders, labels, pairs) and computes the whole loss: only the images are shared out. The
features of all ranks are gathered before the head, so that its bottleneck norm sees the same batch as on one rank. So
the result does not depend on the number of ranks, except for rounding. With one rank every function here does nothing.

torch is imported only where it is needed: `launched_rank` and `launched_world` are asked before it is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cdtrans.errors import DeviceError, Interrupted, PeerLost, RunError, SettingsError, counted
from cdtrans.runtime.signals import StopSignals

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_group = (0, 1)  # this rank and the number of ranks, while they are joined


def launched_rank() -> int:
    """The number of this process among those that a launcher has started. Process 0 prints, and writes what there is
    only one of."""
    return int(os.environ.get("RANK") or 0) if launched_world() > 1 else 0


def launched_world() -> int:
    """How many processes a launcher has started on all machines."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def processor_count() -> int:
    """Not all processors of the machine, if a container or `taskset` allows fewer and the system can tell."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank() -> int:
    return _group[0]


def world() -> int:
    """How many ranks train together."""
    return _group[1]


def is_main() -> bool:
    """Whether this is the rank that writes and prints."""
    return rank() == 0


def from_main(value: Any) -> Any:
    """The main rank's value, on every rank: for a decision that rounding must not split."""
    if world() == 1:
        return value
    box = [value]
    with talking() as dist:
        dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the other ranks, if a launcher started several, and leave them at the end. They train on the device with
    this name, and each needs a GPU of its own."""
    global _group
    if launched_world() == 1 or world() > 1:
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from cdtrans.runtime.device import pick_device

    if torch.cuda.is_available():  # the ranks of a machine take its GPUs in turn: 'cuda' is another one for each
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())
    mine = pick_device(device)
    if mine.type == "mps":
        raise DeviceError(
            "ranks-on-mps", "Several processes cannot train on the device 'mps'; start one, or use --device cpu."
        )
    store, number, count = next(rendezvous("env://"))
    if mine.type == "cuda":
        require_own_gpu(store, number, count, mine, device)
    dist.init_process_group("nccl" if mine.type == "cuda" else "gloo", store=store, rank=number, world_size=count)
    _group = number, count
    try:
        yield
    except PeerLost as error:
        if StopSignals.received is not None:
            raise Interrupted(StopSignals.received) from error  # the main rank has saved and gone ahead
        raise RunError(
            "rank-lost",
            f"Rank {rank()} lost contact with the other processes of this run. The last saved state is intact: run the "
            "same command again to resume, with any number of processes.",
        ) from error
    finally:
        _group = 0, 1
        dist.destroy_process_group()


def require_own_gpu(store: Any, number: int, count: int, mine: "torch.device", device: str) -> None:
    """Refuse ranks that share a GPU: NCCL would fail, but only in the middle of the run. GPUs are compared by their
    identity, because a launcher may show each process only its own."""
    import torch

    store.set(f"gpu/{number}", str(torch.cuda.get_device_properties(mine).uuid))
    if len({store.get(f"gpu/{other}") for other in range(count)}) == count:
        return
    if device not in ("auto", "cuda"):
        raise SettingsError(
            "one-gpu-for-ranks",
            f"--device {device} is one GPU for all {count} processes, and each needs its own; use --device cuda.",
        )
    raise DeviceError(
        "too-few-gpus",
        f"{count} processes cannot train on {counted(torch.cuda.device_count(), 'GPU')}, because each needs its own; "
        "start one process per GPU, or use --device cpu.",
    )


@contextmanager
def talking() -> Iterator[Any]:
    """torch.distributed for collective operations. If one fails, another rank has ended; gloo raises a RuntimeError."""
    import torch.distributed

    try:
        yield torch.distributed
    except RuntimeError as error:
        raise PeerLost from error


def barrier() -> None:
    """Wait until every rank is here."""
    if world() > 1:
        with talking() as dist:
            dist.barrier()


def share(count: int) -> slice:
    """This rank's part of `count` things in order; the parts differ by one at most."""
    return slice(count * rank() // world(), count * (rank() + 1) // world())


def part(batch: slice) -> slice:
    """This rank's part of a batch."""
    mine = share(batch.stop - batch.start)
    return slice(batch.start + mine.start, batch.start + mine.stop)


def gather(x: "Tensor") -> "Tensor":
    """Every rank's rows in the order of the ranks, [n, ...] -> [sum of n, ...]. Gradient flows to one's own rows, times
    the number of ranks, because the gradients are averaged over them."""
    if world() == 1:
        return x
    import torch

    with torch.no_grad(), talking() as dist:
        counts = torch.zeros(world(), dtype=torch.long, device=x.device)
        counts[rank()] = len(x)
        dist.all_reduce(counts)
        most = int(counts.max())
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])  # messages must be of one size
        parts = [torch.empty_like(padded) for _ in range(world())]
        dist.all_gather(parts, padded.contiguous())
    rows = [some[:n] for some, n in zip(parts, counts.tolist(), strict=True)]
    rows[rank()] = own = x.view_as(x)
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient * world())
    return torch.cat(rows)


def random_rows(x: "Tensor", count: int) -> "Tensor":
    """`count` random numbers from 0 to 1 for each row of x. Every rank draws for the rows of all ranks and takes its
    own, so that ranks with equal shares draw what one rank would: [len(x), count]."""
    import torch

    drawn = torch.rand(world() * len(x), count, device=x.device)
    return drawn.chunk(world())[rank()]


def average_gradients(parameters: "list[Tensor]") -> None:
    """The mean over the ranks, in one message, of the parameters that have a gradient: the same ones on every rank.
    Every rank has computed the whole loss, of which its backbone saw only its own rows: `gather` has made up for that,
    so that the mean is the gradient of the whole batch."""
    trained = [p for p in parameters if p.grad is not None] if world() > 1 else []
    if not trained:
        return
    import torch

    flat = torch.cat([p.grad.flatten() for p in trained])  # type: ignore[union-attr]
    with talking() as dist:
        dist.all_reduce(flat)
    flat /= world()
    for p, g in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = g.view_as(p)


def share_buffers(module: "nn.Module") -> None:
    """Give every rank the main rank's running statistics: they may differ where ranks drew different dropout masks."""
    if world() > 1:
        with talking() as dist:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)
