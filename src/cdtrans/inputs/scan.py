"""Folders and lists of images -> the two domains of a run: a source with labels and a target without; or, for
`predict`, their images one by one.

UnlabelledDomain has no field for labels, nor has what it shares with LabelledDomain, so code that gets the target
cannot read target labels.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from cdtrans.errors import DataError, MissingFileError, SettingsError, counted, named
from cdtrans.inputs.images import ARCHIVE_LEFTOVERS, IMAGE_SUFFIXES, is_image_name
from cdtrans.inputs.stream import TarMember, is_tar_name, members

SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"}
_INTEGER = re.compile(r"-?[0-9]{1,18}")  # more digits are a name, such as a barcode
_Label = TypeVar("_Label", int, str)

# Files that often lie beside images and are clearly not images.
_TEXT_SUFFIXES = {
    *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".log", ".html", ".htm", ".xmp", ".aae", ".py", ".ipynb", ".sh", ".parquet", ".part"),
}
_PLAIN_NAMES = {
    "readme",
    "license",
    "licence",
    "copying",
    "notice",
    "changelog",
    "citation",
    "thumbs.db",
    "ehthumbs.db",
}


@dataclass(frozen=True)
class _Files:
    """The image files of a domain."""

    root: Path
    paths: tuple[str, ...]  # relative to root, with '/'

    def __len__(self) -> int:
        return len(self.paths)

    def files(self) -> list[Path]:
        return [self.root / path for path in self.paths]

    def _hash(self, labels: tuple[int, ...]) -> str:
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                size = os.stat(self.root / path).st_size
            except OSError:  # a broken link counts as an image that cannot be read
                size = -1
            digest.update(f"{path}\0{size}\0".encode("utf-8", "surrogateescape"))
        digest.update(np.asarray(labels, dtype=np.int64).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class LabelledDomain(_Files):
    """Images with a class each: the source, or labelled target images for evaluation."""

    labels: tuple[int, ...]  # an index into classes per path
    classes: tuple[str, ...]
    loose: int = 0  # images beside the class folders; they have no class and are not in paths
    empty: tuple[str, ...] = ()  # class folders without an image
    splits: tuple[str, ...] = ()  # class folders that look like train, val and test, the largest first
    ignored: tuple[str, ...] = ()  # files that may be images but have another suffix
    origin: tuple[int, ...] = ()  # per path, the index of the source that it comes from; all 0 unless given

    def __post_init__(self) -> None:
        object.__setattr__(self, "origin", self.origin or (0,) * len(self.paths))

    def keep(self, positions: Sequence[int]) -> "LabelledDomain":
        """Only the images at these positions. All classes stay, even those left without images."""
        paths = tuple(self.paths[i] for i in positions)
        labels, origin = (tuple(column[i] for i in positions) for column in (self.labels, self.origin))
        return replace(self, paths=paths, labels=labels, origin=origin)

    def fingerprint(self) -> str:
        """A hash of names, sizes and labels, to see whether the domain has changed."""
        return self._hash(self.labels)

    def counts(self) -> dict[str, int]:
        """Images per class, in the order of `classes`."""
        images = Counter(self.labels)
        return {name: images[label] for label, name in enumerate(self.classes)}


@dataclass(frozen=True)
class UnlabelledDomain(_Files):
    """Images and nothing else: the target."""

    ignored: tuple[str, ...] = ()  # files that may be images but have another suffix

    def keep(self, positions: Sequence[int]) -> "UnlabelledDomain":
        return replace(self, paths=tuple(self.paths[i] for i in positions))

    def fingerprint(self) -> str:
        """A hash of names and sizes, to see whether the domain has changed."""
        return self._hash(())


def scan_labelled(where: Path, root: Path | None = None, *, allow_one_class: bool = False) -> LabelledDomain:
    """A folder `where/class/**/image`, or a list of lines 'path label'.

    A list line is split at a tab that follows an image name, so labels may contain spaces, or else at its last space or
    tab, so paths may contain spaces. Blank lines and lines that start with '#' are skipped. Listed paths are relative
    to `root`, or to the list's own folder; `root` has no effect on a folder. Labels that are all integers become 0..K-1
    in numeric order, as the authors count classes; other labels are class names in alphabetical order. A single class
    is an error unless `allow_one_class` (evaluation).
    """
    if is_folder(where):
        domain = _labelled_folder(where)
    else:
        base, (numbers, paths, labels) = _list_base(where, root), zip(*labelled_lines(where), strict=True)
        domain = labelled_domain(base, existing(where, base, zip(numbers, paths, strict=True)), labels)
    if len(domain.classes) == 1 and not allow_one_class:
        below = where / domain.classes[0]  # the class folders may lie one level deeper
        deeper = below.is_dir() and len(subfolders(below)) > 1
        problem = f"{_quoted(where)} holds only one class, {domain.classes[0]!r}, but a classifier needs at least two"
        folder = _quoted(below) if deeper else "a folder that directly holds a folder per class"
        raise DataError("one-class", f"{problem}: give {folder}, or a list with more labels.")
    return domain


def scan_unlabelled(where: Path, root: Path | None = None) -> UnlabelledDomain:
    """A folder of any nesting, whose folder names are ignored, or a list of lines 'path' or 'path label'.

    Labels in a list are dropped while reading. Since paths may contain spaces, a line can be read as a path or as a
    path and a label. A line with an image suffix ('my cat.jpg') is tried as a path first, any other ('my cat.jpg 3')
    first without its label; the first reading that is an existing file is used.
    """
    if is_folder(where):
        ignored: list[str] = []
        return UnlabelledDomain(where, tuple(_images_below(where, ignored)), tuple(ignored))
    base = _list_base(where, root)
    return UnlabelledDomain(base, existing(where, base, _image_lines(where)))


def check_distinct(source: Path, target: Path) -> None:
    """Refuse places that are equal or contain each other: images would be in both domains."""
    if os.path.realpath(source) == os.path.realpath(target):
        advice = "labelled images of one kind as the source and unlabelled images of another kind as the target"
        raise SettingsError("same-domain", f"Source and target are the same, {_quoted(target)}: give {advice}.")
    if _is_inside(source, target) or _is_inside(target, source):
        problem = f"The source {_quoted(source)} and the target {_quoted(target)} overlap, as one is inside the other"
        raise SettingsError("domains-overlap", f"{problem}: give two separate folders.")


def require_outside(out: Path, *places: Path) -> None:
    """Refuse a run folder inside a folder of images: later runs would take the run's figures for images."""
    for place in places:
        if _is_inside(out, place):
            problem = f"The run folder {_quoted(out)} would be inside the images in {_quoted(place)}"
            raise SettingsError("run-inside-images", f"{problem}: choose another --out.")


def _is_inside(path: Path, folder: Path) -> bool:
    return os.path.isdir(folder) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def warnings_for(source: LabelledDomain) -> list[tuple[str, str]]:
    """Problems with the layout of a source that do not stop a run: (problem, advice)."""
    warnings = []
    if source.splits:
        problem = f"Source folders that look like splits of a data set are used as classes: {named(source.splits)}"
        split = _quoted(source.root / source.splits[0])
        warnings.append((problem, f"If the classes lie in them, give {split} as the source."))
    if source.empty:
        problem = f"Folders of the source without an image are not classes: {named(source.empty)}"
        warnings.append((problem, "Put images into these folders, or move them away."))
    if source.loose:
        images = counted(source.loose, "image lies", "images lie")
        problem = f"{images} in {_quoted(source.root)} beside the class folders and will not be used"
        warnings.append((problem, "Move them into class folders."))
    folded = Counter(map(str.casefold, source.classes))
    if alike := sorted((name for name in source.classes if folded[name.casefold()] > 1), key=str.casefold):
        problem = f"Classes whose names differ only in upper and lower case: {named(alike)}"
        warnings.append((problem, "If they are one class, give their images one name."))
    return warnings


def _labelled_folder(where: Path) -> LabelledDomain:
    ignored: list[str] = []
    images = tuple(_images_below(where, ignored))
    paths = tuple(path for path in images if "/" in path)
    if not paths:
        like = f"a folder named after the class, like {_quoted(where / 'CLASS' / images[0])}"
        problem = f"{_quoted(where)} holds images but no class folders"
        raise DataError("no-class-folders", f"{problem}: put the images of each class into {like}.")
    parts = [path.split("/", 2) for path in paths]
    classes, labels = _indexed([names[0] for names in parts])
    empty = tuple(folder.name for folder in subfolders(where) if folder.name not in classes)
    return LabelledDomain(
        where, paths, labels, classes, len(images) - len(paths), empty, _splits(parts), tuple(ignored)
    )


def _splits(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The top folders that look like splits, as in `train/CLASS`, `val/CLASS`. `parts` are paths cut at their first two
    slashes.

    Folders with the name of a split count if one of them contains several folders. Otherwise all top folders count if
    most of their subfolders are the same and outnumber them; subfolders of a class, such as `mug/front` and
    `mug/side`, are usually fewer than the classes.
    """
    images = Counter(names[0] for names in parts)
    inside: dict[str, set[str]] = {top: set() for top in images}
    for top, folder in {(names[0], names[1]) for names in parts if len(names) > 2}:
        inside[top].add(folder)
    splits = [top for top in inside if top.lower() in SPLIT_NAMES]
    if len(splits) < 2 or max(len(inside[top]) for top in splits) < 2:
        shared, together = set.intersection(*inside.values()), set.union(*inside.values())
        alike = len(shared) > max(len(inside), len(together) / 2) and not any(s.lower() in SPLIT_NAMES for s in shared)
        splits = list(inside) if alike else []
    return tuple(sorted(splits, key=lambda top: (-len(inside[top]), -images[top])))


def labelled_domain(root: Path, paths: tuple[str, ...], texts: Sequence[str]) -> LabelledDomain:
    """Images with their labels as written in a list; see `scan_labelled` for how labels become classes."""
    if not all(_INTEGER.fullmatch(text) for text in texts):
        classes, labels = _indexed(texts)
        return LabelledDomain(root, paths, labels, classes)
    numbers, labels = _indexed([int(text) for text in texts])
    names = _folder_names(paths, labels, len(numbers)) or tuple(map(str, numbers))
    return LabelledDomain(root, paths, labels, names)


def _indexed(values: Sequence[_Label]) -> tuple[tuple[_Label, ...], tuple[int, ...]]:
    """The distinct values in order, and the position of each value among them."""
    distinct = tuple(sorted(set(values)))
    position = {value: i for i, value in enumerate(distinct)}
    return distinct, tuple(position[value] for value in values)


def _folder_names(paths: Sequence[str], labels: Sequence[int], classes: int) -> tuple[str, ...] | None:
    """The classes named after their images' folders, if every class has one folder name and no two share it."""
    folders = (os.path.basename(os.path.dirname(path)) for path in paths)
    names = tuple(folder for _, folder in sorted(set(zip(labels, folders, strict=True))))
    return names if all(names) and len(names) == len(set(names)) == classes else None


# Folders


def is_folder(where: Path) -> bool:
    """True for a folder, False for a file that may be a list."""
    try:
        mode = where.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError("path-missing", f"{_quoted(where)} does not exist: check the path.") from error
    except OSError as error:
        raise _cannot_read(where, error) from error
    if stat.S_ISDIR(mode):
        return True
    if not stat.S_ISREG(mode) or is_image_name(where.name):
        problem = f"{_quoted(where)} is neither a folder of images nor a list"
        raise DataError("no-folder-or-list", f"{problem}: give one of the two.")
    return False


def _images_below(top: Path, ignored: list[str]) -> Iterator[str]:
    """The images below a folder; files that may be images but have another suffix are added to `ignored`."""
    empty = True
    for path, is_image in walk(top):
        if is_image:
            empty = False
            yield path
        else:
            ignored.append(path)
    if empty:
        raise no_image(top, ignored)


def no_image(top: Path, ignored: Sequence[str] = ()) -> DataError:
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    others, convert = (f", only files such as {ignored[0]!r}", "convert them, or ") if ignored else ("", "")
    advice = f"{convert}check the path ({suffixes} are read)"
    return DataError("no-image", f"No image was found in {_quoted(top)} or below it{others}: {advice}.")


def walk(top: Path) -> Iterator[tuple[str, bool]]:
    """The files below a folder that are images (True) or may be images (False), sorted by name on each level, so the
    order does not depend on the file system.

    Hidden files, text files and files of the operating system are left out. Links to folders outside `top` are
    followed, but no folder is entered twice; links to folders inside `top` are skipped, because those are visited
    anyway. A broken link or a special file with the suffix of an image counts as one, so that it is reported as
    unreadable; so does a broken link with the suffix of a tar.
    """
    real_top = os.path.realpath(top) + os.sep
    entered: set[str] = set()
    pending: list[tuple[str, bool | None]] = [("", None)]  # None for a folder
    while pending:
        path, is_image = pending.pop()
        if is_image is not None:
            yield path, is_image
        elif (real := os.path.realpath(top / path)) not in entered:
            entered.add(real)
            for entry in reversed(listing(top / path)):
                below = f"{path}/{entry.name}" if path else entry.name
                if _is_folder_entry(entry):
                    if not (entry.is_symlink() and (os.path.realpath(entry.path) + os.sep).startswith(real_top)):
                        pending.append((below, None))
                elif (by_name := is_image_name(entry.name)) or _may_be_image(entry):
                    pending.append((below, by_name))


def listing(folder: Path) -> list[os.DirEntry]:
    """The entries of a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name != ARCHIVE_LEFTOVERS]
    except OSError as error:
        raise _cannot_read(folder, error) from error
    return sorted(shown, key=lambda entry: entry.name)


def subfolders(folder: Path) -> list[Path]:
    return [Path(entry) for entry in listing(folder) if _is_folder_entry(entry)]


def _is_folder_entry(entry: os.DirEntry) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _may_be_image(entry: os.DirEntry) -> bool:
    """Whether a user may expect it to be read: an image of another format, or one without a suffix."""
    name = entry.name.lower()
    if name in _PLAIN_NAMES or os.path.splitext(name)[1] in _TEXT_SUFFIXES:
        return False
    # os.path, because DirEntry.is_file raises an error for a link to itself
    is_file = os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()
    return is_file or (is_tar_name(name) and entry.is_symlink() and not os.path.exists(entry.path))


def _cannot_read(where: Path, error: OSError) -> DataError:
    reason = "no permission" if isinstance(error, PermissionError) else error.strerror
    advice = "make it readable, or leave it out of the data"
    return DataError("path-unreadable", f"{_quoted(where)} cannot be read ({reason}): {advice}.")


def _quoted(path: Path) -> str:
    """repr, because the newlines and undecodable bytes of odd names must not break the sentence or the terminal."""
    return repr(str(path))


# Lists


def labelled_lines(where: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, path, label) of each line of a list."""
    for number, line in _list_lines(where):
        path, label = _split_label(line)
        if not label or is_image_name(label):
            marks = any(mark in line for mark in ",;")
            between = ", with a space or a tab, not a comma or semicolon, between them" if marks else ""
            advice = f"write it as 'path label'{between}"
            raise DataError("line-without-label", f"Line {number} of {_quoted(where)} has no label: {advice}.")
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


def _image_lines(where: Path, *, tar: bool | None = None) -> Iterator[tuple]:
    """(line number, path, ...) of each line of a list with or without labels: its possible paths, the more likely
    first. With `tar`, a line that names a tar where images are expected, or the other way round, is an error."""
    for number, line in _list_lines(where):
        path, label = _split_label(line)
        readings = ((line, path) if is_image_name(line) else (path, line)) if label else (line,)
        if tar is not None and any(map(is_tar_name, readings)) != tar:
            problem = f"The list '{where}' has both images and tars (line {number})"
            raise DataError("list-mixed", f"{problem}; give them in two lists.")
        yield number, *readings


def _list_lines(where: Path) -> Iterator[tuple[int, str]]:
    """The non-empty lines of a list with their numbers. Undecodable bytes are kept, as in file names."""
    empty = True
    try:
        with where.open("rb") as file:
            if b"\0" in file.peek():
                advice = "give a folder, or a list of images"
                raise DataError("list-not-text", f"{_quoted(where)} is not a text file: {advice}.")
            for number, raw in enumerate(file, 1):  # split at line feeds only: names may contain other line ends
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape").rstrip(" \t\r\n")
                if line and not line.startswith("#"):
                    empty = False
                    yield number, line
    except OSError as error:
        raise _cannot_read(where, error) from error
    if empty:
        raise DataError("list-empty", f"The list {_quoted(where)} is empty: write one line per image.")


def _list_base(where: Path, root: Path | None) -> Path:
    base = where.parent if root is None else root
    if not os.path.isdir(base):
        advice = "set --root to the folder of the listed paths"
        raise MissingFileError("root-missing", f"The root {_quoted(base)} is not a folder: {advice}.")
    return base


def existing(
    where: Path, base: Path, listed: Iterable[tuple], cure: str = "set --root to the folder of its paths"
) -> tuple[str, ...]:
    """The first reading of each (line number, reading, ...) that is an existing file; an error if there is none."""
    listed = list(listed)
    paths = [_first_file(base, readings) for _, *readings in listed]
    if missing := [(number, readings[0]) for (number, *readings), path in zip(listed, paths, strict=True) if not path]:
        number, path = missing[0]
        ends = (i for i, character in enumerate(path) if character == " ")
        tab = "put a tab before a label that has spaces, " if any(is_image_name(path[:end]) for end in ends) else ""
        problem = f"{len(missing)} of the {len(listed)} files in {_quoted(where)} cannot be found below {_quoted(base)}"
        first = f"the first is {path!r} in line {number}"
        raise MissingFileError("listed-file-missing", f"{problem}, {first}: {tab}correct the list, or {cure}.")
    return tuple(filter(None, paths))


def _first_file(base: Path, readings: Sequence[str]) -> str | None:
    return next((path for path in readings if os.path.isfile(os.path.join(base, path))), None)


# Images one by one


def find_tars(where: Path, root: Path | None = None) -> list[Path]:
    """A tar, those of a folder that holds no image, or those of a list. Empty if these are plain images."""
    if where.is_file() and (is_tar_name(where.name) or is_image_name(where.name)):
        return [where] if is_tar_name(where.name) else []
    if is_folder(where):
        if any(is_image for _, is_image in walk(where)):
            return []
        return [where / path for path, _ in walk(where) if is_tar_name(path)]
    _, *first = next(_image_lines(where))
    if not any(map(is_tar_name, first)):
        return []
    base = _list_base(where, root)
    return [base / path for path in existing(where, base, _image_lines(where, tar=True))]


def stream_images(where: Path, root: Path | None = None) -> Iterator[Path | TarMember]:
    """The images of a folder, of a list, of tars, or a single image file, one by one."""
    if tars := find_tars(where, root):
        for tar in tars:
            yield from members(tar)
    else:
        yield from map(Path, stream_names(where, root))


def stream_names(where: Path, root: Path | None = None, ignored: list[str] | None = None) -> Iterator[str]:
    """The image files of a folder or list, or a single one, as text. Files that may be images but have another suffix
    are added to `ignored`. A listed file that is missing counts as unreadable; in the end it is an error if all are."""
    if where.is_file() and is_image_name(where.name):
        yield str(where)
    elif is_folder(where):
        for path in _images_below(where, [] if ignored is None else ignored):
            yield os.path.join(where, path)
    else:
        base, exists = _list_base(where, root), False
        for _, *readings in _image_lines(where, tar=False):
            file = _first_file(base, readings)
            exists |= file is not None
            yield os.path.join(base, file or readings[0])
        if not exists:
            existing(where, base, _image_lines(where))  # raises the error
