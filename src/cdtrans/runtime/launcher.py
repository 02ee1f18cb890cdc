"""What a launcher such as `torchrun` tells every process that it starts. Needs no torch."""

import os


def rank() -> int:
    """The number of this process. Rank 0 prints, and writes what there is only one of."""
    return _number("RANK", 0) if world() > 1 else 0


def world() -> int:
    """How many processes there are on all machines."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """The number of this process on its machine."""
    return _number("LOCAL_RANK", 0)


def local_world() -> int:
    """How many processes there are on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)
