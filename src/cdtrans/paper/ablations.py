"""`cdtrans ablate losses`, `pseudo-labels`: the paper's Tables 5 and 6 on anybody's data.

Every row is a run folder that `cdtrans adapt` makes (with ground truth: known_pairs.py) and `cdtrans eval` scores, as
in a benchmark; they differ in the row's settings alone. These are stage 2's, so one stage 1 serves all rows: on a GPU a
second one would not be the same, and the difference as large as that of two rows. What the table says is read from
these folders each time a run ends."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from cdtrans.config import FIELDS, Config, compose_run, make_config, read_yaml
from cdtrans.errors import CdtransError
from cdtrans.inputs.scan import check_distinct
from cdtrans.methods import method_class, require_method
from cdtrans.methods.base import Method
from cdtrans.network.weights import read_state
from cdtrans.paper.ablation_rows import Ablation, Variant
from cdtrans.paper.ablation_tables import AblationTable, Row, Scored, markdown
from cdtrans.paper.known_pairs import METHODS
from cdtrans.paper.pair_quality import Answers, check_of_target, pair_quality, read_answers
from cdtrans.paper.printed_tables import PaperRow
from cdtrans.record.files import atomic
from cdtrans.record.layout import SOURCE
from cdtrans.record.run_folder import read_result
from cdtrans.run.resolve import resolve
from cdtrans.run.stage1 import require_stage_1
from cdtrans.runtime.screen import Screen
from cdtrans.studies.folder import flags, owned, recipe_of, with_table_defaults
from cdtrans.studies.jobs import Job, PlannedRun, run_jobs
from cdtrans.studies.results import KINDS, SCORED, read_sessions, trained_in

RECORD = "ablation.json"  # what the folder is; it makes a folder an ablation's


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before the first process starts."""

    ablation: Ablation
    out: Path
    key: Path
    answers: Answers  # the same, to compare pairs with
    config: Config  # of every run, but for what its row decides
    flags: tuple[str, ...]  # that make `adapt` arrive at this configuration, but for the method's options

    def runs(self) -> list[PlannedRun]:
        return [self._run(variant) for variant in self.ablation.variants]

    def _run(self, variant: Variant) -> PlannedRun:
        folder, config = self.out / variant.folder, self.config
        root = ("--root", config.root) if config.root else ()
        places = (config.source, config.target, "--out", str(folder))
        verb = ("ablate", "with-key", "--key", str(self.key)) if variant.with_key else ("adapt",)
        device = ("--device", config.device, "--max-bad", str(config.max_bad))
        return PlannedRun(
            name=variant.folder,
            folder=folder,
            adapt=(*verb, *places, *self.flags, *flags(row_settings(self.ablation, variant, config))),
            score=("eval", str(folder), str(self.key), "--json", *root, *device),
            peers=() if config.source_model else self._beside(folder),
        )

    def _beside(self, folder: Path) -> tuple[Path, ...]:
        """The runs that share stage 1: all of a folder, which has one seed. Also what an earlier call left there."""
        planned = [self.out / variant.folder for variant in self.ablation.variants]
        earlier = sorted(source.parent for source in folder.parent.glob(f"*/{SOURCE}"))
        return tuple(dict.fromkeys([*(run for run in planned if run.parent == folder.parent), *earlier]))

    def recipe(self) -> dict[str, Any]:
        """What must stay the same for the rows of one table. Where it runs may change."""
        fixed = {name if name in FIELDS else f"method.{name}": x for name, x in self.ablation.fixed.items()}
        shared = recipe_of(self.config, self.ablation.varied) | fixed
        places = {name: os.path.abspath(place) for name in ("source", "target") if (place := shared.pop(name))}
        return {"ablation": self.ablation.name, "key": os.path.abspath(self.key), **places, **shared}


class Written(Protocol):
    """What the files of an ablation say."""

    @property
    def unfinished(self) -> list[str]: ...
    def record(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Outcome:
    """How far an ablation has come."""

    table: Written
    out: Path
    runs: int
    failed: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """The promised keys of `ablate losses --json`."""
        return {"out": str(self.out), "failed": list(self.failed), **self.table.record()}


def ablate(
    ablation: Ablation,
    source: Path,
    target: Path,
    *,
    key: Path,
    out: Path,
    screen: Screen,
    preset: str | None = None,
    config: Path | None = None,
    force: bool = False,
    jobs: int = 1,
    **settings: Any,
) -> Outcome:
    """Run the rows that are not yet done, `jobs` at a time, score them with the target labels and write the table into
    `out`. `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the preset."""
    plan = make_plan(
        ablation, source, target, settings, key=key, out=out, preset=preset, config=config, force=force, screen=screen
    )
    return carry_out(plan, jobs, screen, write_table)


def make_plan(
    ablation: Ablation,
    source: Path,
    target: Path,
    settings: dict[str, Any],
    *,
    key: Path,
    out: Path,
    preset: str | None,
    config: Path | None,
    force: bool,
    screen: Screen,
) -> Plan:
    settings = with_table_defaults(settings, config)
    chosen, _ = compose_run(source, target, preset, config, with_recipe(settings, config))
    check_rows(ablation, chosen)
    answers = check_input(chosen, key, screen)
    named = {name: value for name, value in (("preset", preset), ("config", config)) if value is not None}
    shared = {name: value for name, value in settings.items() if name in FIELDS and name != "method_args"}
    words = (*flags(named), *flags(shared), *(("--force",) if force else ()))
    return Plan(ablation, out, key, answers, chosen, words)


def with_recipe(settings: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """These settings, and the authors' recipe if neither they nor the file `config` name another."""
    from_file = read_yaml(config) if config is not None else {}
    return ({} if "recipe" in from_file else {"recipe": "authors"}) | settings


def carry_out(plan: Plan, jobs: int, screen: Screen, write: Callable[[Plan], Written]) -> Outcome:
    """`write` leaves what is known so far in the plan's folder: before the first run, and whenever one has ended."""

    def report(job: Job) -> None:
        write(plan)
        if job.failure:
            return
        scored = read_scored(job.run.folder, plan.out)
        assert scored is not None, "it has just been scored"
        scores = ", ".join(f"{KINDS[kind]} {100 * value['accuracy']:.1f}" for kind, value in scored.scores.items())
        screen.say(f"{job.run.name}: {scores}")

    with owned(plan.out, RECORD, plan.recipe(), "an ablation"):
        write(plan)
        failed = run_jobs(plan.ablation.name, plan.runs(), jobs, screen, report)
        table = write(plan)
    return Outcome(table, plan.out, len(plan.ablation.variants), tuple(failed))


def check_rows(ablation: Ablation, config: Config) -> None:
    """Settings that the run of some row would refuse are reported before the first one."""
    for variant in ablation.variants:
        row = make_config(config.to_dict() | {"method_args": {}} | row_settings(ablation, variant, config))
        if not variant.with_key:
            require_method(row.method)
        resolve(row, _class_of(row.method))


def row_settings(ablation: Ablation, variant: Variant, config: Config) -> dict[str, Any]:
    """What a row's run gets beside the shared settings: its own, and those of the shared options that its method
    has."""
    own = ablation.fixed | variant.settings
    method = own.get("method", config.method)
    names = [field.name for field in fields(_class_of(method).Options)]
    own_options = {name: value for name, value in own.items() if name not in FIELDS}
    if missing := [name for name in own_options if name not in names]:
        raise CdtransError(
            f"The rows of '{ablation.name}' differ in '{missing[0]}', which the method '{method}' does not have; leave "
            "'method' out, and use the recipe 'authors'."
        )
    options = {name: value for name, value in config.method_args.items() if name in names} | own_options
    rest = {name: value for name, value in own.items() if name in FIELDS}
    return rest | {"method": method} | ({"method_args": options} if options else {})


def _class_of(method: str) -> type[Method]:
    return METHODS[method] if method in METHODS else method_class(method)


def check_input(config: Config, key: Path, screen: Screen) -> Answers:
    """What would be wrong with every run is reported before the first one. Returns the target labels."""
    check_distinct(Path(config.source), Path(config.target))
    answers = read_answers(config, key, screen)
    if config.source_model:
        require_stage_1(Path(config.source_model))
    elif config.weights:
        read_state(Path(config.weights))
    check_of_target(answers, key)  # last: it may decode
    return answers


def write_table(plan: Plan) -> AblationTable:
    """The table, from what the run folders hold now."""
    ablation, by_paper = plan.ablation, {variant.paper: variant for variant in plan.ablation.variants}
    table = AblationTable(
        name=ablation.name,
        title=ablation.title,
        named_by=ablation.named_by,
        notes=ablation.notes,
        source=plan.config.source,
        target=plan.config.target,
        key=str(plan.key),
        backbone=plan.config.backbone,
        seed=plan.config.seed,
        about_pairs=ablation.about_pairs,
        rows=tuple(_row(plan, by_paper[paper.method], paper) for paper in ablation.paper()),
    )
    write_files(plan, table.record(), markdown(table))
    return table


def write_files(plan: Plan, record: dict[str, Any], page: str) -> None:
    """NAME.json and NAME.md."""
    for ending, text in (("json", json.dumps(record, indent=1) + "\n"), ("md", page)):
        with atomic(plan.out / f"{plan.ablation.name}.{ending}") as file:
            file.write(text.encode("utf-8", "surrogateescape"))


def _row(plan: Plan, variant: Variant, paper: PaperRow) -> Row:
    folder = plan.out / variant.folder
    scored = read_scored(folder, plan.out)
    measured = scored is not None and plan.ablation.about_pairs and variant.measured
    pairs = tuple(pair_quality(folder, plan.answers)) if measured else ()
    return Row(paper, variant.folder, variant.settings, scored, pairs, variant.with_key)


def read_scored(folder: Path, out: Path) -> Scored | None:
    """None for a run that is not finished and scored. `out` is the folder of all."""
    if not (folder / SCORED).exists():
        return None
    evaluation = json.loads((folder / SCORED).read_text(encoding="utf-8"))
    epochs = {"label_free": read_result(folder)["chosen_epoch"]}
    metrics = ("accuracy", "class_mean_accuracy")
    scores = {"label_free": {metric: evaluation[metric] for metric in metrics}}
    history = evaluation.get("accuracy_by_epoch")
    if not history:  # a table of the chosen epoch alone, maybe on other images, would look like a finished one
        raise CdtransError(
            f"'{folder / SCORED}' has no score of every epoch: the labelled images were not the target's, or "
            f"'{folder / 'predictions'}' was gone; delete the file to score it again, or the folder to run it again."
        )
    epochs["source_only"] = 0
    if len(history) > 1:  # the guard may have ended the run before stage 2
        epochs |= {"last_epoch": len(history) - 1, "best_by_labels": evaluation["best_by_labels_epoch"]}
    for kind in epochs.keys() - scores.keys():
        scores[kind] = {metric: evaluation[f"{metric}_by_epoch"][epochs[kind]] for metric in metrics}
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    return Scored(
        scores={kind: scores[kind] for kind in KINDS if kind in scores},
        per_class=evaluation["per_class"],
        epochs=epochs,
        images=evaluation["images"],
        target_images=json.loads((folder / "data.json").read_text(encoding="utf-8"))["target"]["images"],
        device=environment["device"],
        seconds=sum(session["seconds"] for session in read_sessions(folder)),
        stage_1=trained_in(folder, out),
    )
