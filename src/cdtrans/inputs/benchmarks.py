"""The paper's four benchmarks and PACS: their domains and tasks, and a check that a folder holds them.

`adapt` gets a labelled source and a target without labels. The target labels are for scoring afterwards.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from cdtrans.errors import CdtransError, nearest
from cdtrans.inputs.layouts import FoundDomain, dataset_root, find_domain, plain

ARROWS = (
    ">",
    "→",
    "-",
)  # '-' last: 'A->W' and 'Real-World>Art' contain it too; 'A-W' needs no quotes in a shell
NAMED_CLASSES = 3  # differing classes named in an error; more would make it unreadable
HINTED_TASKS = 30  # task names up to which an error suggests the nearest one


@dataclass(frozen=True)
class Domain:
    """`short` is the paper's abbreviation, `name` the official folder, `images` the published count."""

    short: str
    name: str
    images: int
    aliases: tuple[str, ...] = ()

    def is_called(self, text: str) -> bool:
        return plain(text) in {plain(name) for name in (self.short, self.name, *self.aliases)}


class Task(NamedTuple):
    source: Domain
    target: Domain

    @property
    def name(self) -> str:
        """As the paper writes it: A>W."""
        return f"{self.source.short}>{self.target.short}"

    @property
    def long_name(self) -> str:
        return f"{self.source.name}>{self.target.name}"

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
    def tasks(self) -> tuple[Task, ...]:
        """In the order of the paper's columns."""
        both_ways = tuple(Task(source, target) for source, target in permutations(self.domains, 2))
        return both_ways[:1] if self.one_way else both_ways

    def task(self, text: str) -> Task:
        """'A>W', 'amazon>webcam', 'A->W' or 'A-W' -> the task."""
        arrow = next((arrow for arrow in ARROWS if arrow in text), None)
        if arrow is not None:
            source, target = (part.strip() for part in text.split(arrow, 1))
            for task in self.tasks:
                if task.source.is_called(source) and task.target.is_called(target):
                    return task
        names = [name for task in self.tasks for name in (task.name, task.long_name)]
        hint = nearest(text, names) if len(names) < HINTED_TASKS else f"write it like {names[0]} or {names[1]}."
        raise CdtransError(f"'{text}' is not a task of {self.title}: {hint}")


# Image counts are those of the authors' lists (docs/method.md, section 4.1). Three are not in them: VisDA's `train` is
# the count of its own paper; DomainNet's `quickdraw` and `real` are the sums of the official train and test lists,
# 120,750 + 51,750 and 120,906 + 52,041.
OFFICE31 = Benchmark(
    "office31",
    "Office-31",
    (Domain("A", "amazon", 2817), Domain("D", "dslr", 498), Domain("W", "webcam", 795)),
    classes=31,
)
OFFICE_HOME = Benchmark(
    "office-home",
    "Office-Home",
    (
        Domain("Ar", "Art", 2427),
        Domain("Cl", "Clipart", 4365),
        Domain("Pr", "Product", 4439),
        Domain("Re", "Real_World", 4357, ("Rw", "Real")),
    ),
    classes=65,
)
VISDA2017 = Benchmark(
    "visda2017",
    "VisDA-2017",
    (Domain("S", "train", 152_397, ("synthetic",)), Domain("R", "validation", 55_388, ("real",))),
    classes=12,
    class_names=(
        *("aeroplane", "bicycle", "bus", "car", "horse", "knife"),
        *("motorcycle", "person", "plant", "skateboard", "train", "truck"),
    ),
    one_way=True,
    class_mean=True,
)
DOMAINNET = Benchmark(
    "domainnet",
    "DomainNet",
    (
        Domain("clp", "clipart", 48_129),
        Domain("inf", "infograph", 51_605),
        Domain("pnt", "painting", 72_266),
        Domain("qdr", "quickdraw", 172_500),
        Domain("rel", "real", 172_947),
        Domain("skt", "sketch", 69_128),
    ),
    classes=345,
)
PACS = Benchmark(
    "pacs",
    "PACS",
    (
        Domain("P", "photo", 1670),
        Domain("A", "art_painting", 2048, ("art",)),
        Domain("C", "cartoon", 2344),
        Domain("S", "sketch", 3929),
    ),
    classes=7,
    in_paper=False,
)
BENCHMARKS = {b.name: b for b in (OFFICE31, OFFICE_HOME, VISDA2017, DOMAINNET, PACS)}


def benchmark_named(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise CdtransError(f"Unknown benchmark '{name}': {nearest(name, list(BENCHMARKS))}")
    return BENCHMARKS[name]


@dataclass(frozen=True)
class FoundBenchmark:
    """The domains that the chosen tasks need, and how they differ from the published ones."""

    benchmark: Benchmark
    root: Path
    domains: dict[str, FoundDomain]  # by the domain's name
    differences: tuple[str, ...]


def find_benchmark(
    benchmark: Benchmark, data: Path, tasks: Sequence[Task], *, allow_incomplete: bool = False
) -> FoundBenchmark:
    """Find and check the domains of these tasks. A difference from the published benchmark is an error; with
    `allow_incomplete` it is noted. The domains must always have the same classes, or no model could be scored."""
    needed = [d for d in benchmark.domains if any(d in task for task in tasks)]
    root = dataset_root(data, [d.name for d in benchmark.domains], benchmark.title)
    domains = {d.name: find_domain(root, d.name, benchmark.title) for d in needed}
    differences = tuple(text for d in needed if (text := _difference(benchmark, d, domains[d.name])))
    if differences and not allow_incomplete:
        raise CdtransError(
            f"{benchmark.title} in '{root}' differs from the published data: {differences[0]}; complete it, or accept"
            " it with --allow-incomplete."
        )
    _check_same_classes(list(domains.values()))
    return FoundBenchmark(benchmark, root, domains, differences)


def published_class_counts(benchmark: Benchmark) -> dict[str, dict[str, int]]:
    """domain -> class -> images; only Office-31 has them, counted from its own files."""
    file = resources.files("cdtrans.inputs") / "counts" / f"{benchmark.name}.csv"
    if not file.is_file():
        return {}
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    return {d.name: {row["class"]: int(row[d.name]) for row in rows} for d in benchmark.domains}


def _difference(benchmark: Benchmark, domain: Domain, on_disk: FoundDomain) -> str | None:
    """How a domain differs from the published one; classes before counts."""
    images = on_disk.images
    counts = published_class_counts(benchmark).get(domain.name, {})
    published = set(benchmark.class_names) | set(counts)
    if published and set(images.classes) != published:
        extra, missing = sorted(set(images.classes) - published), sorted(published - set(images.classes))
        parts = [f"lacks the class{_named(missing)}"] if missing else []
        parts += [f"has the unknown class{_named(extra)}"] if extra else []
        return f"{domain.name} {' and '.join(parts)}"
    if len(images.classes) != benchmark.classes:
        return f"{domain.name} has {len(images.classes)} classes where {benchmark.classes} were published"
    per_class = dict(zip(images.classes, images.counts(), strict=True))
    wrong = [f"{name} {per_class[name]} of {count}" for name, count in counts.items() if per_class[name] != count]
    if len(images) != domain.images or wrong:
        which = f" ({', '.join(wrong[:NAMED_CLASSES])}{', ...' if len(wrong) > NAMED_CLASSES else ''})" if wrong else ""
        return f"{domain.name} has {len(images):,} images where {domain.images:,} were published{which}"
    return None


def _check_same_classes(domains: list[FoundDomain]) -> None:
    """Compare each domain with the classes that most of them have."""
    class_sets = [set(domain.images.classes) for domain in domains]
    majority = max(class_sets, key=class_sets.count)
    reference = domains[class_sets.index(majority)].name
    for domain, classes in zip(domains, class_sets, strict=True):
        if classes != majority:
            extra, missing = sorted(classes - majority), sorted(majority - classes)
            parts = [f"only {domain.name} has the class{_named(extra)}"] if extra else []
            parts += [f"only {reference} has the class{_named(missing)}"] if missing else []
            raise CdtransError(
                f"The domains {reference} and {domain.name} in '{domain.images.root}' differ in their classes:"
                f" {' and '.join(parts)}; rename or complete them."
            )


def _named(classes: list[str]) -> str:
    shown = ", ".join(map(repr, classes[:NAMED_CLASSES]))
    more = f" and {len(classes) - NAMED_CLASSES} more" if len(classes) > NAMED_CLASSES else ""
    return f"{'es' if len(classes) > 1 else ''} {shown}{more}"
