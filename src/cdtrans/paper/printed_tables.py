"""The tables of the paper, every row and cell as printed (paper/printed/*.csv), and the rows of its Tables 5 and 6 with
the settings that make them (paper/ablations/*.yaml).

Cells are text, so that '100.' and '97.77' are shown as in the paper. disagreements.csv lists every number that
contradicts another one of the paper; tests recompute them. methods.csv says which method of this project and which
backbone a printed average is of."""

import csv
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from cdtrans.schema import build

AVERAGE = "Avg."  # the last column, and the last row of a grid
NAMED_BY = {"losses": 3, "domainnet": 2}  # leading columns that name a row; one in the other tables

Cells = dict[str, str]  # column -> printed text; the last is the average


class PrintedMean(NamedTuple):
    """A method's average on a benchmark, as printed."""

    mean: str
    backbone: str


class Disagreement(NamedTuple):
    """A printed number that another one of the paper contradicts."""

    table: str
    row: str
    column: str
    printed: str
    expected: str
    why: str


def paper_table(name: str) -> dict[str, Cells]:
    """The rows of 'visda2017', 'office-home', 'office31', 'domainnet' (a row for each method and source),
    'pseudo-labels' (Table 5) or 'losses' (Table 6)."""
    header, *rows = _read(name)
    named_by = NAMED_BY.get(name, 1)
    columns = [*header[named_by:-1], AVERAGE]
    return {" ".join(row[:named_by]): dict(zip(columns, row[named_by:], strict=True)) for row in rows}


def paper_grids() -> dict[str, dict[str, Cells]]:
    """DomainNet: method -> source -> target -> printed text, with the averages of both."""
    grids: dict[str, dict[str, Cells]] = {}
    for row, cells in paper_table("domainnet").items():
        method, source = row.split(" ")
        grids.setdefault(method, {})[source] = cells
    return grids


def printed_means(name: str) -> dict[str, tuple[PrintedMean, ...]]:
    """A benchmark's averages, by the names of this project's methods and 'source_only'. CDAN on DomainNet is without
    entropy; a rerun is one by the CDTrans authors."""
    means: dict[str, tuple[PrintedMean, ...]] = {}
    for benchmark, table, row, method, backbone in _read("methods")[1:]:
        if benchmark == name:
            mean = PrintedMean(paper_table(table)[row][AVERAGE], backbone)
            means[method] = (*means.get(method, ()), mean)
    return means


def disagreements() -> tuple[Disagreement, ...]:
    return tuple(Disagreement(*row) for row in _read("disagreements")[1:])


@cache
def _read(name: str) -> list[list[str]]:
    file = resources.files("cdtrans.paper") / "printed" / f"{name}.csv"
    return list(csv.reader(file.read_text(encoding="utf-8").splitlines()))


@dataclass(frozen=True)
class Variant:
    """A row of the paper's table, and the settings of its run: all that the rows of one method differ in, so that no
    configuration decides one of them for some rows."""

    paper: str  # the paper's name for it
    folder: str
    settings: dict[str, Any]
    with_labels: bool = False  # whether the run itself, and not only its score, uses target labels
    measured: bool = True  # whether it trains on pairs of images, whose quality can be measured


@dataclass(frozen=True)
class Ablation:
    """A table of the paper."""

    name: str  # name of the command, its files and the paper's table
    title: str
    named_by: tuple[str, ...]  # the columns that name a row
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()
    about_pairs: bool = False  # whether the pairs are measured too
    fixed: dict[str, Any] = field(default_factory=dict)  # settings shared by all rows

    @property
    def varied(self) -> tuple[str, ...]:
        """The settings that the rows decide."""
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.settings))


def paper_ablation(name: str) -> Ablation:
    """'pseudo-labels' (Table 5) or 'losses' (Table 6)."""
    file = resources.files("cdtrans.paper") / "ablations" / f"{name}.yaml"
    return build(Ablation, yaml.safe_load(file.read_text(encoding="utf-8")))
