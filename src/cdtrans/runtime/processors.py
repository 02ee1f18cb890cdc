"""The processors that this process may use."""

import os


def processor_count() -> int:
    """Not those of the machine, where a container or `taskset` gives fewer and the system can tell."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
