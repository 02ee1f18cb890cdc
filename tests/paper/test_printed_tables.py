"""The paper's tables as data: complete, as printed, and every contradiction in them known."""

from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from importlib import resources

import pytest

from cdtrans.inputs.benchmarks import BENCHMARKS, DOMAINNET, VISDA2017
from cdtrans.paper.printed_tables import AVERAGE, Disagreement, disagreements, paper_grids, paper_table
from support import says


def number(cell: str) -> Decimal | None:
    """The number in a cell, None for an empty one."""
    return None if cell == "-" else Decimal(cell)


ABBREVIATED = {"aeroplane": "plane", "bicycle": "bcycl", "motorcycle": "mcycl", "skateboard": "sktbrd"}
CLASSES = [ABBREVIATED.get(name, name) for name in VISDA2017.class_names]
PAIRS = ("Rec_s", "Rec_t", "Prec")  # columns of Table 5 that are not in the average
# Three tables report one model each, twice: (table, row) and (table, row) should be equal where both have a column.
SAME_MODEL = (
    (("visda2017", "Ours-B"), ("pseudo-labels", "Tw + Ca")),
    (("losses", "cls dtl cls"), ("pseudo-labels", "Tw + Ca")),
    (("losses", "cls - -"), ("visda2017", "Baseline-B")),
)


def rounded(values: Sequence[Decimal]) -> set[Decimal]:
    """The mean to the paper's one decimal; of a tie both ways are right."""
    mean = sum(values) / Decimal(len(values))
    return {mean.quantize(Decimal("0.1"), way) for way in (ROUND_HALF_UP, ROUND_HALF_DOWN)}


def averages() -> Iterator[tuple[str, str, str, str, list[Decimal]]]:
    """(table, row, column, printed average, the numbers it should be the mean of)."""
    for name in ("visda2017", "office-home", "office31", "pseudo-labels", "losses"):
        for row, by_column in paper_table(name).items():
            cells = [number(cell) for column, cell in by_column.items() if column not in (*PAIRS, AVERAGE)]
            yield name, row, AVERAGE, by_column[AVERAGE], [cell for cell in cells if cell is not None]
    names = [domain.short for domain in DOMAINNET.domains]
    for method, grid in paper_grids().items():
        for source in (*names, AVERAGE):
            for target in (*names, AVERAGE):
                sources = names if source == AVERAGE else [source]
                targets = names if target == AVERAGE else [target]
                if AVERAGE in (source, target):
                    cells = [number(grid[s][t]) for s in sources for t in targets]
                    numbers = [cell for cell in cells if cell is not None]
                    yield "domainnet", f"{method} {source}", target, grid[source][target], numbers


def wrong_averages() -> dict[tuple[str, str, str, str], Decimal]:
    found = {}
    for name, row, column, printed, numbers in averages():
        if Decimal(printed) not in rounded(numbers):
            found[name, row, column, printed] = sum(numbers) / Decimal(len(numbers))
    return found


def known(about_averages: bool) -> list[Disagreement]:
    return [d for d in disagreements() if (d.column == AVERAGE) == about_averages]


def test_the_averages_that_disagree_with_their_rows_are_exactly_the_known_ones() -> None:
    assert {d[:4] for d in known(True)} == wrong_averages().keys()
    assert len(known(True)) == 7


def test_every_known_disagreement_says_the_right_mean_and_whether_rounding_explains_it() -> None:
    """Each cell and the average are rounded by 0.05 at most, so a difference beyond 0.1 is no rounding."""
    found = wrong_averages()
    for d in known(True):
        mean = found[d[:4]]
        assert Decimal(d.expected) in rounded([mean])
        assert f"is {mean:.3f}: " in d.why
        beyond = abs(Decimal(d.printed) - mean) > Decimal("0.1")
        assert ("more than rounding" in d.why) == beyond


def test_one_model_in_two_tables_differs_exactly_where_it_is_known_to() -> None:
    found = set()
    for (name, method), (other_name, other_method) in SAME_MODEL:
        row, other = paper_table(name)[method], paper_table(other_name)[other_method]
        for column in row:
            if row[column] != other[column]:
                why = f"the same model in {other_name} ({other_method})"
                found.add(Disagreement(name, method, column, row[column], other[column], why))
    assert found == set(known(False))
    assert len(found) == 13


def test_no_row_is_missing() -> None:
    assert [*paper_table("office31")][-6:] == [*("Baseline-S", "Ours-S", "Baseline-B", "CGDM-B*", "SHOT-B*", "Ours-B")]
    rows = {
        name: len(paper_table(name)) for name in ("visda2017", "office-home", "office31", "pseudo-labels", "losses")
    }
    assert rows == {"visda2017": 17, "office-home": 15, "office31": 16, "pseudo-labels": 7, "losses": 5}
    assert [*paper_grids()] == [*("MCD", "CDAN", "BNM", "SWD", "CGDM", "Base-S", "Ours-S", "Base-B", "Ours-B")]


def test_the_columns_are_the_benchmark_s_tasks_or_classes() -> None:
    expected = {name: [task.name for task in BENCHMARKS[name].tasks] for name in ("office31", "office-home")}
    expected |= {"visda2017": CLASSES, "losses": CLASSES, "pseudo-labels": [*PAIRS, *CLASSES]}
    for name, columns in expected.items():
        assert all(list(cells) == [*columns, AVERAGE] for cells in paper_table(name).values())


def test_the_grids_are_domainnet_s_with_an_empty_diagonal() -> None:
    names = [*(domain.short for domain in DOMAINNET.domains), AVERAGE]
    for grid in paper_grids().values():
        assert list(grid) == names
        assert all(list(row) == names for row in grid.values())
        empty = {(s, t) for s in names for t in names if grid[s][t] == "-"}
        assert empty == {(name, name) for name in names[:-1]}


IN_PAPER = [benchmark.name for benchmark in BENCHMARKS.values() if benchmark.in_paper]


@pytest.mark.parametrize("name", [f"{name}-deit-{size}" for name in IN_PAPER for size in ("small", "base")])
def test_what_a_recipe_tells_to_expect_is_what_is_printed(name: str) -> None:
    benchmark, size = name.split("-deit-")
    text = (resources.files("cdtrans") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert {"Recipe: ", "Expected: ", "Cost: "} <= {f"{word} " for word in comment.split()}
    assert says(comment, f"cdtrans bench {benchmark}", f"--backbone deit_{size}")
    letter = size[0].upper()
    if benchmark == "domainnet":
        printed = {method: grid[AVERAGE][AVERAGE] for method, grid in paper_grids().items()}
        baseline = printed[f"Base-{letter}"]
    else:
        printed = {row: cells[AVERAGE] for row, cells in paper_table(benchmark).items()}
        baseline = printed.get(f"Baseline-{letter}", "")
    if f"Ours-{letter}" in printed:
        assert says(comment, "paper", f" {printed[f'Ours-{letter}']} ", f" {baseline})", "target labels")
    else:
        assert says(comment, "paper", "no number")


def test_cells_are_what_is_printed() -> None:
    office31 = paper_table("office31")
    assert office31["Ours-B"]["W>D"] == "100."
    assert number(office31["Ours-B"]["W>D"]) == 100
    rpll = paper_table("pseudo-labels")["RPLL"]
    assert (rpll["mcycl"], rpll["Prec"], number(rpll["Prec"])) == ("97.77", "-", None)
    numbers = [
        number(cell)
        for name in ("visda2017", "losses")
        for cells in paper_table(name).values()
        for cell in cells.values()
    ]
    assert all(n is not None and 0 < n <= 100 for n in numbers)
