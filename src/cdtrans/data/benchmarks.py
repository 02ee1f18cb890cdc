"""The paper's four benchmarks: their domains and tasks, and whether a folder really holds them.

A run never sees more of a benchmark than `adapt` takes: a labelled source, and a target without labels. The target's
labels are for scoring afterwards.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from cdtrans.data.layouts import FoundDomain, dataset_root, find_domain, plain
from cdtrans.errors import CdtransError, nearest

ARROWS = (">", "→", "-")  # '-' last: 'A->W' and 'Real-World>Art' have a better one; 'A-W' needs no quotes in a shell
NAMED_CLASSES = 3  # more differing classes than this make a sentence unreadable


@dataclass(frozen=True)
class Domain:
    """`short` is the paper's abbreviation, `name` the official folder, `images` the published count."""

    short: str
    name: str
    images: int
    aliases: tuple[str, ...] = ()

    def is_called(self, word: str) -> bool:
        return plain(word) in {plain(name) for name in (self.short, self.name, *self.aliases)}


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
    class_names: tuple[str, ...] = ()  # where they are known beforehand
    one_way: bool = False  # only from the first domain to the second
    class_mean: bool = False  # scored by the mean of the classes' accuracies, not by the share of right images

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
        known = [name for task in self.tasks for name in (task.name, task.long_name)]
        hint = nearest(text, known) if len(known) < 30 else f"write it like {known[0]} or {known[1]}."
        raise CdtransError(f"'{text}' is no task of {self.title}: {hint}")


# Image counts are those of the authors' lists (docs/method.md, section 4.1). VisDA's `train` is not in them: its count is
# from its own paper. Nor are DomainNet's `quickdraw` and `real`: these are the sums of the official train and test
# lists, 120,750 + 51,750 and 120,906 + 52,041.
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
BENCHMARKS = {b.name: b for b in (OFFICE31, OFFICE_HOME, VISDA2017, DOMAINNET)}


def benchmark_named(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise CdtransError(f"Unknown benchmark '{name}': {nearest(name, list(BENCHMARKS))}")
    return BENCHMARKS[name]


@dataclass(frozen=True)
class FoundBenchmark:
    """The domains that some tasks need, and in what they differ from the published ones."""

    benchmark: Benchmark
    root: Path
    domains: dict[str, FoundDomain]  # by the domain's name
    differences: tuple[str, ...]


def find_benchmark(
    benchmark: Benchmark, data: Path, tasks: Sequence[Task], *, allow_incomplete: bool = False
) -> FoundBenchmark:
    """Find and check the domains of these tasks. What differs from the published benchmark is an error, or is noted if
    that is allowed; but the domains must always agree on the classes, or no model could be scored."""
    needed = [d for d in benchmark.domains if any(d in task for task in tasks)]
    root = dataset_root(data, [d.name for d in benchmark.domains], benchmark.title)
    found = {d.name: find_domain(root, d.name, benchmark.title) for d in needed}
    differences = [_difference(benchmark, d, found[d.name]) for d in needed]
    noted = tuple(difference for difference in differences if difference)
    if noted and not allow_incomplete:
        raise CdtransError(
            f"{benchmark.title} in '{root}' is not as it was published: {noted[0]}; complete it, or accept it as it is"
            " with --allow-incomplete."
        )
    _check_same_classes(list(found.values()))
    return FoundBenchmark(benchmark, root, found, noted)


def published_class_counts(benchmark: Benchmark) -> dict[str, dict[str, int]]:
    """domain -> class -> images, for the benchmarks whose own files they were counted from: Office-31."""
    file = resources.files("cdtrans.data") / "counts" / f"{benchmark.name}.csv"
    if not file.is_file():
        return {}
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    return {d.name: {row["class"]: int(row[d.name]) for row in rows} for d in benchmark.domains}


def _difference(benchmark: Benchmark, domain: Domain, found: FoundDomain) -> str | None:
    """In what a domain differs from the published one; classes before counts."""
    images = found.images
    counts = published_class_counts(benchmark).get(domain.name, {})
    known = set(benchmark.class_names) | set(counts)
    if known and set(images.classes) != known:
        strange, absent = sorted(set(images.classes) - known), sorted(known - set(images.classes))
        said = [f"lacks the class{_named(absent)}"] if absent else []
        said += [f"has the unknown class{_named(strange)}"] if strange else []
        return f"{domain.name} {' and '.join(said)}"
    if len(images.classes) != benchmark.classes:
        return f"{domain.name} has {len(images.classes)} classes where {benchmark.classes} were published"
    seen = dict(zip(images.classes, images.counts(), strict=True))
    wrong = [f"{name} {seen[name]} of {count}" for name, count in counts.items() if seen[name] != count]
    if len(images) != domain.images or wrong:
        which = f" ({', '.join(wrong[:NAMED_CLASSES])}{', ...' if len(wrong) > NAMED_CLASSES else ''})" if wrong else ""
        return f"{domain.name} has {len(images):,} images where {domain.images:,} were published{which}"
    return None


def _check_same_classes(domains: list[FoundDomain]) -> None:
    """The domain that differs is compared with the one that the others agree with."""
    sets = [set(found.images.classes) for found in domains]
    usual = max(sets, key=sets.count)
    agreed = domains[sets.index(usual)].name
    for found, classes in zip(domains, sets, strict=True):
        if classes != usual:
            strange, absent = sorted(classes - usual), sorted(usual - classes)
            said = [f"only {found.name} has the class{_named(strange)}"] if strange else []
            said += [f"only {agreed} has the class{_named(absent)}"] if absent else []
            raise CdtransError(
                f"The domains {agreed} and {found.name} in '{found.images.root}' differ in their classes:"
                f" {' and '.join(said)}; rename or complete them."
            )


def _named(classes: list[str]) -> str:
    shown = ", ".join(map(repr, classes[:NAMED_CLASSES]))
    more = f" and {len(classes) - NAMED_CLASSES} more" if len(classes) > NAMED_CLASSES else ""
    return f"{'es' if len(classes) > 1 else ''} {shown}{more}"
