"""Tables as Markdown and LaTeX, and a benchmark in the paper's layout, beside the paper's rows: table.md, table.tex."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from cdtrans.errors import counted
from cdtrans.inputs.benchmarks import DOMAINNET, Benchmark, FoundBenchmark
from cdtrans.paper.printed_tables import AVERAGE, disagreements, paper_grids, paper_table
from cdtrans.studies.results import KINDS, RunResult, Values, columns, row_title, shared_stage_1, spread, values

NOTHING = "–"
GRIDS_ACROSS = 3  # grids of DomainNet side by side in LaTeX, as in the paper
PAPER_CLASSES = {  # the paper's abbreviations in the head of its VisDA-2017 table
    "aeroplane": "plane",
    "bicycle": "bcycl",
    "motorcycle": "mcycl",
    "skateboard": "sktbrd",
}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": "$\\pm$",
    ">": "$\\to$",
    "<": "$<$",
    "°": "$^{\\circ}$",
    "–": "--",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
}


@dataclass(frozen=True)
class BenchTable:
    """The contents of a table."""

    data: FoundBenchmark
    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]
    method: str = "cdtrans"

    @property
    def benchmark(self) -> Benchmark:
        return self.data.benchmark


class Block(NamedTuple):
    """Rows of text under a head. Lines separate the groups, the last column and, in a grid, the first one."""

    head: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]


def markdown(table: BenchTable) -> str:
    text = [f"# {_title(table)}", *_before(table)]
    text += [grid(block.head, (row for group in block.groups for row in group)) for block in _blocks(table)]
    return "\n\n".join([*text, *_after(table)]) + "\n"


def latex(table: BenchTable) -> str:
    """A table environment that needs no package."""
    across = GRIDS_ACROSS if table.benchmark is DOMAINNET else 1
    blocks = _blocks(table)
    columns = "||".join([f"c|{'c' * (len(blocks[0].head) - 2)}|c"] * across)
    lines = [line for i in range(0, len(blocks), across) for line in _latex_rows(blocks[i : i + across], across)]
    return latex_table(columns, lines, " ".join([f"{_title(table)}.", *_before(table), *_after(table)]))


def _latex_rows(blocks: Sequence[Block], across: int) -> list[str]:
    """Blocks with equally many rows side by side, padded with empty cells on the right."""
    empty = ("",) * len(blocks[0].head) * (across - len(blocks))
    heads = [cell for block in blocks for cell in block.head]
    lines = [latex_row((*heads, *empty)), "\\hline"]
    for groups in zip(*(block.groups for block in blocks), strict=True):
        for rows in zip(*groups, strict=True):
            lines.append(latex_row((*(cell for row in rows for cell in row), *empty)))
        lines.append("\\hline")
    return lines


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def latex_table(columns: str, lines: Iterable[str], caption: str) -> str:
    """A table environment that needs no package. The caption is plain text."""
    begin = ["\\begin{table*}", "\\centering\\small", f"\\begin{{tabular}}{{{columns}}}", "\\hline"]
    end = ["\\end{tabular}", f"\\caption{{{escaped(caption)}}}", "\\end{table*}"]
    return "\n".join([*begin, *lines, *end]) + "\n"


def latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + " \\\\"


def escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def _title(table: BenchTable) -> str:
    backbones = sorted({result.backbone for result in table.results})
    return f"{table.benchmark.title}, {' and '.join(backbones) or 'no run finished yet'}"


def _blocks(table: BenchTable) -> list[Block]:
    return _grids(table) if table.benchmark is DOMAINNET else [_rows(table)]


def _rows(table: BenchTable) -> Block:
    """A row per method and a column per task or, for VisDA-2017, per class."""
    benchmark = table.benchmark
    names = columns(benchmark)
    ours = [(row_title(kind, table.method), *_cells(values(benchmark, table.results, kind), names)) for kind in KINDS]
    rows = paper_table(benchmark.name) if benchmark.in_paper else ()
    printed = [(f"paper: {row.method}", *row.cells.values()) for row in rows]
    head = ("Method", *(PAPER_CLASSES.get(name, name) for name in names), AVERAGE)
    return Block(head, (tuple(ours), tuple(printed)) if printed else (tuple(ours),))


def _cells(by_seed: Values, names: Sequence[str]) -> list[str]:
    return [_shown(by_seed, [name]) for name in names] + [_shown(by_seed, names)]


def _shown(by_seed: Values, names: Sequence[str]) -> str:
    return str(spread(by_seed, names) or NOTHING)


def _grids(table: BenchTable) -> list[Block]:
    """A grid per method, source by target, with the averages of both."""
    names = [domain.short for domain in table.benchmark.domains]
    both = (*names, AVERAGE)
    scores = {row_title(kind, table.method): values(table.benchmark, table.results, kind) for kind in KINDS}
    grids = {
        title: {s: {t: _averaged(by_seed, names, s, t) for t in both} for s in both}
        for title, by_seed in scores.items()
    }
    grids |= {f"paper: {printed.method}": printed.cells for printed in paper_grids()}
    return [_grid(title, both, cells) for title, cells in grids.items()]


def _grid(title: str, names: Sequence[str], cells: Mapping[str, Mapping[str, str]]) -> Block:
    rows = [(source, *(cells[source][target] for target in names)) for source in names]
    return Block((title, *names), (tuple(rows[:-1]), (rows[-1],)))


def _averaged(by_seed: Values, names: list[str], source: str, target: str) -> str:
    """The text of a cell by source and target, either of which may be the average."""
    sources = names if source == AVERAGE else [source]
    targets = names if target == AVERAGE else [target]
    pairs = [f"{s}>{t}" for s in sources for t in targets if s != t]
    return _shown(by_seed, pairs) if pairs else "-"


def over_seeds(seeds: Sequence[int]) -> str:
    numbers = ", ".join(map(str, seeds))
    return f"mean ± standard deviation over seeds {numbers}" if len(seeds) > 1 else f"one run each, seed {numbers}"


def _before(table: BenchTable) -> list[str]:
    """The paragraphs before the numbers."""
    metric = "Mean of the classes' accuracies" if table.benchmark.class_mean else "Accuracy"
    by_labels = row_title("best_by_labels", table.method)
    as_there = ", as the authors' code does for the paper's Ours rows" if table.benchmark.in_paper else ""
    notes = [
        f"{metric} on the target in percent, {over_seeds(table.seeds)}. Only '{by_labels}' used target labels, to "
        f"choose its epoch{as_there}: it is out of reach without labels."
    ]
    if table.data.differences:
        notes.append(f"NOT THE PUBLISHED DATA: {'; '.join(table.data.differences)}.")
    missing = _missing(table)
    return [*notes, missing] if missing else notes


def _after(table: BenchTable) -> list[str]:
    """The paragraphs after the numbers: data, cost, stage 1."""
    as_there = " as in the paper" if table.benchmark.in_paper else ""
    notes = [f"Data, the whole domain for training and for scoring{as_there}: {_data(table)}."]
    if table.results:
        notes += [cost(table.results), shared_stage_1(table.results)]
    wrong = [d for d in disagreements() if d.table == table.benchmark.name and d.column == AVERAGE]
    if wrong:
        errors = "; ".join(f"{d.row} {d.printed}, but {d.why}" for d in wrong)
        notes.append(f"The paper's rows are as printed, also where they contradict themselves: {errors}.")
    return notes


def _data(table: BenchTable) -> str:
    domains = table.data.domains.values()
    return "; ".join(f"{domain.name} ({domain.layout}, {len(domain.images):,} images)" for domain in domains)


def _missing(table: BenchTable) -> str | None:
    """The missing runs, by task."""
    finished = {(result.task, result.seed) for result in table.results}
    wanted = [(task.name, seed) for task in table.benchmark.tasks for seed in table.seeds]
    missing = [run for run in wanted if run not in finished]
    if not missing:
        return None
    by_task = []
    for task, runs in groupby(missing, key=lambda run: run[0]):
        seeds = [str(seed) for _, seed in runs]
        by_task.append(f"{task} (seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)})")
    return (
        f"UNFINISHED: {len(missing)} of {len(wanted)} runs are missing: {', '.join(by_task)}. A mean over tasks"
        " stands only where a seed has all of them."
    )


def cost(results: Sequence[RunResult]) -> str:
    minutes = [result.seconds / 60 for result in results]
    devices = " and ".join(sorted({result.device for result in results}))
    busy = sum(result.device_seconds for result in results) / 3600
    return (
        f"Cost: {counted(len(results), 'run')} of {sum(minutes) / len(minutes):.1f} minutes on average"
        f" ({min(minutes):.1f} to {max(minutes):.1f}), which took {busy:.2f} hours of {devices}."
    )
