"""A whole benchmark: every task with every seed, each an ordinary run folder, and the table of their results.

Every run is a process of its own (`cdtrans adapt`, then `cdtrans eval`), so that several fit on one GPU, a failure does
not affect other runs, and a killed benchmark resumes like a killed run. Results are read from the run folders alone:
results.jsonl and the tables are rewritten each time a run ends. The tasks of a source share stage 1 for each seed,
because stage 1 does not depend on the target.
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
from cdtrans.config import Config, config_of, read_preset, read_yaml
from cdtrans.data.benchmarks import Benchmark, FoundBenchmark, Task, benchmark_named, find_benchmark
from cdtrans.data.layouts import FoundDomain
from cdtrans.errors import CdtransError
from cdtrans.methods import require_method
from cdtrans.model.backbone import read_state
from cdtrans.run.session import resolve
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import atomic

PRESET_BACKBONES = {"deit_small": "deit-small", "deit_base": "deit-base"}  # those with presets
FIRST_SEED = 1234  # the authors'; the others are 1, 2, ...
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
    config: Config  # of every run, except for what its task decides
    flags: tuple[str, ...]  # that give `adapt` this configuration

    def runs(self) -> list[PlannedRun]:
        """All tasks with the first seed, then all with the next, so that the table is complete early."""
        return [self._run(task, seed) for seed in self.seeds for task in self.tasks]

    def _run(self, task: Task, seed: int) -> PlannedRun:
        folder = run_folder(self.out, task, seed)
        source, target = (self.data.domains[domain.name] for domain in task)
        root = ("--root", str(self.data.root)) if None in (source.folder, target.folder) else ()
        images = str(self._labelled(source)), str(target.folder or self._list(target, "unlabelled"))
        device = ("--device", self.config.device, "--max-bad", str(self.config.max_bad))
        return PlannedRun(
            name=f"{task.name} seed {seed}",
            folder=folder,
            adapt=("adapt", *images, "--out", str(folder), "--seed", str(seed), *root, *self.flags),
            score=("eval", str(folder), str(self._labelled(target)), "--json", *root, *device),
            peers=tuple(
                run_folder(self.out, other, seed)
                for other in self.data.benchmark.tasks  # including tasks of earlier calls
                if other.source == task.source
            ),
        )

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
class Outcome:
    """The state of a benchmark after a call."""

    table: BenchTable
    out: Path
    asked: int  # runs of this call
    finished: int  # of these
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
        means = {kind: spread(values(benchmark, results, kind), columns(benchmark)) for kind in KINDS}
        return {kind: None if mean is None else mean.mean for kind, mean in means.items()}


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
    """Run the unfinished runs of a benchmark, `jobs` at a time, and write its table into `out`.

    `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the preset."""
    benchmark = benchmark_named(name)
    chosen = tuple(dict.fromkeys(benchmark.task(text.strip()) for text in tasks.split(","))) if tasks else None
    recipe, words = _recipe(benchmark, backbone, config, settings)
    plan = Plan(
        data=find_benchmark(benchmark, data, chosen or benchmark.tasks, allow_incomplete=allow_incomplete),
        tasks=chosen or benchmark.tasks,
        seeds=parse_seeds(seeds),
        out=out or Path("runs") / f"{name}-{backbone}",
        config=recipe,
        flags=(*words, *(("--force",) if force else ())),
    )
    for difference in plan.data.differences:
        screen.warn(f"{benchmark.title} differs from the published data: {difference}.")
    with owned(plan.out, RECORD, _record(plan), "a benchmark"):
        plan.write_lists()
        write_tables(plan)
        failed = _run_all(plan, jobs, screen)
        table = write_tables(plan)
    scored = {(result.task, result.seed) for result in table.results}
    finished = sum((task.name, seed) in scored for task in plan.tasks for seed in plan.seeds)
    return Outcome(table, plan.out, len(plan.tasks) * len(plan.seeds), finished, tuple(failed))


def parse_seeds(text: str) -> tuple[int, ...]:
    """'3' is three seeds: 1234, 1 and 2. '1234,1' or '7,' are these seeds."""
    parts = [part.strip() for part in text.split(",")]
    listed = [part for part in parts if part]
    if not listed or not all(part.isascii() and part.isdigit() for part in listed):
        raise CdtransError(f"--seeds must be a number of seeds or a list such as 1234,1,2, not '{text}'.")
    numbers = [int(part) for part in listed]
    if len(parts) > 1:
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
    """The configuration of every run, checked before any starts, and the flags that give it to `adapt`."""
    preset = f"{benchmark.name}-{PRESET_BACKBONES.get(backbone, PRESET_BACKBONES['deit_small'])}"
    if backbone not in PRESET_BACKBONES:
        settings = {"backbone": backbone, **settings}
    from_file = read_yaml(config) if config is not None else {}
    from_file = {key: value for key, value in from_file.items() if key not in ("out", "preset")}
    file = (f"--config={config}",) if config is not None else ()
    settings = with_table_defaults(settings, config)
    if (from_file | settings).get("recipe") == "best":  # the preset is the authors' recipe: only its backbone is taken
        settings = {"backbone": read_preset(preset)["backbone"], **settings}
        layers, begin = [{}, from_file, settings], []
    else:
        layers, begin = [read_preset(preset), from_file, settings], [f"--preset={preset}"]
    chosen = config_of(*layers)
    if chosen.source_model:
        raise CdtransError(
            "A benchmark has several sources and shares stage 1 among its runs by itself; leave 'source_model' out."
        )
    if chosen.target_labels:
        raise CdtransError("A benchmark trains without target labels; leave 'target_labels' out.")
    require_method(chosen.method)
    resolve(chosen)  # what is wrong with the device, the backbone or the weights would be wrong with every run
    if chosen.weights:
        read_state(Path(chosen.weights))
    return chosen, (*begin, *file, *flags(settings))


def _record(plan: Plan) -> dict[str, Any]:
    """The settings that the runs of one table share. Tasks, seeds and the machine may change."""
    shared = recipe_of(plan.config, DECIDED_HERE)
    return {"benchmark": plan.data.benchmark.name, "data": os.path.abspath(plan.data.root), **shared}


def _run_all(plan: Plan, jobs: int, screen: Screen) -> list[str]:
    """Run everything unfinished; returns the names of the runs that failed."""
    return run_jobs("bench", plan.runs(), jobs, screen, lambda job: _report_run(job, plan, screen))


def _report_run(job: Job, plan: Plan, screen: Screen) -> None:
    """Update the tables with a finished run and print its scores."""
    table = write_tables(plan)
    result = next(result for result in table.results if plan.out / result.run == job.run.folder)
    scores = ", ".join(f"{KINDS[kind]} {100 * score:.1f}" for kind, score in result.scores.items())
    screen.say(f"{job.run.name}: {scores} ({result.seconds / 60:.1f} min)")


def write_tables(plan: Plan) -> BenchTable:
    """Write results.jsonl, table.md and table.tex from all run folders, including tasks of earlier calls."""
    table = BenchTable(plan.data, plan.seeds, tuple(read_results(plan)), plan.config.method)
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
    for task in plan.data.benchmark.tasks:
        for seed in plan.seeds:
            result = read_run(plan.data.benchmark, task, seed, plan.out)
            if result is not None:
                yield result
