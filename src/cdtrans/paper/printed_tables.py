"""The tables of the paper, every row and cell as printed (paper/printed/*.csv).

Cells are text, so that '100.' and '97.77' are shown as in the paper. disagreements.csv lists every number that
contradicts another one of the paper; tests recompute them.
"""

import csv
from decimal import Decimal
from importlib import resources
from typing import NamedTuple

NO_VALUE = "-"
AVERAGE = "Avg."  # the last column, and the last row of a grid


# Rows by the names of this project's methods. CDAN's row on DomainNet is without entropy.
METHODS = {
    **{"ResNet-50": "source_only", "Baseline": "source_only", "Base": "source_only", "Ours": "cdtrans"},
    **{"MinEnt": "minent", "BNM": "bnm", "DANN": "dann", "CDAN+E": "cdan_e", "CDAN": "cdan_e", "CDAN+BSP": "cdan_bsp"},
    **{"rRGrad+CAT": "cat", "SAFN+ENT": "safn_ent", "TVT": "tvt", "MCD": "mcd", "SWD": "swd", "CGDM": "cgdm"},
    **{"ATDOC-NA": "atdoc_na", "SHOT": "shot", "CDAN+TN": "cdan_tn", "MSTN+DSBN": "mstn_dsbn", "DCAN": "dcan"},
    **{"RPLL": "rpll", "MRKLD+LRENT": "mrkld_lrent"},
}
MARKS = {"-S": "DeiT-S", "-B": "DeiT-B", "-S*": "DeiT-S", "-B*": "DeiT-B", "°": "ViT-B/16, ImageNet-21k"}


class PrintedMean(NamedTuple):
    """A method's average on a benchmark, as printed."""

    mean: str
    backbone: str


class PaperRow(NamedTuple):
    method: str
    cells: dict[str, str]  # column -> printed text; the last is the average


class PaperGrid(NamedTuple):
    """A method on DomainNet: source -> target -> printed text, with the averages of both."""

    method: str
    cells: dict[str, dict[str, str]]

    def cell(self, source: str, target: str) -> str:
        return self.cells[source][target]


class Disagreement(NamedTuple):
    """A printed number that another one of the paper contradicts."""

    table: str
    row: str
    column: str
    printed: str
    expected: str
    why: str


def paper_table(name: str, named_by: int = 1) -> tuple[PaperRow, ...]:
    """'visda2017', 'office-home', 'office31', 'pseudo-labels' (Table 5), 'losses' (Table 6). The first `named_by`
    columns name the row; for the losses it is three of them."""
    header, *rows = _read(name)
    columns = [*header[named_by:-1], AVERAGE]
    return tuple(PaperRow(" ".join(row[:named_by]), dict(zip(columns, row[named_by:], strict=True))) for row in rows)


def paper_grids() -> tuple[PaperGrid, ...]:
    """DomainNet."""
    (_, _, *columns), *rows = _read("domainnet")
    grids: dict[str, dict[str, dict[str, str]]] = {}
    for method, source, *cells in rows:
        grids.setdefault(method, {})[source] = dict(zip(columns, cells, strict=True))
    return tuple(PaperGrid(method, cells) for method, cells in grids.items())


def printed_means(name: str) -> dict[str, tuple[PrintedMean, ...]]:
    """A benchmark's averages, by the names of this project's methods and 'source_only'."""
    if name == "domainnet":
        rows = [(grid.method, grid.cell(AVERAGE, AVERAGE), "ResNet-50") for grid in paper_grids()]
    else:
        resnet = "ResNet-101" if name == "visda2017" else "ResNet-50"
        rows = [(row.method, row.cells[AVERAGE], resnet) for row in paper_table(name)]
    if name == "visda2017":  # Table 5 has two more
        rows += [
            (row.method, row.cells[AVERAGE], "DeiT-B") for row in paper_table("pseudo-labels") if row.method in METHODS
        ]
    means: dict[str, tuple[PrintedMean, ...]] = {}
    for title, mean, backbone in rows:
        plain, backbone = _without_mark(title, backbone)
        means[METHODS[plain]] = (*means.get(METHODS[plain], ()), PrintedMean(mean, backbone))
    return means


def _without_mark(title: str, backbone: str) -> tuple[str, str]:
    """A row's method and backbone, which a mark after its name may say; '*' alone is a rerun by the CDTrans authors."""
    if title in METHODS:
        return title, backbone
    for mark, marked in MARKS.items():
        if title.removesuffix(mark) in METHODS:
            return title.removesuffix(mark), marked
    return title.removesuffix("*"), f"{backbone}, rerun"


def disagreements() -> tuple[Disagreement, ...]:
    return tuple(Disagreement(*row) for row in _read("disagreements")[1:])


def number(cell: str) -> Decimal | None:
    """The number in a cell, None for an empty one."""
    return None if cell == NO_VALUE else Decimal(cell)


def _read(name: str) -> list[list[str]]:
    file = resources.files("cdtrans.paper") / "printed" / f"{name}.csv"
    return list(csv.reader(file.read_text(encoding="utf-8").splitlines()))
