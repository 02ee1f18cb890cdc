"""`cdtrans bench`: methods x tasks x seeds on a benchmark's data, and the tables of their results."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import LARGEST_SEED, Config, Force, Jobs, Settings, SettingsFile, read_yaml
from cdtrans.errors import SettingsError
from cdtrans.inputs.benchmarks import BenchmarkTask, FoundBenchmark, FoundDomain, benchmark_named, find_benchmark
from cdtrans.methods import METHODS
from cdtrans.record.files import atomic
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, checked
from cdtrans.studies.comparison import comparison_document, csv_table, html_page, method_rows
from cdtrans.studies.recipes import DECIDED_HERE, Request, label, misfits, recipe_of, start_of
from cdtrans.studies.results import BenchResults, FinishedRuns, is_scored
from cdtrans.studies.study import BenchResult, PlannedRun, Study
from cdtrans.studies.tables import latex, markdown, paper_layout

FIRST_SEED = 1234  # the authors'; the others are 1, 2, ...
LONGEST_SEED = len(str(LARGEST_SEED))  # digits
MOST_SEEDS = 100  # a larger number is probably a seed and not a count
LISTS = "data"  # subfolder: lists, rewritten to start from --data


@dataclass(frozen=True)
class BenchPlan(Study):
    """Everything that is decided before the first process starts."""

    kind = "benchmark"

    data: FoundBenchmark
    tasks: tuple[BenchmarkTask, ...]
    seeds: tuple[int, ...]
    out: Path
    configs: tuple[Config, ...]  # one for each method that is run
    shared: Config  # settings that the runs have in common
    force: bool = False
    start: str | None = None  # start of several methods; None if there is one
    misfits: dict[str, str] = field(default_factory=dict)  # methods that cannot be run, and what they need
    by_class: bool = False

    def runs(self) -> tuple[PlannedRun, ...]:
        """All tasks with the first seed, method by method, then all with the next, so that rows are complete early."""
        return tuple(
            self._run(config, task, seed) for seed in self.seeds for config in self.configs for task in self.tasks
        )

    def folder(self, method: str, task: BenchmarkTask, seed: int) -> Path:
        """Several methods have a folder each below `out`."""
        return self.out / (method if self.start else "") / task.folder / f"seed-{seed}"

    def methods(self) -> list[str]:
        """In the order of the rows, with those of earlier calls."""
        asked = [*(label(config.method) for config in self.configs), *self.misfits]
        known = [name for name in METHODS if name in asked or (self.start and (self.out / name).is_dir())]
        return [*known, *(name for name in asked if name not in METHODS)]

    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of this call, then those of earlier ones that have finished runs."""
        tasks = [self.folder(method, task, 0).parent for method in self.methods() for task in self.data.benchmark.tasks]
        scored = [run.name for task in tasks for run in task.glob("seed-*") if is_scored(run)]
        numbers = {name.removeprefix("seed-") for name in scored}
        return tuple(dict.fromkeys([*self.seeds, *sorted(int(number) for number in numbers if number.isdecimal())]))

    def _run(self, config: Config, task: BenchmarkTask, seed: int) -> PlannedRun:
        method = label(config.method)
        source, target = (self.data.domains[domain.name] for domain in task)
        root = str(self.data.root) if None in (source.folder, target.folder) else None
        places = (self._labelled(source), target.folder or self._list(target, "unlabelled"))
        images = dict(zip(("source", "target"), map(os.path.abspath, places), strict=True))
        return PlannedRun(
            name=f"{method if self.start else ''} {task.name} seed {seed}".lstrip(),
            folder=self.folder(method, task, seed),
            adapt=("adapt", "--force") if self.force else ("adapt",),
            labels=self._labelled(target),
            settings=config.to_dict() | images | {"root": root, "seed": seed},
            peers=tuple(
                self.folder(other, other_task, seed)
                for other in self.methods()
                for other_task in self.data.benchmark.tasks  # including tasks of earlier calls
                if start_of(other, self.start) == start_of(method, self.start) and other_task.source == task.source
            ),
        )

    def _labelled(self, domain: FoundDomain) -> Path:
        return domain.folder or self._list(domain, "labelled")

    def _list(self, domain: FoundDomain, kind: str) -> Path:
        return self.out / LISTS / f"{domain.name}.{kind}.txt"

    def prepare(self) -> None:
        """For domains that come as lists: one list with labels, for the source and for `eval`, and one without."""
        for domain in self.data.domains.values():
            if domain.folder is None:
                paths = domain.images.paths
                labelled = [f"{path} {label}" for path, label in zip(paths, domain.images.labels, strict=True)]
                for kind, lines in (("labelled", labelled), ("unlabelled", paths)):
                    with atomic(self._list(domain, kind)) as file:
                        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))

    @property
    def table(self) -> str:
        return "compared.md" if self.start else "table.md"

    def recipe(self) -> dict[str, Any]:
        """The settings that the runs of one table share. Tasks, seeds and the machine may change, and which methods
        there are where there are several."""
        shared = recipe_of(self.shared, DECIDED_HERE)
        if self.start:
            shared = {key: value for key, value in shared.items() if not key.startswith("method.")}
            shared["method"] = f"several, from the start '{self.start}'"
        return {"benchmark": self.data.benchmark.name, "data": os.path.abspath(self.data.root), **shared}

    def write(self, results: FinishedRuns) -> dict[str, Any]:
        """results.jsonl and the tables."""
        bench = read_results(self, results)
        rows = method_rows(bench)
        if self.start is None:
            numbers: dict[str, Any] = {"mean": {kind: s and s.mean for row in rows for kind, s in row.means.items()}}
            document, others = paper_layout(bench), {}
        else:
            numbers = {key: getattr(bench, key) for key in ("start", "backbone", "tasks", "seeds")}
            numbers["methods"] = [row.numbers() for row in rows]
            document = comparison_document(bench, rows)
            others = {"compared.csv": csv_table(bench, rows), "bench.html": html_page(document, rows)}
        lines = "".join(json.dumps(asdict(result)) + "\n" for result in bench.finished)
        latex_table = self.table.replace(".md", ".tex")
        self.save({"results.jsonl": lines, self.table: markdown(document), latex_table: latex(document), **others})
        return numbers


@checked()
def bench(
    name: Annotated[str, Help("office31, office-home, visda2017, domainnet or pacs.", "NAME")],
    data: Annotated[str | Path, Help("Folder with the benchmark's domains, as folders or lists.", flag="--data")],
    *,
    seeds: Annotated[int | str | Sequence[int], Help("How many seeds (3: 1234, 1 and 2), or a list: 1234,1.")] = 3,
    tasks: Annotated[
        str | Sequence[str] | None, Help("Run only these tasks, such as 'A>W,amazon>dslr' or A-W,A-D.")
    ] = None,
    jobs: Jobs = 1,
    out: Annotated[
        str | Path | None, Help("Folder for runs and tables (default: one in runs/); resumed if it exists.")
    ] = None,
    start: Annotated[
        str | None,
        Help(
            "With several methods (--method all, or cdtrans,dann): which stage 1, optimiser and schedule all of them "
            "use, authors (as for this benchmark) or best (the best recipe)."
        ),
    ] = None,
    config: SettingsFile = None,
    force: Force = False,
    allow_incomplete: Annotated[
        bool, Help("Accept data that differs from the published data; the table says so.")
    ] = False,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Unpack[Settings],
) -> BenchResult:
    """Rerun a table of the paper, or compare methods: run the unfinished runs of the benchmark `name`, whose domains
    are in the folder `data`, `jobs` at a time, score them with the target's labels, and write the tables into `out`.

    `seeds` is how many (3: 1234, 1 and 2), or which: [1234, 1]. `tasks` are those to run, such as ["A>W", "A>D"].
    `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the recipe. Their
    `method` may name several, as in "cdtrans,dann", which all start from `start`. `allow_incomplete` accepts data
    that differ from the published data. A run that fails is listed in the result, and the others continue."""
    screen = screen or Screen(quiet=quiet)
    given: dict[str, Any] = {**settings}
    backbone = str(given.pop("backbone", "deit_small"))
    benchmark = benchmark_named(name)
    words = tasks.split(",") if isinstance(tasks, str) else tasks
    chosen = tuple(dict.fromkeys(benchmark.task(text.strip()) for text in words)) if words else benchmark.tasks
    from_file = {} if config is None else read_yaml(Path(config))
    from_file.pop("out", None)
    request = Request(benchmark, backbone, from_file, given)
    configs, start = request.configs(start)
    complete = find_benchmark(benchmark, Path(data), chosen, allow_incomplete=allow_incomplete)
    unfit = misfits(configs, next(iter(complete.domains.values())).images.classes) if start else {}
    plan = BenchPlan(
        data=complete,
        tasks=chosen,
        seeds=parse_seeds(str(seeds) if isinstance(seeds, int | str) else f"{','.join(map(str, seeds))},"),
        out=Path(out) if out else Path("runs") / f"{name}-{backbone}{f'-{start}' if start else ''}",
        configs=tuple(config for config in configs if label(config.method) not in unfit),
        shared=request.of_method("cdtrans", start) if start else configs[0],
        force=force,
        start=start,
        misfits=unfit,
        by_class=benchmark.class_mean,
    )
    for difference in complete.differences:
        screen.warn(f"{benchmark.title} differs from the published data: {difference}.")
    for method, reason in plan.misfits.items():
        screen.say(f"{method} is not run with this backbone: it {reason}")
    return plan.carry_out(jobs, screen)


def parse_seeds(text: str) -> tuple[int, ...]:
    """'3' is three seeds: 1234, 1 and 2. '1234,1' or '7,' are these seeds."""
    parts = [part.strip() for part in text.split(",")]
    listed = [part for part in parts if part]
    if not listed or not all(part.isascii() and part.isdigit() and len(part) <= LONGEST_SEED for part in listed):
        raise SettingsError("seeds", f"--seeds must be a number of seeds or a list such as 1234,1,2, not '{text}'.")
    numbers = [int(part) for part in listed]
    if len(parts) > 1:
        if len(set(numbers)) < len(numbers):
            raise SettingsError("seeds", f"--seeds names a seed twice: '{text}'.")
        return tuple(numbers)
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise SettingsError(
            "seeds",
            f"--seeds {text} asks for {text} seeds, but their number must be from 1 to {MOST_SEEDS}; for the one seed "
            f"{text}, write '{text},'.",
        )
    return (FIRST_SEED, *range(1, numbers[0]))


def read_results(plan: BenchPlan, runs: FinishedRuns) -> BenchResults:
    """All finished runs. Means over the tasks of one method are over all tasks; of several, over those that are run."""
    every, seeds = plan.data.benchmark.tasks, plan.all_seeds()
    folders = {name: {plan.folder(name, t, seed): t for t in every for seed in seeds} for name in plan.methods()}
    results = {
        name: [result for run, task in of.items() if (result := runs.get(run, task.name))]
        for name, of in folders.items()
    }
    asked = {task.name for task in plan.tasks} | {result.task for some in results.values() for result in some}
    tasks = [task for task in every if plan.start is None or task.name in asked]
    return BenchResults(
        data=plan.data,
        seeds=seeds,
        tasks=tuple(task.name for task in tasks),
        backbone=plan.shared.backbone,
        by_method=results,
        start=plan.start,
        misfits=plan.misfits,
        failed={
            name: sum(run in runs.failed and task in tasks for run, task in of.items()) for name, of in folders.items()
        },
    )
