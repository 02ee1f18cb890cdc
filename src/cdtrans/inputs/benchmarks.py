"""The paper's four benchmarks and PACS: their domains and tasks, and a check that a folder holds them.

`adapt` gets a labelled source and a target without labels. The target labels are for scoring afterwards.

Folders come as `amazon/CLASS` or `amazon/images/CLASS`, and `Real World` has several spellings. Lists come from the
authors (`./Real_World/Drill/00014.jpg 0`), from CDAN and SHOT (absolute paths of another machine), and with DomainNet
and VisDA themselves. A list's class numbers are kept, because the order of the classes affects the random
initialisation of a classifier.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import yaml

from cdtrans.errors import DataError, MissingFileError, SettingsError, first_of, named, nearest
from cdtrans.inputs.scan import (
    LabelledDomain,
    existing,
    labelled_domain,
    labelled_lines,
    listing,
    scan_labelled,
    subfolders,
)
from cdtrans.schema import build

ARROWS = (">", "→", "-")  # '-' last: 'A->W' and 'Real-World>Art' contain it too; 'A-W' needs no quotes in a shell
INNER_FOLDER = "images"  # Office-31 has it between a domain and its classes
LIST_FOLDER = "image_list"  # tllib keeps the lists of a benchmark there


@dataclass(frozen=True)
class Domain:
    """`short` is the paper's abbreviation, `name` the official folder, `images` the published count."""

    short: str
    name: str
    images: int
    aliases: tuple[str, ...] = ()
    per_class: dict[str, int] = field(default_factory=dict, hash=False)  # published, by class

    def is_called(self, text: str) -> bool:
        return _plain(text) in {_plain(name) for name in (self.short, self.name, *self.aliases)}


class BenchmarkTask(NamedTuple):
    source: Domain
    target: Domain

    @property
    def name(self) -> str:
        """The paper's name: A>W."""
        return f"{self.source.short}>{self.target.short}"

    @property
    def folder(self) -> str:
        return f"{self.source.short}-{self.target.short}"


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    domains: tuple[Domain, ...]
    classes: int
    class_names: tuple[str, ...] = ()  # if the benchmark fixes them
    one_way: bool = False  # only from the first domain to the second
    class_mean: bool = False  # scored by the mean of the classes' accuracies, not by overall accuracy
    in_paper: bool = True  # whether the CDTrans paper prints a table of it

    @cached_property
    def tasks(self) -> tuple[BenchmarkTask, ...]:
        """Every pair of domains, in the order of the paper's columns."""
        both_ways = tuple(BenchmarkTask(source, target) for source, target in permutations(self.domains, 2))
        return both_ways[:1] if self.one_way else both_ways

    def task(self, text: str) -> BenchmarkTask:
        """'A>W', 'amazon>webcam', 'A->W' or 'A-W' -> the task."""
        arrow = next((arrow for arrow in ARROWS if arrow in text), None)
        if arrow is not None:
            source, target = (part.strip() for part in text.split(arrow, 1))
            for task in self.tasks:
                if task.source.is_called(source) and task.target.is_called(target):
                    return task
        names = [name for t in self.tasks for name in (t.name, f"{t.source.name}>{t.target.name}")]
        raise SettingsError("task-unknown", f"'{text}' is not a task of {self.title}: {nearest(text, names)}")


_PUBLISHED = yaml.safe_load((resources.files("cdtrans.inputs") / "benchmarks.yaml").read_text(encoding="utf-8"))
BENCHMARKS = {values["name"]: build(Benchmark, values) for values in _PUBLISHED}
OFFICE31, OFFICE_HOME, VISDA2017, DOMAINNET, PACS = BENCHMARKS.values()


def benchmark_named(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise SettingsError("benchmark-unknown", f"Unknown benchmark '{name}': {nearest(name, list(BENCHMARKS))}")
    return BENCHMARKS[name]


@dataclass(frozen=True)
class FoundDomain:
    """The labelled images of one domain. `folder` contains its class folders; None if it was read from lists."""

    name: str
    images: LabelledDomain
    folder: Path | None
    layout: str  # "folder amazon/images", "lists clipart_train.txt and clipart_test.txt together"


@dataclass(frozen=True)
class FoundBenchmark:
    """The domains that the chosen tasks need, and how they differ from the published ones."""

    benchmark: Benchmark
    root: Path
    domains: dict[str, FoundDomain]  # by the domain's name
    differences: tuple[str, ...]


def find_benchmark(
    benchmark: Benchmark, data: Path, tasks: Sequence[BenchmarkTask], *, allow_incomplete: bool = False
) -> FoundBenchmark:
    """Find and check the domains of these tasks. A difference from the published benchmark is an error; with
    `allow_incomplete` it is noted. The domains must always have the same classes, or no model could be scored."""
    needed = [d for d in benchmark.domains if any(d in task for task in tasks)]
    root = dataset_root(data, [d.name for d in benchmark.domains], benchmark.title)
    domains = {d.name: find_domain(root, d.name, benchmark.title) for d in needed}
    differences = tuple(text for d in needed if (text := _difference(benchmark, d, domains[d.name])))
    if differences and not allow_incomplete:
        problem = f"{benchmark.title} in '{root}' differs from the published data: {differences[0]}"
        raise DataError("benchmark-differs", f"{problem}; complete it, or accept it with --allow-incomplete.")
    first, *others = domains.values()
    for domain in others:
        if unlike := _unlike(set(domain.images.classes), set(first.images.classes)):
            which = f"the domain {domain.name} in '{domain.images.root}'"
            problem = f"Compared with {first.name}, {which} {unlike}"
            raise DataError("classes-differ", f"{problem}; rename or complete classes.")
    return FoundBenchmark(benchmark, root, domains, differences)


def _difference(benchmark: Benchmark, domain: Domain, on_disk: FoundDomain) -> str | None:
    """How a domain differs from the published one; classes before counts."""
    images = on_disk.images
    published = {*benchmark.class_names, *domain.per_class}
    if published and (unlike := _unlike(set(images.classes), published)):
        return f"{domain.name} {unlike}"
    if len(images.classes) != benchmark.classes:
        return f"{domain.name} has {len(images.classes)} classes where {benchmark.classes} were published"
    here = images.counts()
    wrong = [f"{name} {here[name]} of {count}" for name, count in domain.per_class.items() if here[name] != count]
    if len(images) != domain.images or wrong:
        which = f" ({first_of(wrong)})" if wrong else ""
        return f"{domain.name} has {len(images):,} images where {domain.images:,} were published{which}"
    return None


def _unlike(classes: set[str], expected: set[str]) -> str:
    """'lacks the class ... and has the unknown class ...'; empty for equal classes."""
    sides = (("lacks the class", expected - classes), ("has the unknown class", classes - expected))
    return " and ".join(f"{what} {named(sorted(names))}" for what, names in sides if names)


# Layouts on disk


def _plain(name: str) -> str:
    """The name in lower case without separators: 'Real World', 'Real_World' and 'RealWorld' are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def dataset_root(data: Path, domains: Sequence[str], title: str) -> Path:
    """The folder with most of the domains: `data`, or a folder in it, because archives often have one more level."""
    if not data.is_dir():
        problem = f"There is no folder '{data}' with {title}"
        raise MissingFileError("benchmark-missing", f"{problem}: set --data to its folder.")
    candidates = [data, *subfolders(data)]
    return max(candidates, key=lambda root: sum(any(_places(root, name)) for name in domains))


def find_domain(root: Path, name: str, title: str) -> FoundDomain:
    """The domain from its list if it has one, because a list also fixes the class numbers; else from class folders."""
    lists, folder = _places(root, name)
    if lists:
        files = " and ".join(os.path.relpath(file, root) for file in lists)
        together = f"lists {files} together" if len(lists) > 1 else f"list {files}"
        return FoundDomain(name, _read_lists(lists, root, folder), None, together)
    if folder is None:
        inside = named([entry.name for entry in listing(root)]) or "nothing"
        expected = f"expected a folder '{name}' or a list '{name}.txt', found {inside}"
        raise MissingFileError("domain-missing", f"'{root}' has no domain {name} of {title}: {expected}.")
    inner = folder / INNER_FOLDER
    folder = inner if inner.is_dir() else folder
    return FoundDomain(name, scan_labelled(folder), folder, f"folder {os.path.relpath(folder, root)}")


def _places(root: Path, name: str) -> tuple[list[Path], Path | None]:
    """The list of a whole domain, or its train and test lists, which together are the whole domain; and its folder."""
    domain = _plain(name)
    folder = next((folder for folder in subfolders(root) if _plain(folder.name) == domain), None)
    files = {_plain(file.stem): file for place in (root / LIST_FOLDER, root) for file in _texts(place)}
    for stems in ([domain], [f"{domain}list"], [f"{domain}train", f"{domain}test"]):
        if files.keys() >= {*stems}:
            return [files[stem] for stem in stems], folder
    inside = [file for file in _texts(folder) if _plain(file.stem).endswith("imagelist")] if folder else []
    return inside[:1], folder


def _texts(folder: Path) -> list[Path]:
    entries = listing(folder) if folder.is_dir() else []
    return [Path(entry) for entry in entries if entry.name.endswith(".txt") and entry.is_file()]


def _read_lists(lists: list[Path], root: Path, folder: Path | None) -> LabelledDomain:
    paths: list[str] = []
    labels: list[str] = []
    for file in lists:
        numbers, listed, texts = zip(*labelled_lines(file), strict=True)
        here = _below(root, file, [path.split("/") for path in listed], folder)
        paths += existing(file, root, zip(numbers, here, strict=True), cure="put the images there")
        labels += texts
    return labelled_domain(root, tuple(paths), labels)


def _below(root: Path, file: Path, paths: list[list[str]], folder: Path | None) -> list[str]:
    """The listed paths relative to `root`. The first one that exists here decides, for all of them, how many leading
    folders to cut (the fewest) and where the rest starts."""
    places = [file.parent, root, *([folder, folder / INNER_FOLDER] if folder else [])]
    rules = (
        (cut, place)
        for names in paths
        for cut in range(len(names))
        for place in places
        if os.path.isfile(os.path.join(place, *names[cut:]))
    )
    cut, place = next(rules, (0, root))
    return [os.path.normpath(os.path.join(os.path.relpath(place, root), *names[cut:])) for names in paths]
