"""The processors that this process may use."""

import os

from cdtrans.runtime.launcher import local_world


def processor_count() -> int:
    """Not all processors of the machine, if a container or `taskset` allows fewer and the system can tell."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_share() -> int:
    """The same, divided among the processes that a launcher has started on this machine."""
    return max(1, processor_count() // local_world())
