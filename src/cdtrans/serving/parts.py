"""Predictions part by part. A finished part is a file beside the output, so that a killed command resumes."""

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.errors import DataError, Interrupted, RunError, first_of
from cdtrans.inputs.stream import TarMember, cut, is_tar_name
from cdtrans.record.files import atomic, try_lock
from cdtrans.record.outcome import NO_CLASS
from cdtrans.serving.classifier import Prediction, Unreadable

PART = 8192  # images; a multiple of every batch size, so that the batches are the same wherever a command resumes


class PartInput(NamedTuple):
    """At most PART images, in order."""

    number: int
    images: list[Path | TarMember]
    states: dict[Path, str]  # sizes and times of their files or tars

    def digest(self) -> str:
        return _digest(repr((self.images, self.states)).encode()).decode()


def parts_of(images: Iterable[Path | TarMember]) -> Iterator[PartInput]:
    for number, part in enumerate(cut(images, PART)):
        files = dict.fromkeys(image.tar if isinstance(image, TarMember) else image for image in part)
        yield PartInput(number, part, {file: _state(file) for file in files})


@dataclass
class Counts:
    """Counts while images are predicted."""

    images: int = 0  # with a prediction
    kept: int = 0  # with a class as label
    no_class: int = 0  # labelled NO_CLASS
    right: float = 0.0  # expected number of correct labels: the sum of their probabilities
    skipped: int = 0  # files that cannot be read
    tars: int = 0  # entries among the skipped that stand for the rest of a damaged tar
    first_skipped: Sequence[str] = ()  # path and cause

    def add(self, prediction: Prediction) -> None:
        kept = prediction.label not in ("", NO_CLASS)
        self.images += 1
        self.kept += kept
        self.no_class += prediction.label == NO_CLASS
        self.right += prediction.probability if kept else 0.0

    def skip(self, file: Unreadable) -> None:
        self.skipped += 1
        self.tars += file.path is not None and is_tar_name(file.path.name)
        self.first_skipped = self.first_skipped or (str(file.path), file.cause)

    def __add__(self, other: "Counts") -> "Counts":
        numbers = ("images", "kept", "no_class", "right", "skipped", "tars")
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return Counts(**sums, first_skipped=self.first_skipped or other.first_skipped)


@dataclass(frozen=True)
class PartOutput:
    """The predictions of a part."""

    counts: Counts
    skipped: bytes  # CSV lines: path and cause of the files that cannot be read
    rows: bytes  # CSV lines of the table
    digest: str = ""  # identifies the images


class PartFolder:
    """The folder of finished parts beside an output file. `settings` and the images determine the content of a part."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder_of(output), settings
        self.count = 0  # parts of the output so far

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the folder, and refuse it if its parts have other settings, so that no finished work is lost. Gives the
        number of images in finished parts. In the end the folder is removed if no part is in it."""
        file = self.folder / ".lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (lock := try_lock(file)) is None:
                raise RunError("parts-locked", f"Another process writes to '{self.folder}'; wait until it ends.")
            with lock:
                try:
                    parts = filter(None, map(self.read, self.files()))
                    yield sum(part.counts.images + part.counts.skipped for part in parts)
                finally:
                    if not self.files():
                        with suppress(OSError):  # Windows cannot delete an open file; there, its release does
                            file.unlink()  # before another process can take it
        except KeyboardInterrupt as error:
            if self.files():
                raise Interrupted(signal.SIGINT) from error
            raise
        finally:
            with suppress(OSError):  # parts, or files that are not ours, are in it
                if (
                    file.exists() and not self.files() and (lock := try_lock(file))
                ):  # Ctrl-C came just after it was made
                    with lock:
                        file.unlink()
                self.folder.rmdir()

    def files(self) -> list[Path]:
        """The parts in the folder; files of other names are not ours."""
        return [file for file in self.folder.glob("*.part") if file.stem.isdecimal()]

    def missing(self, parts: Iterable[PartInput]) -> Iterator[PartInput]:
        """The parts without a finished one of the same images."""
        for part in parts:
            self.count += 1
            finished = self.read(self._file(part.number))
            if finished is None or finished.digest != part.digest():
                yield part

    def read(self, file: Path) -> PartOutput | None:
        """A finished part; None if it is missing or damaged, and so must be predicted again."""
        try:
            checksum, stored = file.read_bytes().split(b"\n", 1)
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
        return PartOutput(Counts(**values["counts"]), content[:end], content[end:], values["digest"])

    def store(self, part: PartInput, output: PartOutput) -> None:
        for tar in {image.tar for image in part.images if isinstance(image, TarMember)}:
            if _state(tar) != part.states[tar]:
                raise DataError("images-changed", f"'{tar}' has changed since this began; run the command again.")
        head = {"settings": self.settings, "counts": asdict(output.counts), "skipped": len(output.skipped)}
        content = json.dumps(head | {"digest": part.digest()}).encode() + b"\n" + output.skipped + output.rows
        with atomic(self._file(part.number)) as file:
            file.writelines([_digest(content), b"\n", content])

    def __iter__(self) -> Iterator[PartOutput]:
        """All parts of the output in order."""
        for file in map(self._file, range(self.count)):
            if (part := self.read(file)) is None:
                raise RunError("part-damaged", f"A part in '{self.folder}' is damaged; run the same command again.")
            yield part

    def remove(self) -> None:
        """Delete the parts."""
        for file in self.files():
            file.unlink()
            file.with_name(f".{file.name}.draft").unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05}.part"


def folder_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _state(file: Path) -> str:
    """A file's size and time, which change with its content."""
    try:
        status = os.stat(file)
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()
