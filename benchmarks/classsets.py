"""Targets with other classes than the source, on frozen features: what is noticed, told and asked is worth.

    python benchmarks/classsets.py DATA --table partial|open|labels --weights FILE [--features FOLDER]

DATA as for instant.py. `partial`: accuracy of the graphs' labels where the target has few of the classes, all of them,
and all of them thinned out to 10:1. `open`: images of no class. `labels`: images to label (page 3 of `cdtrans ask`).
A person is simulated with the true labels. The splits are the usual ones (docs/results/classsets.md)."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tasks import Features, class_count, encoded_domains, feature_parser, thinned
from torch import Tensor

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.graphs import Start, label_from
from cdtrans.pairing.occurring import absent_classes
from cdtrans.pairing.pairs import Domains

OFFICE_CALTECH = (0, 1, 5, 10, 11, 12, 15, 16, 17, 22)  # in the alphabetical order of Office-31's classes
PRIVATE = (2, 3, 4, 6, 7, 8, 9, 13, 14, 18)  # the source's own in Office-31's open-partial split


class Split(NamedTuple):
    """Classes by number: in both domains, in the source alone, in the target alone."""

    shared: list[int]
    source: list[int]
    target: list[int]


class Task(NamedTuple):
    """The source's classes are numbered anew, the shared ones first; an image of another class has the number K."""

    domains: Domains
    truth: Tensor  # [Nt]
    classes: int  # K
    shared: int
    leading: int


def splits_of(classes: int, kind: str) -> list[Split]:
    every = list(range(classes))
    if kind in ("closed", "thin"):
        return [Split(every, [], [])]
    if classes == 31:
        first, own = list(OFFICE_CALTECH), list(PRIVATE)
        rest = [k for k in every if k not in first + own]
        down = every[::-1]
        return {
            "partial": [Split(first, own + rest, []), Split(down[:10], down[10:], [])],
            "open": [Split(first, [], rest), Split(down[:10], [], down[20:])],
            "open-partial": [Split(first, own, rest), Split(down[:10], down[10:20], down[20:])],
        }[kind]
    if classes == 65:
        return [
            {"partial": Split(every[:25], every[25:], []), "open": Split(every[:25], [], every[25:])}.get(
                kind, Split(every[:10], every[10:15], every[15:])
            )
        ]
    draws = (every, every[::-1])
    if kind == "partial":
        return [Split(d[:3], d[3:], []) for d in draws]
    return [Split(d[:4], [], d[4:]) if kind == "open" else Split(d[:3], d[3:5], d[5:]) for d in draws]


def tasks(domains: dict[str, Features], kind: str) -> Iterator[tuple[str, Task]]:
    for (a, source), (b, target) in itertools.permutations(domains.items(), 2):
        for n, split in enumerate(splits_of(class_count(domains), kind)):
            yield f"{a} > {b} ({n})", make_task(source, target, split, thin=kind == "thin")


def make_task(source: Features, target: Features, split: Split, *, thin: bool = False) -> Task:
    ours = split.shared + split.source
    number = torch.full((1 + max(int(source.labels.max()), int(target.labels.max())),), len(ours))
    number[torch.tensor(ours)] = torch.arange(len(ours))
    rows = torch.isin(source.labels, torch.tensor(ours))
    columns = torch.isin(target.labels, torch.tensor(split.shared + split.target))
    x, y, z, truth = source.x[rows], number[source.labels[rows]], target.x[columns], number[target.labels[columns]]
    if thin:
        some = thinned(truth, 10, 0)
        z, truth = z[some], truth[some]
    none = torch.zeros(0)
    return Task(Domains(Encoded(x, none), y, Encoded(z, none)), truth, len(ours), len(split.shared), source.leading)


def correct(labels: Tensor, truth: Tensor) -> float:
    return 100 * float((labels == truth).double().mean())


def labelled(start: Start, occurs: Tensor | None) -> Tensor:
    """[Nt] the graphs' labels if these classes occur, [K] bool."""
    if occurs is None:
        return label_from(start, None).probabilities.argmax(dim=1)
    return occurs.nonzero().squeeze(1)[label_from(start.only(occurs), None).probabilities.argmax(dim=1)]


def partial(domains: dict[str, Features]) -> None:
    table: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind in ("partial", "closed", "thin"):
        fired, found, lost = 0, [0, 0], [0, 0]
        for name, task in tasks(domains, kind):
            start = Start.of(task.domains, classes=task.classes, leading=task.leading)
            there = torch.bincount(task.truth, minlength=task.classes)[: task.classes] > 0
            absent = absent_classes(start)
            today = labelled(start, None)
            rows = {"source only": start.probe.argmax(dim=1), "nothing noticed": today}
            rows["noticed"] = today if absent is None else labelled(start, ~absent)
            rows["told"] = today if there.all() else labelled(start, there)
            for row, labels in rows.items():
                table[row][kind].append(correct(labels, task.truth))
            if absent is not None:
                fired += 1
                found[0] += int((absent & ~there).sum())
                lost[0] += int((absent & there).sum())
            found[1] += int((~there).sum())
            lost[1] += int(there.sum())
            print(kind, name, *(f"{row} {values[kind][-1]:.1f}" for row, values in table.items()), flush=True)
        print(f"{kind}: the rule fired on {fired}; absent classes found {found}, present ones lost {lost}", flush=True)
    print_table(table)


def print_table(table: dict[str, dict[str, list[float]]]) -> None:
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    print("|  |", " | ".join(columns), "|\n|---|", "---|" * len(columns), sep="")
    for row, values in table.items():
        cells = (f"{np.mean(values[column]):.1f}" if column in values else "" for column in columns)
        print(f"| {row} |", " | ".join(cells), "|")


TABLES = {"partial": partial}


def main() -> None:
    parser = feature_parser(__doc__)
    parser.add_argument("--table", choices=TABLES, default="partial")
    arguments = parser.parse_args()
    TABLES[arguments.table](encoded_domains(arguments.data, arguments))


if __name__ == "__main__":
    main()
