"""A whole benchmark: every task with every seed, each an ordinary run folder, and the table they come to.

Every run is a process of its own (`cdtrans adapt`, then `cdtrans eval`), so that several fit side by side on one GPU,
one that fails takes no other along, and a killed benchmark goes on like a killed run does. What is known of a run is
read from its folder alone: results.jsonl and the tables are written anew from there each time a run ends. The tasks of
a source share stage 1, seed by seed: the target has no part in it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdtrans.bench.folder import flags, owned, recipe_of, with_table_defaults
from cdtrans.bench.jobs import Job, PlannedRun, run_jobs
from cdtrans.bench.results import KINDS, RunResult, columns, read_run, result_lines, run_folder, spread, values
from cdtrans.bench.tables import BenchTable, latex, markdown
from cdtrans.config import Config, make_config, read_preset, read_yaml
from cdtrans.data.benchmarks import Benchmark, FoundBenchmark, Task, benchmark_named, find_benchmark
from cdtrans.data.layouts import FoundDomain
from cdtrans.errors import CdtransError
from cdtrans.methods import require_method
from cdtrans.model.backbone import read_state
from cdtrans.run.session import resolve
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import atomic

PRESET_BACKBONES = {"deit_small": "deit-small", "deit_base": "deit-base"}  # the two that have presets of their own
FIRST_SEED = 1234  # the authors'; the others are 1, 2, ...
MOST_SEEDS = 100  # a larger number is rather a seed than a count
RECORD = "bench.json"  # what the folder is; it makes a folder a benchmark's
LISTS = "data"  # in the folder: lists that were rewritten to start from the data here
DECIDED_HERE = ("source", "target", "root", "seed")  # settings that each run gets from its task


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before the first process starts."""

    found: FoundBenchmark
    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    out: Path
    config: Config  # of every run, but for what its task decides
    flags: tuple[str, ...]  # that make `adapt` arrive at this configuration

    def runs(self) -> list[PlannedRun]:
        """All tasks with the first seed, then all with the next: the table has no holes as early as possible."""
        return [self._run(task, seed) for seed in self.seeds for task in self.tasks]

    def _run(self, task: Task, seed: int) -> PlannedRun:
        folder = run_folder(self.out, task, seed)
        source, target = (self.found.domains[domain.name] for domain in task)
        root = ("--root", str(self.found.root)) if None in (source.folder, target.folder) else ()
        images = str(self._labelled(source)), str(target.folder or self._list(target, "unlabelled"))
        device = ("--device", self.config.device, "--max-bad", str(self.config.max_bad))
        return PlannedRun(
            name=f"{task.name} seed {seed}",
            folder=folder,
            adapt=("adapt", *images, "--out", str(folder), "--seed", str(seed), *root, *self.flags),
            score=("eval", str(folder), str(self._labelled(target)), "--json", *root, *device),
            peers=tuple(
                run_folder(self.out, other, seed)
                for other in self.found.benchmark.tasks  # also one that is not asked for now may have been run before
                if other.source == task.source
            ),
        )

    def _labelled(self, domain: FoundDomain) -> Path:
        return domain.folder or self._list(domain, "labelled")

    def _list(self, domain: FoundDomain, kind: str) -> Path:
        return self.out / LISTS / f"{domain.name}.{kind}.txt"

    def write_lists(self) -> None:
        """For domains that come as lists: one with labels, for a source or as an answer key, and one without."""
        for domain in self.found.domains.values():
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
class Outcome:
    """How far a benchmark has come."""

    table: BenchTable
    out: Path
    asked: int
    finished: int  # of those asked for
    failed: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """The promised keys of `bench --json`. The means are None until every task has a run."""
        return {
            "out": str(self.out),
            "runs": self.asked,
            "finished": self.finished,
            "failed": list(self.failed),
            "mean": self.means(),
        }

    def means(self) -> dict[str, float | None]:
        """Percent, by kind: the last column of the table."""
        benchmark, results = self.table.benchmark, self.table.results
        found = {kind: spread(values(benchmark, results, kind), columns(benchmark)) for kind in KINDS}
        return {kind: None if mean is None else mean.mean for kind, mean in found.items()}


def bench(
    name: str,
    data: Path,
    *,
    screen: Screen,
    backbone: str = "deit_small",
    seeds: str = "3",
    tasks: str | None = None,
    jobs: int = 1,
    out: Path | None = None,
    config: Path | None = None,
    force: bool = False,
    allow_incomplete: bool = False,
    **settings: Any,
) -> Outcome:
    """Run what is not yet done of a benchmark, `jobs` runs at a time, and write its table into `out`.

    `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the preset."""
    benchmark = benchmark_named(name)
    chosen = tuple(dict.fromkeys(benchmark.task(text.strip()) for text in tasks.split(","))) if tasks else None
    recipe, words = _recipe(benchmark, backbone, config, settings)
    plan = Plan(
        found=find_benchmark(benchmark, data, chosen or benchmark.tasks, allow_incomplete=allow_incomplete),
        tasks=chosen or benchmark.tasks,
        seeds=parse_seeds(seeds),
        out=out or Path("runs") / f"{name}-{backbone}",
        config=recipe,
        flags=(*words, *(("--force",) if force else ())),
    )
    for difference in plan.found.differences:
        screen.warn(f"{benchmark.title} is not as it was published: {difference}.")
    with owned(plan.out, RECORD, _record(plan), "a benchmark"):
        plan.write_lists()
        write_tables(plan)
        failed = _run_all(plan, jobs, screen)
        table = write_tables(plan)
    there = {(result.task, result.seed) for result in table.results}
    finished = sum((task.name, seed) in there for task in plan.tasks for seed in plan.seeds)
    return Outcome(table, plan.out, len(plan.tasks) * len(plan.seeds), finished, tuple(failed))


def parse_seeds(text: str) -> tuple[int, ...]:
    """'3' is three seeds: 1234, 1 and 2. '1234,1' or '7,' are these seeds."""
    words = [word.strip() for word in text.split(",")]
    listed = [word for word in words if word]
    if not listed or not all(word.isascii() and word.isdigit() for word in listed):
        raise CdtransError(f"--seeds must be a number of seeds or a list such as 1234,1,2, not '{text}'.")
    numbers = [int(word) for word in listed]
    if len(words) > 1:
        if len(set(numbers)) < len(numbers):
            raise CdtransError(f"--seeds names a seed twice: '{text}'.")
        return tuple(numbers)
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise CdtransError(
            f"--seeds {text} asks for that many seeds, from 1 to {MOST_SEEDS}; for the one seed {text} write '{text},'."
        )
    return (FIRST_SEED, *range(1, numbers[0]))


def _recipe(
    benchmark: Benchmark, backbone: str, config: Path | None, settings: dict[str, Any]
) -> tuple[Config, tuple[str, ...]]:
    """The configuration of every run, checked before any starts, and the flags that lead `adapt` to it."""
    preset = f"{benchmark.name}-{PRESET_BACKBONES.get(backbone, PRESET_BACKBONES['deit_small'])}"
    if backbone not in PRESET_BACKBONES:
        settings = {"backbone": backbone, **settings}
    from_file = read_yaml(config) if config is not None else {}
    from_file = {key: value for key, value in from_file.items() if key not in ("out", "preset")}
    file = (f"--config={config}",) if config is not None else ()
    settings = with_table_defaults(settings, config)
    chosen = make_config(read_preset(preset), from_file, settings)
    if chosen.source_model:
        raise CdtransError(
            "A benchmark has several sources and shares stage 1 among its runs by itself; leave 'source_model' out."
        )
    require_method(chosen.method)
    resolve(chosen)  # what is wrong with the device, the backbone or the weights would be wrong with every run
    if chosen.weights:
        read_state(Path(chosen.weights))
    return chosen, (f"--preset={preset}", *file, *flags(settings))


def _record(plan: Plan) -> dict[str, Any]:
    """What must stay the same for the runs of one table. Tasks, seeds and where it runs may change."""
    shared = recipe_of(plan.config, DECIDED_HERE)
    return {"benchmark": plan.found.benchmark.name, "data": os.path.abspath(plan.found.root), **shared}


def _run_all(plan: Plan, jobs: int, screen: Screen) -> list[str]:
    """Run whatever is not finished; returns the names of the runs that failed."""
    return run_jobs("bench", plan.runs(), jobs, screen, lambda job: _tell(job, plan, screen))


def _tell(job: Job, plan: Plan, screen: Screen) -> None:
    """Say what a run came to; the tables have it from now on."""
    table = write_tables(plan)
    result = next(result for result in table.results if plan.out / result.run == job.run.folder)
    told = ", ".join(
        f"{KINDS[kind].removeprefix('CDTrans, ')} {100 * score:.1f}" for kind, score in result.scores.items()
    )
    screen.say(f"{job.run.name}: {told} ({result.seconds / 60:.1f} min)")


def write_tables(plan: Plan) -> BenchTable:
    """results.jsonl, table.md and table.tex, from what the run folders hold now: also tasks that were run before."""
    table = BenchTable(plan.found, plan.seeds, tuple(read_results(plan)))
    contents = {
        "results.jsonl": result_lines(table.results),
        "table.md": markdown(table).encode(),
        "table.tex": latex(table).encode(),
    }
    for name, content in contents.items():
        with atomic(plan.out / name) as file:
            file.write(content)
    return table


def read_results(plan: Plan) -> Iterator[RunResult]:
    for task in plan.found.benchmark.tasks:
        for seed in plan.seeds:
            result = read_run(plan.found.benchmark, task, seed, plan.out)
            if result is not None:
                yield result
