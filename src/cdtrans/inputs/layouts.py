"""Find a benchmark's domains on disk, in class folders or in lists.

Folders come as `amazon/CLASS` or `amazon/images/CLASS`, and `Real World` has several spellings. Lists come from the
authors (`./Real_World/Drill/00014.jpg 0`), from CDAN and SHOT (absolute paths of another machine), and with DomainNet
and VisDA themselves. A list's class numbers are kept, because the order of the classes affects the random
initialisation of a classifier.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdtrans.errors import CdtransError
from cdtrans.inputs.domains import LabelledDomain, labelled, scan_labelled
from cdtrans.inputs.lists import labelled_lines

INNER_FOLDER = "images"  # Office-31 has it between a domain and its classes
LIST_FOLDER = "image_list"  # where tllib keeps the lists of a benchmark
SHOWN_ENTRIES = 8  # folder entries named in an error


@dataclass(frozen=True)
class FoundDomain:
    """The labelled images of one domain. `folder` contains its class folders; None if it was read from lists."""

    name: str
    images: LabelledDomain
    folder: Path | None
    layout: str  # for messages: "folder amazon/images", "lists clipart_train.txt and clipart_test.txt together"


def plain(name: str) -> str:
    """The name in lower case without separators: 'Real World', 'Real_World' and 'RealWorld' are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def dataset_root(data: Path, domains: Sequence[str], title: str) -> Path:
    """The folder that contains the domains: `data`, or a folder in it, because archives often have one more level."""
    if not data.is_dir():
        raise CdtransError(f"There is no folder '{data}' with {title}: set --data to its folder.")
    candidates = [data, *(Path(entry) for entry in _entries(data) if entry.is_dir())]
    counts = [sum(_has_domain(candidate, name) for name in domains) for candidate in candidates]
    if not max(counts):
        raise CdtransError(
            f"'{data}' holds no domain of {title}: expected folders or lists named {', '.join(domains)},"
            f" found {_shown(data)}."
        )
    return candidates[counts.index(max(counts))]


def find_domain(root: Path, name: str, title: str) -> FoundDomain:
    """The domain from its list if it has one, because a list also fixes the class numbers; else from class folders."""
    lists, folder = _lists(root, name), _folder(root, name)
    if lists:
        files = " and ".join(os.path.relpath(file, root) for file in lists)
        together = f"lists {files} together" if len(lists) > 1 else f"list {files}"
        return FoundDomain(name, _read_lists(lists, root, folder), None, together)
    if folder is None:
        raise CdtransError(
            f"'{root}' has no domain {name} of {title}: expected a folder '{name}' or a list '{name}.txt',"
            f" found {_shown(root)}."
        )
    inner = folder / INNER_FOLDER
    folder = inner if inner.is_dir() else folder
    return FoundDomain(name, scan_labelled(folder), folder, f"folder {os.path.relpath(folder, root)}")


def _has_domain(root: Path, name: str) -> bool:
    return _folder(root, name) is not None or bool(_lists(root, name))


def _folder(root: Path, name: str) -> Path | None:
    return next((Path(e) for e in _entries(root) if e.is_dir() and plain(e.name) == plain(name)), None)


def _lists(root: Path, name: str) -> list[Path]:
    """One list of the whole domain, or its train and test lists, which together are the whole domain."""
    files = {plain(file.stem): file for place in (root / LIST_FOLDER, root) for file in _texts(place)}
    domain = plain(name)
    for stem in (domain, f"{domain}list"):
        if stem in files:
            return [files[stem]]
    if f"{domain}train" in files and f"{domain}test" in files:
        return [files[f"{domain}train"], files[f"{domain}test"]]
    folder = _folder(root, name)
    return [file for file in _texts(folder) if plain(file.stem).endswith("imagelist")][:1] if folder else []


def _texts(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (Path(entry) for entry in _entries(folder) if entry.name.endswith(".txt") and entry.is_file())


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _shown(folder: Path) -> str:
    names = [entry.name for entry in _entries(folder)]
    more = f" and {len(names) - SHOWN_ENTRIES} more" if len(names) > SHOWN_ENTRIES else ""
    return ", ".join(map(repr, names[:SHOWN_ENTRIES])) + more if names else "nothing"


def _read_lists(lists: list[Path], root: Path, folder: Path | None) -> LabelledDomain:
    paths: list[str] = []
    labels: list[str] = []
    for file in lists:
        lines = list(labelled_lines(file))
        paths += _below(root, file, [(number, path) for number, path, _ in lines], folder)
        labels += [label for _, _, label in lines]
    return labelled(root, tuple(paths), labels)


def _below(root: Path, file: Path, lines: list[tuple[int, str]], folder: Path | None) -> list[str]:
    """The listed paths relative to `root`. The first one that exists here decides, for all of them, how many leading
    folders to cut and where the rest starts."""
    places = [file.parent, root, *([folder, folder / INNER_FOLDER] if folder else [])]
    parts = [(number, path.split("/")) for number, path in lines]
    rule = next((rule for _, names in parts if (rule := _rule(names, places))), None)
    if rule is None:
        raise CdtransError(
            f"None of the {len(lines)} files in '{file}' can be found below '{root}', the first is {lines[0][1]!r}:"
            " put the images beside the list."
        )
    cut, place = rule
    paths = [os.path.normpath(os.path.join(os.path.relpath(place, root), *names[cut:])) for _, names in parts]
    missing = [i for i, path in enumerate(paths) if not os.path.isfile(root / path)]
    if missing:
        raise CdtransError(
            f"{len(missing)} of the {len(lines)} files in '{file}' are missing below '{root}', the first is"
            f" {paths[missing[0]]!r} in line {lines[missing[0]][0]}: put them there, or correct the list."
        )
    return paths


def _rule(names: list[str], places: list[Path]) -> tuple[int, Path] | None:
    """The fewest leading folders to cut from a listed path so that the rest exists, and the folder it is in."""
    for cut in range(len(names)):
        for place in places:
            if os.path.isfile(os.path.join(place, *names[cut:])):
                return cut, place
    return None
