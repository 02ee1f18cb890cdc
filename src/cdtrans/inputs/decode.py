"""A scanned domain -> its readable images: one value for everything that needs them."""

import ctypes
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from cdtrans.config import Config, Resolved
from cdtrans.errors import DataError, DiskFull
from cdtrans.inputs.images import Traces, judge_unreadable, thumbnails
from cdtrans.inputs.pixels import CHUNK_IMAGES, cache_folder, fill_store, open_pixels, resize_for
from cdtrans.inputs.scan import LabelledDomain, UnlabelledDomain
from cdtrans.inputs.stream import StreamedPixels
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen

if TYPE_CHECKING:
    import torch

    from cdtrans.inputs.batches import Images
    from cdtrans.record.model import Card

NAMED_CROP = 224  # the crop of a timm model whose name ends in _224
SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG

_Domain = TypeVar("_Domain", LabelledDomain, UnlabelledDomain)


@dataclass(frozen=True)
class Decoded(Generic[_Domain]):
    """The readable images of a domain, in the domain's order."""

    domain: _Domain
    pixels: np.ndarray | StreamedPixels  # uint8 [rows, size, size, 3], in memory or decoded at every access
    rows: np.ndarray  # int64 [N], the row of each image
    digests: tuple[str, ...]  # [N], of the pixels
    skipped: dict[str, str] = field(default_factory=dict)  # path -> why the file could not be read

    def __len__(self) -> int:
        return len(self.rows)

    def keep(self, positions: Sequence[int]) -> "Decoded[_Domain]":
        """The images at these positions, in this order."""
        digests = tuple(self.digests[i] for i in positions)
        return replace(self, domain=self.domain.keep(positions), rows=self.rows[list(positions)], digests=digests)

    def traces(self) -> Traces:
        """The input of the checks."""
        pixels = self.pixels
        if isinstance(pixels, StreamedPixels):
            return Traces(self.domain.paths, self.digests, pixels.thumbnails[self.rows])
        chunks = np.split(self.rows, range(CHUNK_IMAGES, len(self), CHUNK_IMAGES))
        with ThreadPoolExecutor(processor_count()) as pool:
            parts = list(pool.map(lambda rows: thumbnails(pixels[rows]), chunks))
        return Traces(self.domain.paths, self.digests, np.concatenate(parts))

    def images(self, card: "Card", device: "torch.device") -> "Images":
        """The images as input of the model that the card describes."""
        from cdtrans.inputs.batches import Images

        return Images(self.pixels, self.rows, crop=card.crop, mean=card.mean, std=card.std, device=device)

    def pixel_digest(self) -> str:
        """A digest of all pixels: names and sizes do not show that a file of the same size has other pixels."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    def require_readable(self, name: str, max_bad: float, screen: Screen) -> None:
        """Refuse a domain without an image or with too many unreadable files; warn of a few."""
        if self.skipped:
            first, cause = next(iter(self.skipped.items()))
            total = len(self) + len(self.skipped)
            screen.warn(judge_unreadable(f"{name} ", len(self.skipped), total, first, cause, max_bad))
        if not len(self):
            advice = "repair or replace its files"
            raise DataError("no-readable-image", f"No readable image is left of the {name}; {advice}.")


def decode_domain(domain: _Domain, config: Resolved, screen: Screen, name: str) -> Decoded[_Domain]:
    """Every image that can be read, however few. The target is sorted by the digests of its pixels, so that file names
    and folders have no influence."""
    decoded, bad = decode_files(domain, config, screen, name)
    good: Iterable[int] = (i for i in range(len(domain)) if i not in bad)
    if isinstance(domain, UnlabelledDomain):
        good = sorted(good, key=lambda i: decoded.digests[i])
    return replace(decoded.keep(list(good)), skipped={domain.paths[i]: cause for i, cause in sorted(bad.items())})


def decode_files(
    domain: _Domain, config: Resolved, screen: Screen, name: str
) -> tuple[Decoded[_Domain], dict[int, str]]:
    """All files of a domain in its order, and position -> cause of the unreadable ones. The pixels are in the store of
    the domain's root, or are decoded at every access if they cannot be stored."""
    if config.pixels != "stream":
        files, cache = domain.files(), cache_folder(config.cache)
        try:
            stored = open_pixels(files, root=domain.root, size=config.resize, cache=cache, screen=screen, name=name)
            return Decoded(domain, stored.array, stored.rows, stored.digests), stored.bad
        except DiskFull:
            if config.pixels == "store":
                raise
            screen.say(f"The disk has no room for the decoded {name} images, so they are decoded every time (slower).")
    streamed = StreamedPixels(domain.files(), config.resize)
    digests, bad = streamed.look(screen, name)
    return Decoded(domain, streamed, np.arange(len(domain)), tuple(digests)), bad


@contextmanager
def decoding_ahead(config: Config, *domains: LabelledDomain | UnlabelledDomain) -> Iterator[None]:
    """Fill the stores of these domains in a child process while the body imports torch, which takes longer than
    decoding on a machine with many cores: 5 of the 30 seconds of a cold run (docs/results/speed.md). The child is
    killed at the end of the body: a store can be interrupted at any moment, and the run decodes the rest.

    A process and not threads, because imports hold the GIL. Forking is safe with a single thread only."""
    size = size_ahead(config)
    can_fork = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    if size is None or config.pixels == "stream" or not any(map(len, domains)) or not can_fork:
        yield
        return
    child = os.fork()
    if child == 0:
        with suppress(BaseException):  # the run meets the same error and reports it
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
            quiet, cache = Screen(quiet=True), cache_folder(config.cache)
            for domain in filter(len, domains):
                fill_store(domain.files(), root=domain.root, size=size, cache=cache, screen=quiet, name="")
        os._exit(0)  # without the parent's exit handlers and buffered output
    try:
        yield
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # reaped already where SIGCHLD is ignored
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def size_ahead(config: Config) -> int | None:
    """The size that images will be resized to, or None if only timm knows it."""
    if config.resize != "auto":
        return config.resize
    if config.crop != "auto":
        return resize_for(config.crop)
    return resize_for(NAMED_CROP) if config.backbone.split(".")[0].endswith(f"_{NAMED_CROP}") else None
