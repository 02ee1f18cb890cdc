"""A whole benchmark: every method, task and seed, each an ordinary run folder, and the tables of their results.

Every run is a process of its own (`cdtrans adapt`, then `cdtrans eval`), so that several fit on one GPU, a failure does
not affect other runs, and a killed benchmark resumes like a killed run. Results are read from the run folders alone:
results.jsonl and the tables are rewritten each time a run ends. Runs with the same source, seed and recipe share stage
1, because it depends neither on the target nor on the method.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import LARGEST_SEED, Config, Force, Jobs, Settings, SettingsFile
from cdtrans.errors import CdtransError
from cdtrans.inputs.benchmarks import FoundBenchmark, FoundDomain, Task, benchmark_named, find_benchmark
from cdtrans.methods import METHODS
from cdtrans.record.files import atomic
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, checked
from cdtrans.studies.comparison import Comparison
from cdtrans.studies.comparison_tables import csv_table, page
from cdtrans.studies.comparison_tables import latex as compared_latex
from cdtrans.studies.comparison_tables import markdown as compared_markdown
from cdtrans.studies.folder import owned, recipe_of
from cdtrans.studies.jobs import Job, PlannedRun, run_jobs
from cdtrans.studies.recipes import Recipe, label, make_recipes, misfits, shared_recipe, start_of, with_flags
from cdtrans.studies.results import (
    KINDS,
    RunResult,
    columns,
    read_run,
    result_lines,
    run_folder,
    seeds_in,
    spread,
    values,
)
from cdtrans.studies.tables import BenchTable, latex, markdown

FIRST_SEED = 1234  # the authors'; the others are 1, 2, ...
LONGEST_SEED = len(str(LARGEST_SEED))  # digits
MOST_SEEDS = 100  # a larger number is probably a seed and not a count
RECORD = "bench.json"  # marks the folder of a benchmark and keeps its recipe
LISTS = "data"  # subfolder: lists, rewritten to start from --data
DECIDED_HERE = ("source", "target", "root", "seed")  # settings that each run gets from its task


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first process starts."""

    data: FoundBenchmark
    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    out: Path
    recipes: tuple[Recipe, ...]  # of the methods that are run
    shared: Config  # what the runs have in common
    start: str | None = None  # of several methods; None if there is one
    misfits: dict[str, str] = field(default_factory=dict)  # methods that cannot be run, and what they need

    def runs(self) -> list[PlannedRun]:
        """All tasks with the first seed, method by method, then all with the next, so that rows are complete early."""
        return [self._run(recipe, task, seed) for seed in self.seeds for recipe in self.recipes for task in self.tasks]

    def name(self, method: str, task: Task, seed: int) -> str:
        """Of a run. `method` is its folder, as below."""
        return f"{method} {task.name} seed {seed}".lstrip()

    def folders(self) -> tuple[str, ...]:
        """The methods' folders below `out`, in the order of the rows: of this call, and of earlier ones. One method has
        none."""
        if self.start is None:
            return ("",)
        asked = [*(label(recipe.method) for recipe in self.recipes), *self.misfits]
        known = [name for name in METHODS if name in asked or (self.out / name).is_dir()]
        return (*known, *(name for name in asked if name not in METHODS))

    def all_seeds(self) -> tuple[int, ...]:
        """Those of this call, then those of earlier ones that have finished runs."""
        places = [self.out / method / task.folder for method in self.folders() for task in self.data.benchmark.tasks]
        return tuple(dict.fromkeys([*self.seeds, *sorted({seed for place in places for seed in seeds_in(place)})]))

    def _run(self, recipe: Recipe, task: Task, seed: int) -> PlannedRun:
        method = label(recipe.method) if self.start else ""
        folder = run_folder(self.out / method, task, seed)
        source, target = (self.data.domains[domain.name] for domain in task)
        root = ("--root", str(self.data.root)) if None in (source.folder, target.folder) else ()
        images = str(self._labelled(source)), str(target.folder or self._list(target, "unlabelled"))
        device = ("--device", self.shared.device, "--max-bad", str(self.shared.max_bad))
        return PlannedRun(
            name=self.name(method, task, seed),
            folder=folder,
            adapt=("adapt", *images, "--out", str(folder), "--seed", str(seed), *root, *recipe.flags),
            score=("eval", str(folder), str(self._labelled(target)), "--json", *root, *device),
            peers=tuple(
                run_folder(self.out / other_method, other, seed)
                for other_method in self._same_start(method)
                for other in self.data.benchmark.tasks  # including tasks of earlier calls
                if other.source == task.source
            ),
        )

    def _same_start(self, method: str) -> list[str]:
        """The folders of the methods that begin with the same stage 1."""
        if self.start is None:
            return [method]
        return [other for other in self.folders() if start_of(other, self.start) == start_of(method, self.start)]

    def _labelled(self, domain: FoundDomain) -> Path:
        return domain.folder or self._list(domain, "labelled")

    def _list(self, domain: FoundDomain, kind: str) -> Path:
        return self.out / LISTS / f"{domain.name}.{kind}.txt"

    def write_lists(self) -> None:
        """For domains that come as lists: one list with labels, for the source and for `eval`, and one without."""
        for domain in self.data.domains.values():
            if domain.folder is None:
                images = domain.images
                with atomic(self._list(domain, "labelled")) as file:
                    file.writelines(
                        f"{path} {label}\n".encode("utf-8", "surrogateescape")
                        for path, label in zip(images.paths, images.labels, strict=True)
                    )
                with atomic(self._list(domain, "unlabelled")) as file:
                    file.writelines(f"{path}\n".encode("utf-8", "surrogateescape") for path in images.paths)


@dataclass(frozen=True)
class BenchResult:
    """What `bench` returns: the state of a benchmark after a call."""

    out: Path
    table: str  # the file in `out` to read first
    asked: int  # runs of this call
    finished: int  # of these
    failed: tuple[str, ...]
    numbers: dict[str, Any]  # of the table

    def summary(self) -> dict[str, Any]:
        """The promised keys of `bench --json`. Means are None until every task has a run."""
        counts = {"runs": self.asked, "finished": self.finished, "failed": list(self.failed)}
        return {"out": str(self.out), **counts, **self.numbers}


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
            "use, authors (the preset) or best (the best recipe)."
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
    `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the preset. Their
    `method` may name several, as in "cdtrans,dann", which all start from `start`. `allow_incomplete` accepts data
    that differ from the published data. A run that fails is listed in the result, and the others continue."""
    screen, config = screen or Screen(quiet=quiet), None if config is None else Path(config)
    given: dict[str, Any] = {**settings}
    backbone = str(given.pop("backbone", "deit_small"))
    if own := [key for key in given if key in DECIDED_HERE]:
        raise CdtransError(f"Every run of a benchmark has its own '{own[0]}'; leave it out.")
    if jobs < 1:
        raise CdtransError(f"The number of parallel runs, jobs, must be at least 1, not {jobs}.")
    benchmark = benchmark_named(name)
    words = tasks.split(",") if isinstance(tasks, str) else tasks
    chosen = tuple(dict.fromkeys(benchmark.task(text.strip()) for text in words)) if words else None
    recipes, start = make_recipes(benchmark, backbone, config, given, start)
    found = find_benchmark(benchmark, Path(data), chosen or benchmark.tasks, allow_incomplete=allow_incomplete)
    classes = next(iter(found.domains.values())).images.classes
    unfit = misfits(recipes, classes) if start else {}
    plan = Plan(
        data=found,
        tasks=chosen or benchmark.tasks,
        seeds=parse_seeds(str(seeds) if isinstance(seeds, int | str) else f"{','.join(map(str, seeds))},"),
        out=Path(out) if out else Path("runs") / f"{name}-{backbone}{f'-{start}' if start else ''}",
        recipes=tuple(with_flags(r, *(("--force",) if force else ())) for r in recipes if r.method not in unfit),
        shared=shared_recipe(benchmark, backbone, config, given, start) if start else recipes[0].config,
        start=start,
        misfits={label(method): reason for method, reason in unfit.items()},
    )
    for difference in plan.data.differences:
        screen.warn(f"{benchmark.title} differs from the published data: {difference}.")
    for method, reason in plan.misfits.items():
        screen.say(f"{method} is not run with this backbone: it {reason}")
    with owned(plan.out, RECORD, _record(plan), "a benchmark"):
        plan.write_lists()
        write_tables(plan)
        failed = _run_all(plan, jobs, screen)
        numbers = write_tables(plan, failed)
    runs = plan.runs()
    table = "compared.md" if start else "table.md"
    return BenchResult(plan.out, table, len(runs), sum(run.finished for run in runs), tuple(failed), numbers)


def parse_seeds(text: str) -> tuple[int, ...]:
    """'3' is three seeds: 1234, 1 and 2. '1234,1' or '7,' are these seeds."""
    parts = [part.strip() for part in text.split(",")]
    listed = [part for part in parts if part]
    if not listed or not all(part.isascii() and part.isdigit() and len(part) <= LONGEST_SEED for part in listed):
        raise CdtransError(f"--seeds must be a number of seeds or a list such as 1234,1,2, not '{text}'.")
    numbers = [int(part) for part in listed]
    if len(parts) > 1:
        if len(set(numbers)) < len(numbers):
            raise CdtransError(f"--seeds names a seed twice: '{text}'.")
        return tuple(numbers)
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise CdtransError(
            f"--seeds {text} asks for {text} seeds, but their number must be from 1 to {MOST_SEEDS}; for the one seed "
            f"{text}, write '{text},'."
        )
    return (FIRST_SEED, *range(1, numbers[0]))


def _record(plan: Plan) -> dict[str, Any]:
    """The settings that the runs of one table share. Tasks, seeds and the machine may change, and which methods there
    are where there are several."""
    shared = recipe_of(plan.shared, DECIDED_HERE)
    if plan.start:
        shared = {key: value for key, value in shared.items() if not key.startswith("method.")}
        shared["method"] = f"several, from the start '{plan.start}'"
    return {"benchmark": plan.data.benchmark.name, "data": os.path.abspath(plan.data.root), **shared}


def _run_all(plan: Plan, jobs: int, screen: Screen) -> list[str]:
    """Run everything unfinished; returns the names of the runs that failed."""
    failed: list[str] = []

    def ended(job: Job) -> None:
        """Update the tables and print the scores of a run that succeeded."""
        if job.failure:
            failed.append(job.run.name)
        write_tables(plan, failed)
        if not job.failure:
            result = next(result for result in read_results(plan) if plan.out / result.run == job.run.folder)
            scores = ", ".join(f"{KINDS[kind]} {100 * score:.1f}" for kind, score in result.scores.items())
            screen.say(f"{job.run.name}: {scores} ({result.seconds / 60:.1f} min)")

    return run_jobs("bench", plan.runs(), jobs, screen, ended)


def write_tables(plan: Plan, failed: Collection[str] = ()) -> dict[str, Any]:
    """Write results.jsonl and the tables from all run folders, including those of earlier calls; `failed` names runs of
    this call. Returns the numbers for `bench --json`."""
    results = tuple(read_results(plan))
    if plan.start is None:
        table = BenchTable(plan.data, plan.all_seeds(), results, plan.shared.method)
        numbers = {"mean": _means(table)}
        contents = {"table.md": markdown(table), "table.tex": latex(table)}
    else:
        comparison = compare(plan, plan.start, failed)
        numbers = comparison.summary()
        contents = {"compared.md": compared_markdown(comparison), "compared.tex": compared_latex(comparison)}
        contents |= {"compared.csv": csv_table(comparison), "bench.html": page(comparison)}
    for name, content in {"results.jsonl": result_lines(results).decode(), **contents}.items():
        with atomic(plan.out / name) as file:
            file.write(content.encode("utf-8", "backslashreplace"))  # names may contain undecodable bytes
    return numbers


def _means(table: BenchTable) -> dict[str, float | None]:
    """The means in percent, by kind of row: the last column of the table."""
    means = {kind: spread(values(table.benchmark, table.results, kind), columns(table.benchmark)) for kind in KINDS}
    return {kind: None if mean is None else mean.mean for kind, mean in means.items()}


def compare(plan: Plan, start: str, failed: Collection[str]) -> Comparison:
    """The comparison of several methods, from all finished runs."""
    results = {method: tuple(read_results(plan, method)) for method in plan.folders()}
    seen = {result.task for of_method in results.values() for result in of_method}
    tasks = [task for task in plan.data.benchmark.tasks if task in plan.tasks or task.name in seen]
    return Comparison(
        data=plan.data,
        seeds=plan.all_seeds(),
        tasks=tuple(task.name for task in tasks),
        start=start,
        backbone=plan.shared.backbone,
        results=results,
        own_start=[method for method in results if start_of(method, start) != start],
        misfits=plan.misfits,
        failed={m: sum(plan.name(m, task, seed) in failed for task in tasks for seed in plan.seeds) for m in results},
    )


def read_results(plan: Plan, *methods: str) -> Iterator[RunResult]:
    """The finished runs of these methods, or of all."""
    seeds = plan.all_seeds()
    for method in methods or plan.folders():
        for task in plan.data.benchmark.tasks:
            for seed in seeds:
                result = read_run(plan.data.benchmark, task, seed, plan.out, method)
                if result is not None:
                    yield result
