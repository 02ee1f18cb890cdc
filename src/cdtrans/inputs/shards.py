"""Many images cut into chunks. Any process can work on a chunk, and a later one can recognise it.

A shard is a tar, or a whole folder or list. Every process finds the same chunks in the same order."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from cdtrans.inputs.domains import find_tars, stream_files
from cdtrans.inputs.tars import TarMember, members

CHUNK = 8192  # images; a multiple of every batch size, so that the batches are the same wherever a process starts


@dataclass(frozen=True)
class Files:
    """A folder, a list or an image file. A chunk is identified by the names, sizes and times of its images."""

    where: Path
    root: Path | None

    def images(self) -> Iterator[Path]:
        return stream_files(self.where, self.root)


@dataclass(frozen=True)
class Tar:
    """A tar. A chunk is identified by the tar's name, size and time, so that a finished tar need not be read again."""

    tar: Path

    def images(self) -> Iterator[TarMember]:
        return members(self.tar)

    def digest(self, number: int) -> str:
        return _digest(self.tar, _state(self.tar), CHUNK, number)


Shard = Files | Tar


@dataclass(frozen=True)
class Chunk:
    shard: Shard
    place: int  # index of the shard among all shards
    number: int  # index of the chunk in the shard
    images: list[Path | TarMember]
    last: bool  # whether it is the last chunk of its shard

    @cached_property
    def digest(self) -> str:
        """Identifies the images: it differs if one of them has changed."""
        if isinstance(self.shard, Tar):
            return self.shard.digest(self.number)
        return _digest(self.number, self.last, *(f"{path}\0{_state(path)}" for path in self.images))


def find_shards(where: Path, root: Path | None) -> list[Shard]:
    return [Tar(tar) for tar in find_tars(where, root)] or [Files(where, root)]


def chunks(shards: Sequence[Shard], place: int) -> Iterator[Chunk]:
    """The chunks of the shard at this place. A shard without images has one empty chunk."""
    shard, number = shards[place], 0
    images: Iterator[Path | TarMember] = iter(shard.images())
    following = list(islice(images, 1))
    while following or number == 0:
        chunk = [*following, *islice(images, CHUNK - len(following))]
        following = list(islice(images, 1))
        yield Chunk(shard, place, number, chunk, not following)
        number += 1


def share(total: int, processes: int) -> int:
    """How many images rank 0 gets if the processes take chunks in turn."""
    return sum(min(CHUNK, total - start) for start in range(0, total, CHUNK * processes))


def _state(file: Path | TarMember) -> str:
    """A file's size and time, which change with its content."""
    try:
        status = os.stat(file.tar if isinstance(file, TarMember) else file)
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def _digest(*parts: object) -> str:
    text = "\0\0".join(map(str, parts))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
