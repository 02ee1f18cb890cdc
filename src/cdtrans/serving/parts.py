"""Predictions for millions of images, part by part. A finished part is a file in a folder beside the output, so that a
killed command resumes, and several processes share the work; they only tell rank 0 when they are done."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from cdtrans.errors import CdtransError, first_of
from cdtrans.inputs.shards import Chunk, Shard, Tar, chunks
from cdtrans.inputs.stream import cut
from cdtrans.inputs.tars import is_tar_name
from cdtrans.record.files import atomic
from cdtrans.runtime.locks import Lock, try_lock
from cdtrans.runtime.ranks import launched_rank, launched_world
from cdtrans.serving.classifier import Classifier, Prediction, Unreadable

LOCK = ".lock"
DELETES_OPEN_FILES = os.name != "nt"  # Windows refuses to

Results = Iterator[Prediction | Unreadable]


@dataclass
class Counts:
    """Counts while images are predicted."""

    threshold: float  # labels of a lower probability are left empty
    images: int = 0  # with a prediction
    abstained: int = 0
    skipped: int = 0
    right: float = 0.0  # expected number of correct labels: the sum of the probabilities of the kept labels
    first_skipped: Sequence[str] = ()  # path and cause of the first skipped file
    tars: int = 0  # damaged: of the skipped ones, those that are no image but the rest of a tar

    def add(self, prediction: Prediction) -> bool:
        """Count a prediction, and return whether its label is kept."""
        kept = prediction.probability >= self.threshold
        self.images += 1
        self.abstained += not kept
        self.right += prediction.probability if kept else 0.0
        return kept

    def skip(self, file: Unreadable) -> None:
        self.skipped += 1
        self.tars += file.path is not None and is_tar_name(file.path.name)
        self.first_skipped = self.first_skipped or (str(file.path), file.cause)

    def of_all(self, parts: Iterable["Counts"]) -> "Counts":
        """Add the counts of all parts to these."""
        for part in parts:
            self.images += part.images
            self.abstained += part.abstained
            self.skipped += part.skipped
            self.right += part.right
            self.tars += part.tars
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
    """A part in a file. Only its first line is in memory; `load` reads the rest."""

    file: Path
    settings: dict[str, Any]
    digest: str  # of the images
    last: bool  # whether it is the last part of its shard
    counts: Counts
    lengths: tuple[int, int]  # bytes of `skipped` and `rows`

    def load(self) -> Part:
        with open(self.file, "rb") as file:
            file.readline()
            return Part(self.counts, file.read(self.lengths[0]), file.read(self.lengths[1]))


class PartFolder:
    """The folder of parts beside an output file. `settings` and the images determine the content of a part."""

    def __init__(self, output: Path, settings: dict[str, Any], shards: Sequence[Shard]) -> None:
        self.folder, self.settings, self.shards = folder_of(output), settings, shards
        self.digests: dict[tuple[int, int], str] = {}  # by (shard, chunk), of the chunks seen so far; not of tars
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
        """Lock the folder, and refuse it if its parts have other settings, so that no finished work is lost."""
        if launched_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = try_lock(self.folder / LOCK)
            if self.lock is None:
                raise CdtransError(f"Another process is writing to '{self.folder}'; wait until it ends.")
        for there in (part.settings for part in self.stored()):
            changed = [f"{k}: {there.get(k)} there, {v} now" for k, v in self.settings.items() if there.get(k) != v]
            if changed:
                raise CdtransError(
                    f"'{self.folder}' holds the finished parts of another command ({first_of(changed)}); run that one "
                    "again to resume it, remove the folder, or write to another file."
                )

    def _close(self) -> None:
        """Rank 0 removes the folder, unless there is a part in it or another process is at work there."""
        if self.lock is None and launched_rank() == 0 and self.folder.is_dir():
            self.lock = try_lock(self.folder / LOCK)  # an interruption can come just before it is known to be taken
        if self.lock is None:
            return
        empty, file = not any(self.stored()), self.folder / LOCK
        if empty and DELETES_OPEN_FILES:
            file.unlink(missing_ok=True)  # before another process can take it
        self.lock.close()
        if empty:
            with suppress(OSError):
                if not DELETES_OPEN_FILES:
                    file.unlink(missing_ok=True)
                self.folder.rmdir()

    def remove(self) -> None:
        """Delete the parts."""
        for file in (*self.folder.glob("*.part"), *self.folder.glob(".*.part.draft")):
            file.unlink(missing_ok=True)

    def stored(self) -> Iterator[StoredPart]:
        """Every finished part in the folder."""
        return filter(None, map(_read_head, sorted(self.folder.glob("*.part"))))

    @property
    def by_shard(self) -> bool:
        """Whether each process takes whole tars, so that it need not read the headers of all tars. Otherwise processes
        take chunks."""
        return len(self.shards) >= launched_world()

    def owned(self, place: int, number: int) -> bool:
        """Whether this process has to predict a chunk."""
        return (place if self.by_shard else number) % launched_world() == launched_rank()

    def done(self) -> int:
        """How many of this process's images an earlier call has already predicted or skipped."""
        mine = (part.counts for part in self.stored() if self.owned(*_numbers(part.file)))
        return sum(counts.images + counts.skipped for counts in mine)

    def todo(self) -> Iterator[Chunk]:
        """The chunks that this process still has to predict."""
        for place in range(len(self.shards)):
            if (self.by_shard and not self.owned(place, 0)) or all(self.parts_of(place)):
                continue
            for chunk in chunks(self.shards, place):
                mine = self.owned(place, chunk.number)
                if mine or launched_rank() == 0:  # rank 0 later waits for all parts
                    self.digests[place, chunk.number] = chunk.digest
                if mine and self.find(place, chunk.number) is None:
                    yield chunk

    def find(self, place: int, number: int) -> StoredPart | None:
        """The part of a chunk; None if there is none, or if the images have changed since."""
        shard = self.shards[place]
        digest = shard.digest(number) if isinstance(shard, Tar) else self.digests.get((place, number))
        part = _read_head(self._file(place, number))
        return part if part is not None and part.digest == digest else None

    def parts_of(self, place: int) -> Iterator[StoredPart | None]:
        """The parts of a shard in order, and None for the first that is missing or of other images."""
        for number in count():
            part = self.find(place, number)
            yield part
            if part is None or part.last:
                return

    def collect(self) -> list[StoredPart]:
        """All parts in order, when every process is done."""
        parts = []
        for part in chain.from_iterable(self.parts_of(place) for place in range(len(self.shards))):
            if part is None:
                raise CdtransError("Images have changed while they were predicted; run the same command again.")
            parts.append(part)
        return parts

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
    """Predict and store the missing parts of this process, and return their counts. All parts form one stream, so that
    a GPU does not wait between them. No batch holds images of two parts, so that a part does not depend on what was
    predicted before it."""
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
    """None if there is no such part or it is damaged; it is then predicted again."""
    try:
        with open(file, "rb") as content:
            line = content.readline()
            head = json.loads(line)
            head |= {"counts": Counts(**head["counts"]), "lengths": tuple(head["lengths"])}
            part = StoredPart(file, **head)
            return part if content.seek(0, 2) == len(line) + sum(part.lengths) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
