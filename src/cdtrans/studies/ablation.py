"""`cdtrans ablate losses`, `pseudo-labels`: the paper's Tables 5 and 6 on anybody's data, as NAME.json and NAME.md.

Every row is a run that `cdtrans adapt` makes (with true pairs: paper/known_pairs.py) and `cdtrans eval` scores, as in a
benchmark; rows differ in their own settings alone. These are stage 2's, so one stage 1 serves all rows: on a GPU a
second one would not be the same, and the difference as large as that of two rows."""

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import (
    FIELDS,
    TABLE_DEFAULTS,
    Config,
    Force,
    Jobs,
    Settings,
    SettingsFile,
    SourceArgument,
    TargetArgument,
    compose_run,
    make_config,
)
from cdtrans.errors import CdtransError, SettingsError
from cdtrans.inputs.scan import check_distinct
from cdtrans.methods import require_method
from cdtrans.paper.pair_labels import (
    PairQuality,
    TargetClasses,
    pair_quality,
    read_target_classes,
    require_target_images,
)
from cdtrans.paper.printed_tables import AVERAGE, Ablation, Cells, Variant, paper_ablation, paper_table
from cdtrans.record import layout
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help
from cdtrans.studies.recipes import recipe_of
from cdtrans.studies.results import SCORE_TITLES, FinishedRuns, RunResult
from cdtrans.studies.study import BenchResult, PlannedRun, Study
from cdtrans.studies.tables import NOTHING, Document, Table, cost_notes, document, markdown, missing_runs, scored_images

ScoringLabels = Annotated[
    str | Path, Help("Target labels, for scores after training: TARGET with its labels.", "LABELLED")
]
StudyFolder = Annotated[str | Path, Help("Folder for the runs and the table; resumed if it exists.", "DIR")]
DEFAULTS = {"recipe": "authors"} | TABLE_DEFAULTS  # settings of every ablation
PAPER_PAIRS = ("Rec_s", "Rec_t", "Prec")  # Table 5's columns about the pairs


@dataclass(frozen=True)
class AblationPlan(Study):
    """Everything that is decided before the first process starts."""

    kind = "ablation"

    ablation: Ablation
    config: Config  # every run's, except for what its row decides
    labels: Path
    out: Path
    true: TargetClasses  # the same labels, to compare pairs with
    force: bool = False

    @property
    def table(self) -> str:
        return f"{self.ablation.name}.md"

    def recipe(self) -> dict[str, Any]:
        """The settings that are the same for the rows of one table. Where the runs are made may change."""
        fixed = {name if name in FIELDS else f"method.{name}": x for name, x in self.ablation.fixed.items()}
        shared = recipe_of(self.config, self.ablation.varied) | fixed
        return {"ablation": self.ablation.name, "labels": os.path.abspath(self.labels), **shared}

    def runs(self) -> tuple[PlannedRun, ...]:
        return tuple(self._run(variant) for variant in self.ablation.variants)

    def _run(self, variant: Variant) -> PlannedRun:
        """Stage 1 is shared by all runs in one folder, which has one seed, also those of earlier calls."""
        verb = ("ablate", "with-labels", "--labels", str(self.labels)) if variant.with_labels else ("adapt",)
        folder = self.out / variant.folder
        planned = [run for each in self.ablation.variants if (run := self.out / each.folder).parent == folder.parent]
        earlier = sorted(run for run in folder.parent.glob("*") if RunRecord(run).has_model(layout.SOURCE))
        return PlannedRun(
            name=variant.folder,
            folder=folder,
            adapt=(*verb, *(("--force",) if self.force else ())),
            labels=self.labels,
            settings=row_config(self.ablation, variant, self.config).to_dict(),
            peers=() if self.config.source_model else tuple(dict.fromkeys([*planned, *earlier])),
        )

    def write(self, results: FinishedRuns) -> dict[str, Any]:
        """NAME.json, whose content is returned, and NAME.md."""
        ablation = self.ablation
        rows = [read_row(self, results, variant) for variant in ablation.variants]
        finished = [row.result for row in rows if row.result]
        unfinished = [row.variant.folder for row in rows if row.result is None]
        pairs = PAPER_PAIRS if ablation.about_pairs else ()
        printed = (*(f"paper's {name}" for name in pairs), "paper (VisDA-2017)")
        head = (*ablation.named_by, *pairs, *SCORE_TITLES.values(), *printed)
        content = document(
            "ablation.txt",
            ablation.title,
            [Table(head, [[row.cells(ablation) for row in rows]])],
            config=self.config,
            labels=self.labels,
            labelled=[row.variant.paper for row in rows if row.variant.with_labels],
            notices=[*scored_images(finished), *missing_runs(unfinished, len(rows))],
            notes=ablation.notes,
            cost=cost_notes(finished),
        )
        record = {"seed": self.config.seed, "unfinished": unfinished, "rows": [row.record() for row in rows]}
        return self.write_files(record, content)

    def write_files(self, results: dict[str, Any], content: Document) -> dict[str, Any]:
        """NAME.json, which begins with a description of the study, and NAME.md."""
        config = self.config
        places = {"source": config.source, "target": config.target, "labels": str(self.labels)}
        record = {"ablation": self.ablation.name, **places, "backbone": config.backbone, **results}
        name = self.ablation.name
        self.save({f"{name}.json": json.dumps(record, indent=1) + "\n", f"{name}.md": markdown(content)})
        return record


def ablate(
    name: str,
    source: SourceArgument,
    target: TargetArgument,
    *,
    labels: ScoringLabels,
    out: StudyFolder,
    screen: Screen,
    config: SettingsFile = None,
    force: Force = False,
    jobs: Jobs = 1,
    **settings: Unpack[Settings],
) -> BenchResult:
    """Run the rows that are not yet done, `jobs` at a time, score them with the target labels and write the table into
    `out`. `settings` are the fields of `Config`; they win over the YAML file `config`, which wins over the recipe."""
    composed, _ = compose_run(source, target, config, {**settings}, DEFAULTS)
    plan = make_plan(paper_ablation(name), composed, Path(labels), Path(out), screen, force=force)
    return plan.carry_out(jobs, screen)


ablate_losses, ablate_pseudo_labels = partial(ablate, "losses"), partial(ablate, "pseudo-labels")


def make_plan(
    ablation: Ablation, config: Config, labels: Path, out: Path, screen: Screen, *, force: bool = False
) -> AblationPlan:
    """The plan of an ablation. Problems with settings and input that some run would have are reported here."""
    from cdtrans.network.weights import read_state
    from cdtrans.paper.known_pairs import row_class
    from cdtrans.run.pipeline import resolve
    from cdtrans.run.stage1 import require_stage_1

    for variant in ablation.variants:
        row = row_config(ablation, variant, config)
        if not variant.with_labels:
            require_method(row.method)
        resolve(row, row_class(row.method))
    check_distinct(Path(config.source), Path(config.target))
    true = read_target_classes(config, labels, screen)
    if config.source_model:
        require_stage_1(Path(config.source_model))
    elif config.weights:
        read_state(Path(config.weights))
    require_target_images(true, labels)  # last: it may decode
    return AblationPlan(ablation, config, labels, out, true, force)


def row_config(ablation: Ablation, variant: Variant, config: Config) -> Config:
    """The configuration of a row's run: its own settings, the shared ones, and the shared options that its method
    has."""
    from cdtrans.paper.known_pairs import row_class

    own = ablation.fixed | variant.settings
    method = own.get("method", config.method)
    names = [field.name for field in fields(row_class(method).Options)]
    own_options = {name: value for name, value in own.items() if name not in FIELDS}
    if missing := [name for name in own_options if name not in names]:
        raise SettingsError(
            "ablation-method",
            f"The rows of '{ablation.name}' differ in '{missing[0]}', which the method '{method}' does not have; leave "
            "'method' out, and use the recipe 'authors'.",
        )
    options = {name: value for name, value in config.method_args.items() if name in names} | own_options
    rest = {name: value for name, value in own.items() if name in FIELDS}
    return make_config(config.to_dict() | rest | {"method": method, "method_args": options})


@dataclass(frozen=True)
class AblationRow:
    """A row of the paper's table, and the run that stands for it."""

    variant: Variant
    paper: Cells
    result: RunResult | None  # None: not finished
    pairs: tuple[PairQuality, ...] = ()  # every round's, where the table is about pairs

    def record(self) -> dict[str, Any]:
        return {
            "row": self.variant.paper,
            "run": self.variant.folder,
            "settings": self.variant.settings,
            "trained_with_labels": self.variant.with_labels,
            **(asdict(self.result) if self.result else {}),
            **({"pairs": [asdict(quality) for quality in self.pairs]} if self.pairs else {}),
            "paper": self.paper,
        }

    def cells(self, ablation: Ablation) -> tuple[str, ...]:
        names = self.variant.paper.split(" ", len(ablation.named_by) - 1)
        shares = self.pairs[-1].shares if self.pairs else (None,) * len(PAPER_PAIRS)
        pairs = [NOTHING if share is None else f"{100 * share:.1f}" for share in shares]
        printed = [self.paper[name] for name in PAPER_PAIRS if ablation.about_pairs]
        return (*names, *pairs[: len(printed)], *map(self._score, SCORE_TITLES), *printed, self.paper[AVERAGE])

    def _score(self, kind: str) -> str:
        if self.result is None or kind not in self.result.scores:  # the guard may have ended the run before stage 2
            return NOTHING
        return f"{100 * self.result.scores[kind]:.1f} ({100 * self.result.class_means[kind]:.1f})"


def read_row(plan: AblationPlan, finished: FinishedRuns, variant: Variant) -> AblationRow:
    folder, paper = plan.out / variant.folder, paper_table(plan.ablation.name)[variant.paper]
    result = finished.get(folder)
    if result is None or not plan.ablation.about_pairs or not variant.measured:
        return AblationRow(variant, paper, result)
    record = RunRecord(folder)
    try:
        return AblationRow(variant, paper, result, pair_quality(record, plan.true.in_order(record)))
    except CdtransError as error:
        finished.leave_out(folder, error)
        return AblationRow(variant, paper, None)
