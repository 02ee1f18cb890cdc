"""Lists of images, one 'path' or 'path label' per line."""

import os
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from cdtrans.errors import CdtransError
from cdtrans.inputs.folders import cannot_read, quoted
from cdtrans.inputs.images import is_image_name


def labelled_lines(where: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, path, label) of each line of a list."""
    for number, line in list_lines(where):
        path, label = _split_label(line)
        if not label or is_image_name(label):
            between = (
                ", with a space or a tab, not a comma or semicolon, between them"
                if any(mark in line for mark in ",;")
                else ""
            )
            raise CdtransError(f"Line {number} of {quoted(where)} has no label: write it as 'path label'{between}.")
        yield number, path, label


def _split_label(line: str) -> tuple[str, str]:
    """'path label' -> (path, label), see `scan_labelled`; the label is empty if there is none."""
    cut = max(line.rfind(" "), line.rfind("\t"))
    if cut < 0:
        return line, ""
    tabs = (i for i, character in enumerate(line) if character == "\t" and is_image_name(line[:i].rstrip(" \t")))
    cut = next(tabs, cut)
    path = line[:cut].rstrip(" \t")
    return (path, line[cut + 1 :].lstrip(" ")) if path else (line, "")


def readings(line: str) -> tuple[str, ...]:
    """The possible paths of a line with or without a label, the more likely first."""
    path, label = _split_label(line)
    if not label:
        return (line,)
    return (line, path) if is_image_name(line) else (path, line)


def list_lines(where: Path) -> Iterator[tuple[int, str]]:
    """The non-empty lines of a list with their numbers. Undecodable bytes are kept, as in file names."""
    empty = True
    try:
        with where.open("rb") as file:
            for number, raw in enumerate(_raw_lines(file), 1):
                if b"\0" in raw or (number == 1 and b"\0" in file.peek()):  # an image's first line may look like text
                    raise CdtransError(f"{quoted(where)} is not a text file: give a folder, or a list of images.")
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape").rstrip(" \t\r\n")
                if line and not line.startswith("#"):
                    empty = False
                    yield number, line
    except OSError as error:
        raise cannot_read(where, error) from error
    if empty:
        raise CdtransError(f"The list {quoted(where)} is empty: write one line per image.")


def _raw_lines(file: BufferedReader) -> Iterator[bytes]:
    """Split at line feeds only, because file names may contain other line ends; or at carriage returns, as old Macs
    write lines, if there is no line feed but at the end."""
    first = next(file, b"")
    yield from [first] if file.peek() else first.split(b"\r")
    yield from file


def list_base(where: Path, root: Path | None) -> Path:
    base = where.parent if root is None else root
    if not os.path.isdir(base):
        raise CdtransError(f"The root {quoted(base)} is not a folder: set --root to the folder of the listed paths.")
    return base


def existing(where: Path, base: Path, listed: Sequence[tuple]) -> tuple[str, ...]:
    """The first reading of each (line number, reading, ...) that is an existing file; an error if there is none."""
    paths, missing = [], []
    for number, *readings in listed:
        path = next((reading for reading in readings if os.path.isfile(os.path.join(base, reading))), None)
        if path is None:
            missing.append((number, readings[0]))
        else:
            paths.append(path)
    if missing:
        number, path = missing[0]
        raise CdtransError(
            f"{len(missing)} of the {len(listed)} files in {quoted(where)} cannot be found below {quoted(base)},"
            f" the first is {path!r} in line {number}: {_correct(path)}."
        )
    return tuple(paths)


def not_found(where: Path, base: Path, number: int, path: str) -> CdtransError:
    """The error for a line of a list that is read line by line."""
    return CdtransError(
        f"{path!r} in line {number} of {quoted(where)} cannot be found below {quoted(base)}: {_correct(path)}."
    )


def _correct(path: str) -> str:
    """What to do if a listed path does not exist."""
    ends = (i for i, character in enumerate(path) if character == " ")
    tab = "put a tab before a label that has spaces, " if any(is_image_name(path[:end]) for end in ends) else ""
    return f"{tab}correct the list, or set --root to the folder of its paths"
