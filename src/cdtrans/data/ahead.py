"""Decoding that begins while torch and timm are being imported, which takes seconds and one core."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cdtrans.config import Config
from cdtrans.data.domains import LabelledDomain, UnlabelledDomain
from cdtrans.data.pixels import default_cache, open_pixels, resize_for
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import die_with_parent

NAMED_CROP = 224


@contextmanager
def decoding_ahead(config: Config, *domains: LabelledDomain | UnlabelledDomain) -> Iterator[None]:
    """`with decoding_ahead(...)`: import what is slow; meanwhile a process of its own fills the stores of these domains
    as far as it gets. The store allows a kill at any moment, and the run itself finds what is missing or wrong.

    A process, because imports hold the interpreter's lock, which the threads that decode need too. Forked, which is
    safe as long as there is one thread; once torch is there, nothing is left to wait for."""
    size = size_ahead(config)
    alone = hasattr(os, "fork") and threading.active_count() == 1 and "torch" not in sys.modules
    if size is None or config.pixels == "stream" or not alone or not domains:
        yield
        return
    child = os.fork()
    if child == 0:
        try:
            _fill(config, size, domains)
        finally:
            os._exit(0)  # nothing of the parent's, such as its buffered output, is done twice
    try:
        yield
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, it may be gone for good
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def size_ahead(config: Config) -> int | None:
    """What images will be resized to, if that is sure without timm: a backbone called `..._224` has that crop."""
    if isinstance(config.resize, int):
        return config.resize
    if isinstance(config.crop, int):
        return resize_for(config.crop)
    return resize_for(NAMED_CROP) if config.backbone.split(".")[0].endswith(f"_{NAMED_CROP}") else None


def _fill(config: Config, size: int, domains: tuple[LabelledDomain | UnlabelledDomain, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    cache = Path(config.cache) if config.cache else default_cache()
    workers = max(1, len(os.sched_getaffinity(0)) - 1)  # one core is the imports'
    with suppress(Exception):  # the run will meet it too, and say it
        for domain in domains:
            open_pixels(
                domain.files(),
                root=domain.root,
                size=size,
                cache=cache,
                screen=Screen(quiet=True),
                name="",
                workers=workers,
            )
