"""The processors that this process may use."""

import os


def processor_count() -> int:
    """Not all processors of the machine, if a container or `taskset` allows fewer and the system can tell."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
