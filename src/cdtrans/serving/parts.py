"""Predictions for millions of images, part by part. A finished part is a file in a folder beside the output, so a
killed command resumes, and several processes share the work without talking to each other."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from cdtrans.data.shards import Chunk, Shard, Tar, chunks
from cdtrans.data.stream import cut
from cdtrans.errors import CdtransError, first_of
from cdtrans.runtime import launcher
from cdtrans.runtime.locks import Lock, try_lock
from cdtrans.runtime.screen import Task
from cdtrans.serving.classifier import Classifier, Prediction, Unreadable
from cdtrans.storage.files import atomic

LOCK = ".lock"
POLL_SECONDS = 0.2  # between looks for the parts of other processes

Results = Iterator[Prediction | Unreadable]


@dataclass
class Counts:
    """Counts while images are predicted."""

    threshold: float  # labels of a lower probability are left empty
    images: int = 0  # with a prediction
    abstained: int = 0
    skipped: int = 0
    right: float = 0.0  # labels that are expected to be right: the sum of the probabilities of those that were kept
    first_skipped: Sequence[str] = ()  # its path and the cause

    def add(self, prediction: Prediction) -> bool:
        """Whether its label is kept."""
        kept = prediction.probability >= self.threshold
        self.images += 1
        self.abstained += not kept
        self.right += prediction.probability if kept else 0.0
        return kept

    def skip(self, file: Unreadable) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or (str(file.path), file.cause)

    def of_all(self, parts: Iterable["Counts"]) -> "Counts":
        """The sum."""
        for part in parts:
            self.images += part.images
            self.abstained += part.abstained
            self.skipped += part.skipped
            self.right += part.right
            self.first_skipped = self.first_skipped or part.first_skipped
        return self


@dataclass(frozen=True)
class Part:
    """The predictions of a chunk of images."""

    counts: Counts
    skipped: bytes  # CSV lines: path and cause of the files that cannot be read
    rows: bytes  # of the table

    def load(self) -> "Part":
        return self


@dataclass(frozen=True)
class StoredPart:
    """What the first line of a part's file says; the rest is left on the disk."""

    file: Path
    settings: dict[str, Any]
    digest: str  # of the images
    last: bool  # of its shard
    counts: Counts
    lengths: tuple[int, int]  # bytes of `skipped` and `rows`

    def load(self) -> Part:
        with open(self.file, "rb") as file:
            file.readline()
            return Part(self.counts, file.read(self.lengths[0]), file.read(self.lengths[1]))


class PartFolder:
    """The parts beside an output file. `settings` are all that decides what a part holds, but for its images."""

    def __init__(self, output: Path, settings: dict[str, Any], shards: Sequence[Shard]) -> None:
        self.folder, self.settings, self.shards = folder_of(output), settings, shards
        self.digests: dict[tuple[int, int], str] = {}  # of the chunks of files seen so far
        self.lock: Lock | None = None

    def __enter__(self) -> "PartFolder":
        try:
            self._claim()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _claim(self) -> None:
        """Refuse parts of a command with other settings: finished work is not thrown away unasked."""
        if launcher.rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = try_lock(self.folder / LOCK)
            if self.lock is None:
                raise CdtransError(f"Another process is at work in '{self.folder}'; wait until it ends.")
        for there in (part.settings for part in self.stored()):
            changed = [f"{k}: {there.get(k)} there, {v} now" for k, v in self.settings.items() if there.get(k) != v]
            if changed:
                raise CdtransError(
                    f"'{self.folder}' holds the finished parts of another command ({first_of(changed)}); run that one "
                    "again to resume it, remove the folder, or write to another file."
                )

    def _close(self) -> None:
        """The folder stays if there is a part in it."""
        if self.lock is not None:
            self.lock.close()
            if not any(self.stored()):
                self.remove()
        elif launcher.rank() == 0:
            self._remove_if_empty()

    def remove(self) -> None:
        """Delete the parts, and the folder if nothing else is in it."""
        for file in (*self.folder.glob("*.part"), *self.folder.glob(".*.part.draft"), self.folder / LOCK):
            file.unlink(missing_ok=True)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()

    def stored(self) -> Iterator[StoredPart]:
        """Every part that is there."""
        return filter(None, map(_read_head, sorted(self.folder.glob("*.part"))))

    @property
    def by_shard(self) -> bool:
        """Whether processes take whole tars, so that none reads the headers of all; else they take chunks."""
        return len(self.shards) >= launcher.world()

    def owned(self, place: int, number: int) -> bool:
        """Whether a chunk is this process's work."""
        return (place if self.by_shard else number) % launcher.world() == launcher.rank()

    def done(self) -> int:
        """How many images of this process's parts an earlier process has done."""
        mine = (part.counts for part in self.stored() if self.owned(*_numbers(part.file)))
        return sum(counts.images + counts.skipped for counts in mine)

    def todo(self) -> Iterator[Chunk]:
        """This process's chunks without a part."""
        for place in range(len(self.shards)):
            if (self.by_shard and not self.owned(place, 0)) or all(self.parts_of(place)):
                continue
            for chunk in chunks(self.shards, place):
                mine = self.owned(place, chunk.number)
                if mine or launcher.rank() == 0:  # which waits for the parts of all
                    self.digests[place, chunk.number] = chunk.digest
                if mine and self.find(place, chunk.number) is None:
                    yield chunk

    def find(self, place: int, number: int) -> StoredPart | None:
        """The part of a chunk, if it is of the images as they are now."""
        shard = self.shards[place]
        digest = shard.digest(number) if isinstance(shard, Tar) else self.digests.get((place, number))
        part = _read_head(self._file(place, number))
        return part if part is not None and part.digest == digest else None

    def parts_of(self, place: int) -> Iterator[StoredPart | None]:
        """Of a shard, in order; None where one is missing, until it is there."""
        for number in count():
            while (part := self.find(place, number)) is None:
                yield None
            yield part
            if part.last:
                return

    def wait(self, task: Task) -> Iterator[StoredPart]:
        """All parts in order, those of other processes as soon as they are there."""
        for place in range(len(self.shards)):
            for part in self.parts_of(place):
                if part is not None:
                    task.advance(1)
                    yield part
                elif launcher.world() == 1:
                    raise CdtransError(f"A part has disappeared from '{self.folder}'; run the same command again.")
                else:
                    time.sleep(POLL_SECONDS)

    def store(self, chunk: Chunk, part: Part) -> None:
        head = {"settings": self.settings, "digest": chunk.digest, "last": chunk.last, "counts": asdict(part.counts)}
        head["lengths"] = [len(part.skipped), len(part.rows)]
        with atomic(self._file(chunk.place, chunk.number)) as file:
            file.writelines([json.dumps(head).encode() + b"\n", part.skipped, part.rows])

    def _file(self, place: int, number: int) -> Path:
        return self.folder / f"{place:05}-{number:05}.part"


def folder_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def predict_parts(
    classifier: Classifier, folder: PartFolder, top: int, make: Callable[[Results], Part]
) -> list[Counts]:
    """Do and store what is left of this process's work, and count it. It is one stream, so that a GPU does not wait
    between parts. No batch holds images of two parts, so that a part does not depend on what was done before it."""
    started: deque[Chunk] = deque()
    counts = []

    def batches() -> Iterator[list[Any]]:
        for chunk in folder.todo():
            if chunk.images:
                started.append(chunk)
                yield from cut(chunk.images, classifier.batch)
            else:
                folder.store(chunk, make(iter(())))

    results = classifier.stream_batches(batches(), top=top)
    for first in results:
        chunk = started.popleft()
        part = make(chain([first], islice(results, len(chunk.images) - 1)))
        folder.store(chunk, part)
        counts.append(part.counts)
    return counts


def _numbers(file: Path) -> tuple[int, int]:
    place, number = file.stem.split("-")
    return int(place), int(number)


def _read_head(file: Path) -> StoredPart | None:
    """None if there is no such part or it is damaged: it is then made again."""
    try:
        with open(file, "rb") as content:
            line = content.readline()
            head = json.loads(line)
            head |= {"counts": Counts(**head["counts"]), "lengths": tuple(head["lengths"])}
            part = StoredPart(file, **head)
            return part if content.seek(0, 2) == len(line) + sum(part.lengths) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
