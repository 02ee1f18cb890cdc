"""Documents of text and tables, as Markdown and LaTeX; and a benchmark of one method in the paper's layout, beside the
paper's rows: table.md, table.tex."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from cdtrans.errors import counted
from cdtrans.inputs.benchmarks import DOMAINNET, Benchmark, FoundBenchmark
from cdtrans.paper.printed_tables import AVERAGE, disagreements, paper_grids, paper_table
from cdtrans.studies.results import (
    SCORE_TITLES,
    BenchResults,
    RunResult,
    Values,
    seed_spread,
    shared_stage_1,
    values,
)

NOTHING = "–"
PAPER_CLASSES = {  # the paper's abbreviations in the head of its VisDA-2017 table
    "aeroplane": "plane",
    "bicycle": "bcycl",
    "motorcycle": "mcycl",
    "skateboard": "sktbrd",
}
LATEX = str.maketrans(
    {
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
)


class Table(NamedTuple):
    """Groups of rows under a head. In LaTeX, lines separate the groups, the first and the last column."""

    head: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    title: str = ""

    @property
    def rows(self) -> list[Sequence[str]]:
        return [*chain(*self.groups)]


class Document(NamedTuple):
    title: str
    before: Sequence[str]  # paragraphs before the tables
    tables: Sequence[Table]
    after: Sequence[str]


def markdown(document: Document) -> str:
    paragraphs = [f"# {document.title}", *document.before]
    for table in document.tables:
        lines = (table.head, ("---",) * len(table.head), *table.rows)
        paragraphs += [f"## {table.title}"] if table.title else []
        paragraphs.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*paragraphs, *document.after]) + "\n"


def latex(document: Document) -> str:
    """A table environment that needs no package. Several tables stand side by side as far as they fit."""
    lines = ["\\begin{table*}", "\\centering\\small"]
    for table in document.tables:
        lines += [f"\\par {table.title.translate(LATEX)}\\par"] if table.title else []
        lines += [f"\\begin{{tabular}}{{c|{'c' * (len(table.head) - 2)}|c}}", "\\hline"]
        for rows in ([table.head], *table.groups):
            lines += [" & ".join(cell.translate(LATEX) for cell in row) + " \\\\" for row in rows]
            lines.append("\\hline")
        lines.append("\\end{tabular}")
    caption = " ".join([f"{document.title}.", *document.before, *document.after]).translate(LATEX)
    return "\n".join([*lines, f"\\caption{{{caption}}}", "\\end{table*}"]) + "\n"


def paper_layout(bench: BenchResults) -> Document:
    """The results of one method, beside the paper's rows."""
    benchmark = bench.benchmark
    ((method, results),) = bench.by_method.items()
    scores = {_row_title(kind, method): values(benchmark, results, kind) for kind in SCORE_TITLES}
    in_paper = benchmark.in_paper
    wanted = [f"{task} seed {seed}" for seed in bench.seeds for task in bench.tasks]
    finished = {f"{result.task} seed {result.seed}" for result in results}
    by_labels = _row_title("best_by_labels", method)
    as_there = ", as the authors' code does for the paper's Ours rows" if in_paper else ""
    before = [
        f"{metric(benchmark)} on the target in percent, {over_seeds(bench.seeds)}. Only '{by_labels}' used target "
        f"labels, to choose its epoch{as_there}: it is out of reach without labels. A mean stands only where a seed "
        "has every task.",
        *difference_notes(bench.data),
        *missing_runs([run for run in wanted if run not in finished], len(wanted)),
    ]
    domains = "; ".join(f"{d.name} ({d.layout}, {len(d.images):,} images)" for d in bench.data.domains.values())
    after = [
        f"Data, the whole domain for training and for scoring{' as in the paper' * in_paper}: {domains}.",
        *cost_notes(results),
    ]
    wrong = [d for d in disagreements() if d.table == benchmark.name and d.column == AVERAGE]
    if wrong:
        errors = "; ".join(f"{d.row} {d.printed}, but {d.why}" for d in wrong)
        after.append(f"The paper's rows are as printed, also where they contradict themselves: {errors}.")
    tables = _grids(benchmark, scores) if benchmark is DOMAINNET else [_table(bench, scores)]
    return Document(f"{benchmark.title}, {bench.backbone}", before, tables, after)


def _row_title(kind: str, method: str) -> str:
    name = "CDTrans" if method == "cdtrans" else method
    return SCORE_TITLES[kind] if kind == "source_only" else f"{name}, {SCORE_TITLES[kind]}"


def _table(bench: BenchResults, scores: Mapping[str, Values]) -> Table:
    """A row per kind of score and a column per task or, for VisDA-2017, per class."""
    names, benchmark = bench.columns, bench.benchmark
    ours = [
        (title, *(_cell(by_seed, [name]) for name in names), _cell(by_seed, names)) for title, by_seed in scores.items()
    ]
    printed = paper_table(benchmark.name).items() if benchmark.in_paper else ()
    groups = [ours, [(f"paper: {method}", *cells.values()) for method, cells in printed]]
    return Table(("Method", *(PAPER_CLASSES.get(name, name) for name in names), AVERAGE), [g for g in groups if g])


def _grids(benchmark: Benchmark, scores: Mapping[str, Values]) -> list[Table]:
    """A grid per kind of score, source by target, with the averages of both."""
    names = [domain.short for domain in benchmark.domains]
    both = (*names, AVERAGE)
    grids = {title: {s: {t: _average(v, names, s, t) for t in both} for s in both} for title, v in scores.items()}
    grids |= {f"paper: {method}": cells for method, cells in paper_grids().items()}
    tables = []
    for title, cells in grids.items():
        *rows, averages = ((source, *(cells[source][target] for target in both)) for source in both)
        tables.append(Table((title, *both), [rows, [averages]]))
    return tables


def _average(by_seed: Values, names: list[str], source: str, target: str) -> str:
    """The text of a cell by source and target, either of which may be the average."""
    sources = names if source == AVERAGE else [source]
    targets = names if target == AVERAGE else [target]
    pairs = [f"{s}>{t}" for s in sources for t in targets if s != t]
    return _cell(by_seed, pairs) if pairs else "-"


def _cell(by_seed: Values, names: Sequence[str]) -> str:
    return str(seed_spread(by_seed, names) or NOTHING)


def missing_runs(names: Sequence[str], runs: int) -> list[str]:
    """A sentence if runs are missing, of which there will be so many."""
    return [f"UNFINISHED: {len(names)} of {runs} runs are missing: {', '.join(names)}."] if names else []


def scored_images(results: Sequence[RunResult]) -> list[str]:
    """The number of labelled images. Labels of a part of the target give the scores of that part."""
    counts = dict.fromkeys((result.images, result.target_images) for result in results)
    return [f"Scored on {images} of the target's {of} images." for images, of in counts]


def metric(benchmark: Benchmark) -> str:
    return "Mean of the classes' accuracies" if benchmark.class_mean else "Accuracy"


def over_seeds(seeds: Sequence[int]) -> str:
    numbers = ", ".join(map(str, seeds))
    return f"mean ± standard deviation over seeds {numbers}" if len(seeds) > 1 else f"one run each, seed {numbers}"


def difference_notes(data: FoundBenchmark) -> list[str]:
    return [f"NOT THE PUBLISHED DATA: {'; '.join(data.differences)}."] if data.differences else []


def cost_notes(results: Sequence[RunResult]) -> list[str]:
    """Notes on the cost of the runs, and on those that trained stage 1."""
    if not results:
        return []
    minutes = [result.seconds / 60 for result in results]
    devices = " and ".join(sorted({result.device for result in results}))
    busy = sum(result.device_seconds for result in results) / 3600
    cost = (
        f"Cost: {counted(len(results), 'run')} of {sum(minutes) / len(minutes):.1f} minutes on average"
        f" ({min(minutes):.1f} to {max(minutes):.1f}), which took {busy:.2f} hours of {devices}."
    )
    return [cost, shared_stage_1(results)]
