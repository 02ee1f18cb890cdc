"""Folders or lists of images -> the two domains of a run: a source with labels and a target that cannot have any.

LabelledDomain and UnlabelledDomain share no base and no field for labels, so that code which takes the second for the
target has no way to look at an answer key.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from cdtrans.data.images import IMAGE_SUFFIXES, is_image_name
from cdtrans.errors import CdtransError, named

ARCHIVE_LEFTOVERS = "__MACOSX"  # macOS packs metadata twins of every file into this folder of a zip
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"}
_INTEGER = re.compile(r"-?[0-9]+")
_Label = TypeVar("_Label", int, str)
_Kind = Literal["folder", "image", "ignored"]

# What lies beside images in any data set, and that nobody takes for one.
_TEXT_SUFFIXES = {
    *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".log", ".html", ".htm", ".xmp", ".aae", ".py", ".ipynb", ".sh"),
}
_PLAIN_NAMES = {
    *("readme", "license", "licence", "copying", "notice", "changelog", "citation"),
    *("thumbs.db", "ehthumbs.db"),
}


@dataclass(frozen=True)
class LabelledDomain:
    """Images with a class each: the source, or an answer key for evaluation."""

    root: Path
    paths: tuple[str, ...]  # relative to root, with '/'
    labels: tuple[int, ...]  # an index into classes per path
    classes: tuple[str, ...]
    loose: int = 0  # images found beside the class folders: they belong to no class and are not in paths
    empty: tuple[str, ...] = ()  # class folders without an image
    splits: tuple[str, ...] = ()  # class folders that look like train, val and test, the fullest first
    ignored: tuple[str, ...] = ()  # files that may be images, but whose names do not end like one's

    def __len__(self) -> int:
        return len(self.paths)

    def files(self) -> list[Path]:
        return [self.root / path for path in self.paths]

    def keep(self, positions: Sequence[int]) -> "LabelledDomain":
        """Only the images at these positions. The classes stay, even one that loses all its images."""
        paths = tuple(self.paths[i] for i in positions)
        return replace(self, paths=paths, labels=tuple(self.labels[i] for i in positions))

    def counts(self) -> tuple[int, ...]:
        """Images per class, in the order of `classes`."""
        images = Counter(self.labels)
        return tuple(images[label] for label in range(len(self.classes)))


@dataclass(frozen=True)
class UnlabelledDomain:
    """Images and nothing else: the target."""

    root: Path
    paths: tuple[str, ...]  # relative to root, with '/'
    ignored: tuple[str, ...] = ()  # files that may be images, but whose names do not end like one's

    def __len__(self) -> int:
        return len(self.paths)

    def files(self) -> list[Path]:
        return [self.root / path for path in self.paths]

    def keep(self, positions: Sequence[int]) -> "UnlabelledDomain":
        return replace(self, paths=tuple(self.paths[i] for i in positions))


def scan_labelled(where: Path, root: Path | None = None, *, allow_one_class: bool = False) -> LabelledDomain:
    """A folder `where/class/**/image`, or a list of lines 'path label'.

    A list line is split at its last space or tab, so that paths may hold spaces; but first at a tab that follows an
    image's name, so that labels may hold spaces too. Blank lines and lines that start with '#' are skipped. Listed
    paths start from `root`, or from the list's own folder; for a folder `root` means nothing. Labels that are all
    integers are put in numeric order and become 0..K-1, the way the authors count classes; any others are class names
    in alphabetical order. One class is an error unless only for evaluation.
    """
    domain = _labelled_folder(where) if _is_folder(where) else _labelled_list(where, root)
    if len(domain.classes) == 1 and not allow_one_class:
        raise CdtransError(
            f"{_quoted(where)} holds only one class, {domain.classes[0]!r}, but a classifier needs at least two: give "
            + (_deeper(where / domain.classes[0]) or "a folder that directly holds a folder per class")
            + ", or a list with more labels."
        )
    return domain


def _deeper(where: Path) -> str:
    """The folder itself if the classes lie in it, one level further down than was said."""
    inside = [entry for entry in where.iterdir() if entry.is_dir()] if where.is_dir() else []
    return _quoted(where) if len(inside) > 1 else ""


def scan_unlabelled(where: Path, root: Path | None = None) -> UnlabelledDomain:
    """A folder of any nesting, whose folder names mean nothing, or a list of lines 'path' or 'path label'.

    A label in a list is dropped as its line is read. Since paths may hold spaces, a line has two readings: all of it
    is a path, or all but its label is. A line that ends like an image file ('my cat.jpg') is first taken as a whole,
    any other ('my cat.jpg 3') first without its label; the first reading that is an existing file counts.
    """
    if _is_folder(where):
        found, ignored = _files_below(where)
        return UnlabelledDomain(where, tuple(found), tuple(ignored))
    base = _list_base(where, root)
    return UnlabelledDomain(base, _existing(where, base, [(i, *_readings(line)) for i, line in _list_lines(where)]))


def check_distinct(source: Path, target: Path) -> None:
    """Neither may be the other, or lie in it: images would be on both sides."""
    places = os.path.realpath(source), os.path.realpath(target)
    if places[0] != places[1] and os.path.commonpath(places) in places and os.path.isdir(os.path.commonpath(places)):
        raise CdtransError(
            f"Of source {_quoted(source)} and target {_quoted(target)} one lies in the other: give two separate places."
        )
    if places[0] == places[1]:
        raise CdtransError(
            f"Source and target are the same, {_quoted(target)}: give labelled images of one kind as the source and"
            " unlabelled images of another kind as the target."
        )


def warnings_for(source: LabelledDomain) -> list[tuple[str, str]]:
    """What is odd about the layout of a source, yet no reason to stop: what was found, and what to do."""
    warnings = []
    if source.splits:
        found = f"Source folders that look like splits of a data set are taken for classes: {named(source.splits)}"
        better = _quoted(source.root / source.splits[0])
        warnings.append((found, f"If the classes lie in them, give {better} as the source."))
    if source.empty:
        found = f"Folders of the source without an image are not classes: {named(source.empty)}"
        warnings.append((found, "Put images into these folders, or move them away."))
    if source.loose:
        images = "1 image lies" if source.loose == 1 else f"{source.loose} images lie"
        found = f"{images} in {_quoted(source.root)} beside the class folders and will not be used"
        warnings.append((found, "Move them into class folders."))
    return warnings


def _labelled_folder(where: Path) -> LabelledDomain:
    found, ignored = _files_below(where)
    paths = tuple(path for path in found if "/" in path)
    if not paths:
        raise CdtransError(
            f"{_quoted(where)} holds images but no class folders: put the images of each class into a folder named"
            f" after the class, like {_quoted(where / 'CLASS' / found[0])}."
        )
    parts = [path.split("/", 2) for path in paths]
    classes, labels = _indexed([names[0] for names in parts])
    folders = [entry.name for entry in _listing(where)[1] if _is_subfolder(entry)]
    empty = tuple(name for name in folders if name not in classes)
    loose = len(found) - len(paths)
    return LabelledDomain(where, paths, labels, classes, loose, empty, _splits(parts), tuple(ignored))


def _splits(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Folders that look like `train` and `val` in `train/CLASS`, `val/CLASS`, of paths that are cut at their first two
    slashes.

    Those that are called so, if one of them holds several folders. Else all of them, if the same folders lie in each
    and are more: folders in a class, such as `mug/front`, `mug/side`, are usually fewer than the classes.
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


def _labelled_list(where: Path, root: Path | None) -> LabelledDomain:
    base = _list_base(where, root)
    lines = list(labelled_lines(where))
    paths = _existing(where, base, [(number, path) for number, path, _ in lines])
    return labelled(base, paths, [word for _, _, word in lines])


def labelled_lines(where: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, path, label) of each line of a list."""
    for number, line in _list_lines(where):
        path, label = _split_label(line)
        if not label or is_image_name(label):
            raise CdtransError(f"Line {number} of {_quoted(where)} has no label: write it as 'path label'.")
        yield number, path, label


def labelled(root: Path, paths: tuple[str, ...], words: Sequence[str]) -> LabelledDomain:
    """Images with the labels that a list gave them; see `scan_labelled` for what labels become."""
    if not all(_INTEGER.fullmatch(word) for word in words):
        classes, labels = _indexed(words)
        return LabelledDomain(root, paths, labels, classes)
    numbers, labels = _indexed([int(word) for word in words])
    names = _folder_names(paths, labels, len(numbers)) or tuple(map(str, numbers))
    return LabelledDomain(root, paths, labels, names)


def _indexed(values: Sequence[_Label]) -> tuple[tuple[_Label, ...], tuple[int, ...]]:
    """The distinct values in order, and the position of each value among them."""
    distinct = tuple(sorted(set(values)))
    position = {value: i for i, value in enumerate(distinct)}
    return distinct, tuple(position[value] for value in values)


def _folder_names(paths: Sequence[str], labels: Sequence[int], classes: int) -> tuple[str, ...] | None:
    """The classes named after their images' folders, if every class has one folder name and no two share it."""
    folders: list[set[str]] = [set() for _ in range(classes)]
    for path, label in zip(paths, labels, strict=True):
        folders[label].add(os.path.basename(os.path.dirname(path)))
    names = tuple(min(names) for names in folders)
    alone = all(len(names) == 1 for names in folders)
    return names if alone and all(names) and len(set(names)) == classes else None


def _split_label(line: str) -> tuple[str, str]:
    """'path label' -> path, label, see `scan_labelled`; without a label the second is empty."""
    tabs = (i for i, character in enumerate(line) if character == "\t" and is_image_name(line[:i].rstrip(" \t")))
    cut = next(tabs, max(line.rfind(" "), line.rfind("\t")))
    path = line[: max(cut, 0)].rstrip(" \t")
    return (path, line[cut + 1 :].lstrip(" ")) if path else (line, "")


def _readings(line: str) -> tuple[str, ...]:
    """The paths that a line with or without a label may mean, the likelier first."""
    path, label = _split_label(line)
    if not label:
        return (line,)
    return (line, path) if is_image_name(line) else (path, line)


def _list_lines(where: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a list that say something. Undecodable bytes pass through, as they do in file names."""
    empty = True
    try:
        with where.open("rb") as file:
            for number, raw in enumerate(file, 1):  # at b"\n" alone: names may hold the rarer line ends of text files
                if b"\0" in raw or (number == 1 and b"\0" in file.peek()):  # a picture's first line may look like text
                    raise CdtransError(f"{_quoted(where)} is not a text file: give a folder, or a list of images.")
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape").rstrip(" \t\r\n")
                if line and not line.startswith("#"):
                    empty = False
                    yield number, line
    except OSError as error:
        raise _cannot_read(where, error) from error
    if empty:
        raise CdtransError(f"The list {_quoted(where)} is empty: write a line for every image.")


def _list_base(where: Path, root: Path | None) -> Path:
    base = where.parent if root is None else root
    if not os.path.isdir(base):
        raise CdtransError(f"The root {_quoted(base)} is not a folder: say with --root where the listed paths start.")
    return base


def _existing(where: Path, base: Path, listed: Sequence[tuple]) -> tuple[str, ...]:
    """The first reading of each (line number, reading, ...) that is a file; one that has none is the user's error."""
    paths, missing = [], []
    for number, *readings in listed:
        path = next((reading for reading in readings if os.path.isfile(os.path.join(base, reading))), None)
        if path is None:
            missing.append((number, readings[0]))
        else:
            paths.append(path)
    if missing:
        number, path = missing[0]
        ends = (i for i, character in enumerate(path) if character == " ")
        tab = "put a tab before a label that has spaces, " if any(is_image_name(path[:end]) for end in ends) else ""
        raise CdtransError(
            f"{len(missing)} of the {len(listed)} files in {_quoted(where)} cannot be found below {_quoted(base)},"
            f" the first is {path!r} in line {number}: {tab}correct the list, or say with --root where its paths start."
        )
    return tuple(paths)


def _is_folder(where: Path) -> bool:
    """True for a folder, False for a file that may be a list."""
    try:
        mode = where.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CdtransError(f"{_quoted(where)} does not exist: check the path.") from error
    except OSError as error:
        raise _cannot_read(where, error) from error
    if stat.S_ISDIR(mode):
        return True
    if not stat.S_ISREG(mode) or is_image_name(where.name):
        raise CdtransError(f"{_quoted(where)} is neither a folder of images nor a list: give one of the two.")
    return False


def stream_images(where: Path, root: Path | None = None, ignored: list[str] | None = None) -> Iterator[Path]:
    """The images of a folder, of a list, or a single image file, one after the other and never all at once. What is
    ignored although it may be an image is added to `ignored`."""
    if where.is_file() and is_image_name(where.name):
        yield where
    elif _is_folder(where):
        empty, ignored = True, [] if ignored is None else ignored
        for path, is_image in _walk(where):
            if is_image:
                empty = False
                yield where / path
            else:
                ignored.append(path)
        if empty:
            raise _no_image(where, next(iter(ignored), ""))
    else:
        base = _list_base(where, root)
        for number, line in _list_lines(where):
            yield base / _existing(where, base, [(number, *_readings(line))])[0]


def _files_below(top: Path) -> tuple[list[str], list[str]]:
    """The images of a folder, and what is ignored although it may be one."""
    images: list[str] = []
    ignored: list[str] = []
    for path, is_image in _walk(top):
        (images if is_image else ignored).append(path)
    if not images:
        raise _no_image(top, next(iter(ignored), ""))
    return images, ignored


def _no_image(top: Path, ignored: str) -> CdtransError:
    """`ignored` is the first file that may be one, if there is any."""
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    others, convert = (f", only files such as {ignored!r}", "convert them, or ") if ignored else ("", "")
    return CdtransError(
        f"No image lies in {_quoted(top)} or below it{others}: {convert}check the path ({suffixes} are read)."
    )


def _walk(top: Path) -> Iterator[tuple[str, bool]]:
    """The files of a folder and all below it that are images (True) or may be some (False), ordered by name level by
    level, whatever the file system's order.

    Hidden entries, text and what systems leave in folders are left out. Links to folders are followed if they lead out
    of `top`, and no folder is entered twice through them; a link to a folder inside `top` is another name for what is
    found there anyway. A link to nothing counts as an image if it is named like one: it is better reported as
    unreadable than passed over.
    """
    real_top = os.path.realpath(top) + os.sep
    entered: set[tuple[int, int]] = set()
    pending: list[tuple[str, _Kind]] = [("", "folder")]
    while pending:
        path, kind = pending.pop()
        if kind != "folder":
            yield path, kind == "image"
            continue
        identity, entries = _listing(top / path)
        if identity in entered:
            continue
        entered.add(identity)
        for entry in reversed(entries):
            below = f"{path}/{entry.name}" if path else entry.name
            if _is_subfolder(entry):
                if not (entry.is_symlink() and (os.path.realpath(entry.path) + os.sep).startswith(real_top)):
                    pending.append((below, "folder"))
            elif _is_image(entry):
                pending.append((below, "image"))
            elif _may_be_image(entry):
                pending.append((below, "ignored"))


def _listing(folder: Path) -> tuple[tuple[int, int], list[os.DirEntry]]:
    """What identifies a folder whatever links led to it, and its entries by name."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name != ARCHIVE_LEFTOVERS]
    except OSError as error:
        raise _cannot_read(folder, error) from error
    return (status.st_dev, status.st_ino), sorted(seen, key=lambda entry: entry.name)


def _is_subfolder(entry: os.DirEntry) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_image(entry: os.DirEntry) -> bool:
    if not is_image_name(entry.name):
        return False
    if entry.is_symlink():
        return os.path.isfile(entry.path) or not os.path.exists(entry.path)
    return entry.is_file()


def _may_be_image(entry: os.DirEntry) -> bool:
    """Whether somebody may expect it to be read: an image of another format, or one whose ending has been lost."""
    name = entry.name.lower()
    if is_image_name(name) or name in _PLAIN_NAMES or os.path.splitext(name)[1] in _TEXT_SUFFIXES:
        return False
    return entry.is_file()


def _cannot_read(where: Path, error: OSError) -> CdtransError:
    reason = "no permission" if isinstance(error, PermissionError) else error.strerror
    return CdtransError(f"{_quoted(where)} cannot be read ({reason}): make it readable, or leave it out of the data.")


def _quoted(path: Path) -> str:
    """repr, because the newlines and undecodable bytes of odd names must not break the sentence or the terminal."""
    return repr(str(path))
