"""Folders or lists of images -> the two domains of a run: a source with labels and a target without.

UnlabelledDomain has no field for labels and shares no base with LabelledDomain, so code that gets the target cannot
read target labels.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from cdtrans.errors import CdtransError, counted, named
from cdtrans.inputs.folders import files_below, is_folder, is_subfolder, listing, no_image, quoted, walk
from cdtrans.inputs.images import is_image_name
from cdtrans.inputs.lists import existing, labelled_lines, list_base, list_lines, not_found, readings
from cdtrans.inputs.tars import TarMember, is_tar_name, members

SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"}
_INTEGER = re.compile(r"-?[0-9]{1,18}")  # more digits are a name, as of a barcode
_Label = TypeVar("_Label", int, str)


@dataclass(frozen=True)
class LabelledDomain:
    """Images with a class each: the source, or labelled target images for evaluation."""

    root: Path
    paths: tuple[str, ...]  # relative to root, with '/'
    labels: tuple[int, ...]  # an index into classes per path
    classes: tuple[str, ...]
    loose: int = 0  # images beside the class folders; they have no class and are not in paths
    empty: tuple[str, ...] = ()  # class folders without an image
    splits: tuple[str, ...] = ()  # class folders that look like train, val and test, the largest first
    ignored: tuple[str, ...] = ()  # files that may be images but have another suffix
    origin: tuple[int, ...] = ()  # per path, the index of the source that it comes from; all 0 unless given

    def __post_init__(self) -> None:
        object.__setattr__(self, "origin", self.origin or (0,) * len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def files(self) -> list[Path]:
        return [self.root / path for path in self.paths]

    def keep(self, positions: Sequence[int]) -> "LabelledDomain":
        """Only the images at these positions. All classes stay, even those left without images."""
        paths = tuple(self.paths[i] for i in positions)
        labels, origin = (tuple(column[i] for i in positions) for column in (self.labels, self.origin))
        return replace(self, paths=paths, labels=labels, origin=origin)

    def fingerprint(self) -> str:
        """A hash of names, sizes and labels, to see whether the domain has changed."""
        return _fingerprint(self.root, self.paths, self.labels)

    def counts(self) -> tuple[int, ...]:
        """Images per class, in the order of `classes`."""
        images = Counter(self.labels)
        return tuple(images[label] for label in range(len(self.classes)))


@dataclass(frozen=True)
class UnlabelledDomain:
    """Images and nothing else: the target."""

    root: Path
    paths: tuple[str, ...]  # relative to root, with '/'
    ignored: tuple[str, ...] = ()  # files that may be images but have another suffix

    def __len__(self) -> int:
        return len(self.paths)

    def files(self) -> list[Path]:
        return [self.root / path for path in self.paths]

    def keep(self, positions: Sequence[int]) -> "UnlabelledDomain":
        return replace(self, paths=tuple(self.paths[i] for i in positions))

    def fingerprint(self) -> str:
        """A hash of names and sizes, to see whether the domain has changed."""
        return _fingerprint(self.root, self.paths, ())


def _fingerprint(root: Path, paths: tuple[str, ...], labels: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            size = os.stat(root / path).st_size
        except OSError:  # a broken link counts as an image that cannot be read
            size = -1
        digest.update(f"{path}\0{size}\0".encode("utf-8", "surrogateescape"))
    digest.update(np.asarray(labels, dtype=np.int64).tobytes())
    return digest.hexdigest()


def scan_labelled(where: Path, root: Path | None = None, *, allow_one_class: bool = False) -> LabelledDomain:
    """A folder `where/class/**/image`, or a list of lines 'path label'.

    A list line is split at a tab that follows an image name, so labels may contain spaces, or else at its last space or
    tab, so paths may contain spaces. Blank lines and lines that start with '#' are skipped. Listed paths are relative
    to `root`, or to the list's own folder; `root` has no effect on a folder. Labels that are all integers become 0..K-1
    in numeric order, as the authors count classes; other labels are class names in alphabetical order. A single class
    is an error unless `allow_one_class` (evaluation).
    """
    domain = _labelled_folder(where) if is_folder(where) else _labelled_list(where, root)
    if len(domain.classes) == 1 and not allow_one_class:
        raise CdtransError(
            f"{quoted(where)} holds only one class, {domain.classes[0]!r}, but a classifier needs at least two: give "
            + (_deeper(where / domain.classes[0]) or "a folder that directly holds a folder per class")
            + ", or a list with more labels."
        )
    return domain


def _deeper(where: Path) -> str:
    """The folder, quoted, if it contains the class folders, one level below the path the user gave; else empty."""
    inside = [entry for entry in where.iterdir() if entry.is_dir()] if where.is_dir() else []
    return quoted(where) if len(inside) > 1 else ""


def scan_unlabelled(where: Path, root: Path | None = None) -> UnlabelledDomain:
    """A folder of any nesting, whose folder names are ignored, or a list of lines 'path' or 'path label'.

    Labels in a list are dropped while reading. Since paths may contain spaces, a line can be read as a path or as a
    path and a label. A line with an image suffix ('my cat.jpg') is tried as a path first, any other ('my cat.jpg 3')
    first without its label; the first reading that is an existing file is used.
    """
    if is_folder(where):
        images, ignored = files_below(where)
        return UnlabelledDomain(where, tuple(images), tuple(ignored))
    base = list_base(where, root)
    return UnlabelledDomain(base, existing(where, base, [(i, *readings(line)) for i, line in list_lines(where)]))


def check_distinct(source: Path, target: Path) -> None:
    """Refuse places that are equal or contain each other: images would be in both domains."""
    places = os.path.realpath(source), os.path.realpath(target)
    if places[0] != places[1] and os.path.commonpath(places) in places and os.path.isdir(os.path.commonpath(places)):
        raise CdtransError(
            f"The source {quoted(source)} and the target {quoted(target)} overlap, as one is inside the other: give two"
            " separate folders."
        )
    if places[0] == places[1]:
        raise CdtransError(
            f"Source and target are the same, {quoted(target)}: give labelled images of one kind as the source and"
            " unlabelled images of another kind as the target."
        )


def require_outside(out: Path, *places: Path) -> None:
    """Refuse a run folder inside a folder of images: later runs would read the run's pictures as images."""
    real = Path(os.path.realpath(out))
    for place in filter(os.path.isdir, places):
        if Path(os.path.realpath(place)) in (real, *real.parents):
            raise CdtransError(
                f"The run folder {quoted(out)} would be inside the images in {quoted(place)}: choose another --out."
            )


def warnings_for(source: LabelledDomain) -> list[tuple[str, str]]:
    """Problems with the layout of a source that do not stop a run: (problem, advice)."""
    warnings = []
    if source.splits:
        problem = f"Source folders that look like splits of a data set are used as classes: {named(source.splits)}"
        split = quoted(source.root / source.splits[0])
        warnings.append((problem, f"If the classes lie in them, give {split} as the source."))
    if source.empty:
        problem = f"Folders of the source without an image are not classes: {named(source.empty)}"
        warnings.append((problem, "Put images into these folders, or move them away."))
    if source.loose:
        images = counted(source.loose, "image lies", "images lie")
        problem = f"{images} in {quoted(source.root)} beside the class folders and will not be used"
        warnings.append((problem, "Move them into class folders."))
    by_name: dict[str, list[str]] = {}
    for name in source.classes:
        by_name.setdefault(name.casefold(), []).append(name)
    if alike := [name for names in by_name.values() if len(names) > 1 for name in names]:
        problem = f"Classes whose names differ only in upper and lower case: {named(alike)}"
        warnings.append((problem, "If they are one class, give their images one name."))
    return warnings


def _labelled_folder(where: Path) -> LabelledDomain:
    images, ignored = files_below(where)
    paths = tuple(path for path in images if "/" in path)
    if not paths:
        raise CdtransError(
            f"{quoted(where)} holds images but no class folders: put the images of each class into a folder named"
            f" after the class, like {quoted(where / 'CLASS' / images[0])}."
        )
    parts = [path.split("/", 2) for path in paths]
    classes, labels = _indexed([names[0] for names in parts])
    folders = [entry.name for entry in listing(where)[1] if is_subfolder(entry)]
    empty = tuple(name for name in folders if name not in classes)
    loose = len(images) - len(paths)
    return LabelledDomain(where, paths, labels, classes, loose, empty, _splits(parts), tuple(ignored))


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


def _labelled_list(where: Path, root: Path | None) -> LabelledDomain:
    base = list_base(where, root)
    lines = list(labelled_lines(where))
    paths = existing(where, base, [(number, path) for number, path, _ in lines])
    return labelled(base, paths, [label for _, _, label in lines])


def labelled(root: Path, paths: tuple[str, ...], texts: Sequence[str]) -> LabelledDomain:
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
    folders: list[set[str]] = [set() for _ in range(classes)]
    for path, label in zip(paths, labels, strict=True):
        folders[label].add(os.path.basename(os.path.dirname(path)))
    names = tuple(min(names) for names in folders)
    one_each = all(len(names) == 1 for names in folders)
    return names if one_each and all(names) and len(set(names)) == classes else None


def find_tars(where: Path, root: Path | None = None) -> list[Path]:
    """A tar, those of a folder that holds no image, or those of a list. Empty if these are plain images."""
    if where.is_file() and is_tar_name(where.name):
        return [where]
    if where.is_file() and is_image_name(where.name):
        return []
    if is_folder(where):
        tars = []
        for path, is_image in walk(where):
            if is_image:
                return []
            if is_tar_name(path):
                tars.append(where / path)
        return tars
    lines = list_lines(where)
    first = next(lines)
    if not _is_tar(first[1]):
        return []
    listed = [first, *lines]
    if mixed := next((number for number, line in listed if not _is_tar(line)), None):
        raise _mixed(where, mixed)
    base = list_base(where, root)
    return [base / path for path in existing(where, base, [(n, *readings(line)) for n, line in listed])]


def _is_tar(line: str) -> bool:
    return any(map(is_tar_name, readings(line)))


def _mixed(where: Path, line: int) -> CdtransError:
    return CdtransError(f"The list '{where}' has both images and tars (line {line}); give them in two lists.")


def stream_images(where: Path, root: Path | None = None) -> Iterator[Path | TarMember]:
    """The images of a folder, of a list, of tars, or a single image file, one by one."""
    if tars := find_tars(where, root):
        for tar in tars:
            yield from members(tar)
    else:
        yield from stream_files(where, root)


def stream_files(where: Path, root: Path | None = None) -> Iterator[Path]:
    """The same where there are no tars."""
    return map(Path, stream_names(where, root))


def stream_names(where: Path, root: Path | None = None, ignored: list[str] | None = None) -> Iterator[str]:
    """The same as plain text, which is faster. Files that may be images but have another suffix are added to `ignored`.
    A listed file that is missing is given too, and counts as unreadable, unless all are missing."""
    if where.is_file() and is_image_name(where.name):
        yield str(where)
    elif is_folder(where):
        empty, ignored = True, [] if ignored is None else ignored
        for path, is_image in walk(where):
            if is_image:
                empty = False
                yield os.path.join(where, path)
            else:
                ignored.append(path)
        if empty:
            raise no_image(where, next(iter(ignored), ""))
    else:
        base = str(list_base(where, root))
        missing: list[tuple[int, str]] = []  # before the first that exists
        exists = False
        for number, line in list_lines(where):
            possible = readings(line)
            if any(map(is_tar_name, possible)):
                raise _mixed(where, number)
            found = next((name for path in possible if os.path.isfile(name := os.path.join(base, path))), None)
            if found is None and not exists:
                missing.append((number, possible[0]))
                continue
            if not exists:
                exists = True
                yield from (os.path.join(base, path) for _, path in missing)
            yield found or os.path.join(base, possible[0])
        if not exists:
            raise not_found(where, Path(base), *missing[0])
