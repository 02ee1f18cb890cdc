"""Predictions part by part. A finished part is a file in a folder beside the output, so that a killed command resumes
and several processes share the work; they only tell rank 0 when they are done."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from cdtrans.errors import DataError, RunError, first_of
from cdtrans.inputs.scan import find_tars, stream_names
from cdtrans.inputs.stream import TarMember, is_tar_name, members
from cdtrans.record.files import Lock, atomic, try_lock
from cdtrans.runtime.ranks import launched_rank, launched_world
from cdtrans.serving.classifier import Prediction, Unreadable

PART = 8192  # images; a multiple of every batch size, so that the batches are the same wherever a process starts
LOCK = ".lock"
NAME = re.compile(r"(\d{5,})-(\d{5,})\.part")


@dataclass(frozen=True)
class Shard:
    """A tar, or a whole folder or list."""

    where: Path
    root: Path | None = None
    is_tar: bool = False

    def images(self) -> Iterator[Path | TarMember]:
        return members(self.where) if self.is_tar else map(Path, stream_names(self.where, self.root))

    def digest(self, number: int, last: bool, images: Sequence[Path | TarMember]) -> str:
        """Identifies a part: by the names, sizes and times of its images, or of its tar, so that a finished tar need
        not be read again."""
        parts: list[object] = [self.where, _state(self.where), PART, number]
        if not self.is_tar:
            parts = [number, last, *(f"{image}\0{_state(image)}" for image in images)]
        return _digest("\0\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).decode()


@dataclass(frozen=True)
class Part:
    """At most PART images of one shard, in order."""

    place: int  # index of the shard
    number: int  # index of the part in its shard
    images: list[Path | TarMember]
    last: bool  # no other part of its shard follows
    digest: str


def find_shards(where: Path, root: Path | None) -> list[Shard]:
    return [Shard(tar, is_tar=True) for tar in find_tars(where, root)] or [Shard(where, root)]


def parts_of(shard: Shard, place: int = 0) -> Iterator[Part]:
    """A shard cut into parts. Without images it has one empty part."""
    images = iter(shard.images())
    part, number = list(islice(images, PART)), 0
    while part or number == 0:
        following = list(islice(images, PART if len(part) == PART else 0))
        yield Part(place, number, part, not following, shard.digest(number, not following, part))
        part, number = following, number + 1


@dataclass
class Counts:
    """Counts while images are predicted."""

    images: int = 0  # with a prediction
    kept: int = 0  # with a label
    right: float = 0.0  # expected number of correct labels: the sum of their probabilities
    skipped: int = 0  # files that cannot be read
    tars: int = 0  # entries among the skipped that stand for the rest of a damaged tar
    first_skipped: Sequence[str] = ()  # path and cause

    def add(self, prediction: Prediction, *, kept: bool) -> None:
        self.images += 1
        self.kept += kept
        self.right += prediction.probability if kept else 0.0

    def skip(self, file: Unreadable) -> None:
        self.skipped += 1
        self.tars += file.path is not None and is_tar_name(file.path.name)
        self.first_skipped = self.first_skipped or (str(file.path), file.cause)

    def __add__(self, other: "Counts") -> "Counts":
        numbers = ("images", "kept", "right", "skipped", "tars")
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return Counts(**sums, first_skipped=self.first_skipped or other.first_skipped)


@dataclass(frozen=True)
class PartOutput:
    """The predictions of a part."""

    counts: Counts
    skipped: bytes = b""  # CSV lines: path and cause of the files that cannot be read
    rows: bytes = b""  # lines or row group of the table
    digest: str = ""  # identifies the images
    last: bool = True


class PartFolder:
    """The folder of finished parts beside an output file. `settings` and the images determine the content of a part."""

    def __init__(self, output: Path, settings: dict[str, Any], shards: Sequence[Shard]) -> None:
        self.folder, self.settings, self.shards = folder_of(output), settings, shards
        self.lock: Lock | None = None
        self.done = 0  # images of this process that an earlier call has predicted or skipped

    def __enter__(self) -> "PartFolder":
        """Lock the folder, and refuse it if its parts have other settings, so that no finished work is lost."""
        try:
            if launched_rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.lock = try_lock(self.folder / LOCK)
                if self.lock is None:
                    raise RunError("parts-locked", f"Another process writes to '{self.folder}'; wait until it ends.")
            parts = (self.read(*name) for name in self.names() if self.owns(*name))
            self.done = sum(part.counts.images + part.counts.skipped for part in parts if part)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Rank 0 removes the folder if no part is in it."""
        with suppress(OSError):  # another process is at work there, or an interruption came before the lock
            if self.lock is not None:
                with self.lock:
                    empty, file = not self.names(), self.folder / LOCK
                    if empty and os.name != "nt":  # Windows cannot delete an open file
                        file.unlink(missing_ok=True)  # before another process can take it
                if empty and os.name == "nt":
                    file.unlink(missing_ok=True)
            if launched_rank() == 0:
                self.folder.rmdir()

    def remove(self) -> None:
        """Delete the parts."""
        for place, number in self.names():
            file = self._file(place, number)
            file.unlink(missing_ok=True)
            file.with_name(f".{file.name}.draft").unlink(missing_ok=True)

    def names(self) -> list[tuple[int, int]]:
        """Place and number of every part in the folder; files of other names are not ours."""
        files = self.folder.iterdir() if self.folder.is_dir() else iter(())
        return sorted((int(name[1]), int(name[2])) for file in files if (name := NAME.fullmatch(file.name)))

    def read(self, place: int, number: int) -> PartOutput | None:
        """A finished part; None if it is missing or damaged, and so must be predicted again."""
        try:
            checksum, stored = self._file(place, number).read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            return None
        if checksum != _digest(stored):
            return None
        head, content = stored.split(b"\n", 1)
        values = json.loads(head)
        before, end = values["settings"], values["skipped"]
        if changed := [f"{k}: {before.get(k)} there, {v} now" for k, v in self.settings.items() if before.get(k) != v]:
            advice = "run that one again to resume it, remove the folder, or write to another file"
            what = f"the finished parts of another command ({first_of(changed)})"
            raise RunError("parts-of-another-command", f"'{self.folder}' holds {what}; {advice}.")
        counts = Counts(**values["counts"])
        return PartOutput(counts, content[:end], content[end:], values["digest"], values["last"])

    def store(self, part: Part, output: PartOutput) -> None:
        shard = self.shards[part.place]
        if shard.is_tar and part.digest != shard.digest(part.number, part.last, part.images):
            raise DataError("images-changed", f"'{shard.where}' has changed since this began; run the command again.")
        head = {"settings": self.settings, "counts": asdict(output.counts), "skipped": len(output.skipped)}
        head |= {"digest": part.digest, "last": part.last}
        content = json.dumps(head).encode() + b"\n" + output.skipped + output.rows
        with atomic(self._file(part.place, part.number)) as file:
            file.writelines([_digest(content), b"\n", content])

    @property
    def by_shard(self) -> bool:
        """Whether processes take whole tars, so that none reads the headers of all, or else parts in turn."""
        return len(self.shards) >= launched_world()

    def owns(self, place: int, number: int) -> bool:
        """Whether this process predicts a part."""
        return (place if self.by_shard else number) % launched_world() == launched_rank()

    def todo(self) -> Iterator[Part]:
        """The parts that this process still has to predict."""
        for place, shard in enumerate(self.shards):
            if self.by_shard and not self.owns(place, 0):
                continue
            if shard.is_tar and all(
                part is not None and part.digest == shard.digest(number, part.last, ())
                for number, part in enumerate(self.chain(place))
            ):
                continue
            for part in parts_of(shard, place):
                before = self.read(place, part.number)
                if not self.owns(place, part.number) or (before is not None and before.digest == part.digest):
                    continue
                if part.images:
                    yield part
                else:
                    self.store(part, PartOutput(Counts()))

    def chain(self, place: int) -> Iterator[PartOutput | None]:
        """The finished parts of a shard in order, and None for the first that is missing or damaged."""
        for number in count():
            part = self.read(place, number)
            yield part
            if part is None or part.last:
                return

    def __iter__(self) -> Iterator[PartOutput]:
        """All parts in order, when every process is done."""
        for part in chain.from_iterable(map(self.chain, range(len(self.shards)))):
            if part is None:
                raise RunError("part-damaged", f"A part in '{self.folder}' is damaged; run the same command again.")
            yield part

    def _file(self, place: int, number: int) -> Path:
        return self.folder / f"{place:05}-{number:05}.part"


def folder_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _state(file: Path | TarMember) -> str:
    """A file's size and time, which change with its content."""
    try:
        status = os.stat(file.tar if isinstance(file, TarMember) else file)
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()
