"""The tables of the paper, every row and cell as printed (paper/printed/*.csv), and the rows of its Tables 5 and 6 with
the settings that make them.

Cells are text, so that '100.' and '97.77' are shown as in the paper. disagreements.csv lists every number that
contradicts another one of the paper; tests recompute them. methods.csv says which method of this project and which
backbone a printed average is of.
"""

import csv
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

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


class Variant(NamedTuple):
    """A row of the paper's table: the paper's name for it, its folder, and its settings: all that the rows of one
    method differ in, so that no configuration decides one of them for some rows."""

    paper: str
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


def _losses(source: str, source_target: str, target: str) -> Variant:
    words = (source, source_target, target)
    settings = dict(zip(("loss_source", "loss_source_target", "loss_target"), words, strict=True))
    return Variant(" ".join("-" if word == "none" else word for word in words), "-".join(words), settings)


LEFT_OUT = (
    "A loss that is left out is left out of the sum, and of nothing else: all three branches run and pass through the "
    "head's BatchNorm, so that also a model without any loss on the target takes in the target's statistics."
)

LOSS_ABLATION = Ablation(
    name="losses",
    title="Different losses (the paper's Table 6)",
    named_by=("L_s", "L_s+t", "L_t"),
    variants=(
        _losses("cls", "none", "none"),
        _losses("none", "none", "cls"),
        _losses("cls", "none", "cls"),
        _losses("cls", "cls", "cls"),
        _losses("cls", "dtl", "cls"),
    ),
    notes=(
        "The paper's first row repeats its source-only baseline; here it is stage 2 with the source's loss alone, on "
        "the source images of the pairs.",
        LEFT_OUT,
    ),
)


def _pairs(paper: str, folder: str, pairing: str, *, center_aware: bool = False) -> Variant:
    """Without the centres, a target image is taught the class of its pair."""
    taught = {"center_aware": center_aware, "target_class": "center" if center_aware else "pair"}
    return Variant(paper, folder, {"method": "cdtrans", "pairing": pairing, **taught})


PSEUDO_LABEL_ABLATION = Ablation(
    name="pseudo-labels",
    title="Different pseudo labels (the paper's Table 5)",
    named_by=("Pseudo labels",),
    variants=(
        _pairs("One-way-source", "one-way-source", "one_way_source"),
        _pairs("One-way-target", "one-way-target", "one_way_target"),
        _pairs("Two-way", "two-way", "two_way"),
        _pairs("Tw + Ca", "two-way-center-aware", "two_way", center_aware=True),
        Variant("RPLL", "rpll", {"method": "rpll"}, measured=False),
        Variant("MRKLD+LRENT", "mrkld-lrent", {"method": "mrkld_lrent"}, measured=False),
        Variant("Groundtruth", "ground-truth", {"method": "ground_truth"}, with_labels=True),
    ),
    notes=(
        "Rec_s and Rec_t: the share of the source and the target images that are in some pair; Prec: the share of the "
        "pairs whose two images are of one class. Ours are those of the last search; the JSON has every round's.",
        "Without the centre-aware filter a target image is taught the class of its source image (`--target-class "
        "pair`), since the paper's pairs are its pseudo labels; the authors' code teaches the nearest centre's class.",
        "RPLL and MRKLD+LRENT train on pseudo labels of their own and without pairs or cross-attention, all else as in "
        "the other rows; source and target images meet by chance. RPLL (Zheng & Yang 2021): every target image has its "
        "prediction as label, and the loss exp(-D) CE + D, D = KL between two predictions; these are two draws of "
        "stochastic depth, not two classifiers as in the original. MRKLD+LRENT (Zou et al. 2019): the most confident "
        "images of each class, from 20% in the first round to 50% in the last, soft labels with alpha 0.25, and "
        "0.1 KL(uniform, prediction) on the same images. An epoch of theirs has as many images as the larger of source "
        "and selected target, one of the other rows as many as there are pairs: the number of steps differs. The paper "
        "says only that it reproduced their pseudo labels.",
    ),
    about_pairs=True,
)
