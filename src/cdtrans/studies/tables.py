"""Documents of text and tables, as Markdown and LaTeX; and a benchmark of one method in the paper's layout, beside the
paper's rows: table.md, table.tex."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from cdtrans.errors import counted
from cdtrans.inputs.benchmarks import DOMAINNET, Benchmark
from cdtrans.paper.printed_tables import AVERAGE, disagreements, paper_grids, paper_table
from cdtrans.studies.results import SCORE_TITLES, BenchResults, RunResult, Values, seed_spread, shared_stage_1, values

NOTHING = "–"
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
    caption = " ".join([f"{document.title}.", *document.before, *document.after])
    return "".join(f"{line}\n" for line in _lines("table.tex", document=document, caption=caption))


def document(template: str, title: str, tables: Sequence[Table], **content: object) -> Document:
    """A document with the paragraphs of a template, a line each; its line [tables] stands for the tables."""
    lines = _lines(template, **content)
    place = lines.index("[tables]")
    return Document(title, lines[:place], tables, lines[place + 1 :])


def _lines(template: str, **content: object) -> list[str]:
    """The lines of a rendered template that are not blank."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(loader=PackageLoader("cdtrans", "studies"), undefined=StrictUndefined)
    templates.filters["latex"] = lambda text: text.translate(LATEX)
    return [line for line in templates.get_template(template).render(content).split("\n") if line.strip()]


def paper_layout(bench: BenchResults) -> Document:
    """The results of one method, beside the paper's rows."""
    benchmark = bench.benchmark
    ((method, results),) = bench.by_method.items()
    scores = {_row_title(kind, method): values(benchmark, results, kind) for kind in SCORE_TITLES}
    wanted = [f"{task} seed {seed}" for seed in bench.seeds for task in bench.tasks]
    finished = {f"{result.task} seed {result.seed}" for result in results}
    return document(
        "table.txt",
        f"{benchmark.title}, {bench.backbone}",
        _grids(benchmark, scores) if benchmark is DOMAINNET else [_table(bench, scores)],
        bench=bench,
        benchmark=benchmark,
        by_labels=_row_title("best_by_labels", method),
        missing=missing_runs([run for run in wanted if run not in finished], len(wanted)),
        cost=cost_notes(results),
        wrong=[d for d in disagreements() if d.table == benchmark.name and d.column == AVERAGE],
    )


def _row_title(kind: str, method: str) -> str:
    name = "CDTrans" if method == "cdtrans" else method
    return SCORE_TITLES[kind] if kind == "source_only" else f"{name}, {SCORE_TITLES[kind]}"


def column_titles(bench: BenchResults) -> Sequence[str]:
    """The tasks, or VisDA-2017's classes as the paper abbreviates them."""
    return list(paper_table(bench.benchmark.name)["Ours-B"])[:-1] if bench.benchmark.class_mean else bench.tasks


def _table(bench: BenchResults, scores: Mapping[str, Values]) -> Table:
    """A row per kind of score and a column per task or, for VisDA-2017, per class."""
    names, benchmark = bench.columns, bench.benchmark
    ours = [
        (title, *(_cell(by_seed, [name]) for name in names), _cell(by_seed, names)) for title, by_seed in scores.items()
    ]
    printed = paper_table(benchmark.name).items() if benchmark.in_paper else ()
    groups = [ours, [(f"paper: {method}", *cells.values()) for method, cells in printed]]
    return Table(("Method", *column_titles(bench), AVERAGE), [g for g in groups if g])


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
