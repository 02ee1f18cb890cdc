"""Decode images while torch and timm are imported, which takes seconds and one core."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cdtrans.config import Config
from cdtrans.inputs.domains import LabelledDomain, UnlabelledDomain
from cdtrans.inputs.pixels import default_cache, open_pixels, resize_for
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import die_with_parent

NAMED_CROP = 224  # the crop that a timm model name ending in _224 stands for


@contextmanager
def decoding_ahead(config: Config, *domains: LabelledDomain | UnlabelledDomain) -> Iterator[None]:
    """Fill the stores of these domains in a child process while the body of the `with` imports slow modules. The child
    is killed at the end of the body: a store can be interrupted at any moment, and the run decodes what is missing.

    A process and not threads, because imports hold the GIL. It is forked, which is safe only with a single thread;
    once torch is imported there is nothing left to wait for."""
    size = size_ahead(config)
    can_fork = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    if size is None or config.pixels == "stream" or not can_fork or not domains:
        yield
        return
    child = os.fork()
    if child == 0:
        try:
            _fill(config, size, domains)
        finally:
            os._exit(0)  # skip the parent's exit handlers and buffered output
    try:
        yield
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, the child is already reaped
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def size_ahead(config: Config) -> int | None:
    """The size that images will be resized to, or None if only timm knows: a backbone named `..._224` has that crop."""
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
    workers = max(1, processor_count() - 1)  # the imports need one core
    with suppress(Exception):  # the run meets the same error and reports it
        for domain in domains:
            open_pixels(
                domain.files(),
                root=domain.root,
                size=size,
                cache=cache,
                screen=Screen(quiet=True),
                name="",
                workers=workers,
                verify=False,  # the run does
            )
