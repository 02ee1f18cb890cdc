"""The paper's Fig. 2b on anybody's data:

    python -m research.figures.noise SOURCE TARGET --labels LABELLED --out DIR [flags of `cdtrans ablate losses`]

Pairs of one true class are sampled with target labels (sampled_pairs.py), and some are replaced by false ones.
Three curves over the share of false pairs: trained with cross-attention, trained without it, and with cross-attention
on the true pairs that are left. Each point is a run folder like a row of the other ablations, trained with
the labels."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typing_extensions import Unpack

from cdtrans.cli import app
from cdtrans.config import (
    HELP,
    SETTINGS,
    Force,
    Jobs,
    Settings,
    SettingsFile,
    SourceArgument,
    TargetArgument,
    compose_run,
)
from cdtrans.errors import CdtransError, SettingsError
from cdtrans.inputs.scan import scan_unlabelled
from cdtrans.paper.printed_tables import Ablation, Variant, paper_ablation
from cdtrans.record.files import atomic
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range
from cdtrans.studies.ablation import DEFAULTS, AblationPlan, StudyFolder, make_plan
from cdtrans.studies.benchmark import parse_seeds
from cdtrans.studies.results import (
    SCORE_TITLES,
    FinishedRuns,
    RunResult,
    Spread,
    is_scored,
    seed_spread,
    shared_stage_1,
)
from cdtrans.studies.study import BenchResult
from cdtrans.studies.tables import NOTHING, Document, Table, missing_runs, scored_images
from research.figures.sampled_pairs import MOST_PAIRS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("last_epoch", "label_free", "best_by_labels")  # one table each; the figure shows the first
NAME = "noise"
METHOD = Path(__file__).with_name("sampled_pairs.py").resolve()
DECIDED_HERE = {  # settings that each run has of its own
    *("method", "rebuild_every", "seed", "loss_source", "loss_source_target", "loss_target"),
    *("pairing", "center_aware", "target_class", "mutual_pairs"),
}
DECIMALS = 6  # digits of a level
STYLES = (("#c0182b", "o-"), ("#2a9d5c", "s-"), ("#1f6fb4", "^--"))  # the paper's red, green and blue
GREY = "#777777"
DPI = 144
NOTES = (
    "Every run, of every curve, was trained on pairs that were made with target labels: this measures what false pairs "
    "do, and is no way to adapt. With cross-attention: the three branches and all three losses. Without: the source's "
    "and the target's classification alone, each target image taught the label of its source image. Only true positive "
    "pairs: with cross-attention, on those that the false ones have not replaced, and so in fewer steps.",
    paper_ablation("losses").notes[1],  # a loss that is left out
    "The pairs are drawn once for a seed, for all curves and levels, and stay for the whole run: every target image of "
    "a known class once before any comes twice, with a random source image of its class. A false pair keeps the target "
    "image and has a random source image of another class; those of a higher level contain those of a lower one. The "
    "paper does not say how many pairs it sampled or how long it trained, and prints no numbers beside its figure.",
)


class Curve(NamedTuple):
    name: str  # after the paper
    folder: str
    settings: dict[str, Any]


WITH = Curve("with cross-attention", "cross-attention", {"drop_false": False, "loss_source_target": "dtl"})
WITHOUT = Curve("without cross-attention", "no-cross-attention", {"drop_false": False, "loss_source_target": "none"})
ONLY_TRUE = Curve("only true positive pairs", "only-true-pairs", {"drop_false": True, "loss_source_target": "dtl"})
CURVES = (WITH, WITHOUT, ONLY_TRUE)


@dataclass(frozen=True)
class Levels:
    """The points that are asked for."""

    levels: tuple[float, ...]  # percent of false pairs
    seeds: tuple[int, ...]
    pairs: int

    def left(self, level: float) -> int:
        """The number of true pairs at a level, as sampled_pairs.py counts them."""
        return self.pairs - round(level / 100 * self.pairs)

    def run(self, curve: Curve, level: float, seed: int) -> str | None:
        """The folder of a point. Without a false pair to remove, two curves share it; None without a true pair."""
        if curve is ONLY_TRUE and self.left(level) < 2:
            return None
        same = WITH if curve is ONLY_TRUE and self.left(level) == self.pairs else curve
        return f"seed-{seed}/{same.folder}-{level:.{3 + DECIMALS}g}"  # up to 100, all digits

    def variants(self) -> tuple[Variant, ...]:
        variants: dict[str, Variant] = {}
        for seed in self.seeds:
            for level in self.levels:
                for curve in CURVES:
                    folder = self.run(curve, level, seed)
                    if folder is not None and folder not in variants:
                        own = {"false_share": level / 100, "seed": seed, "sample_seed": seed}
                        variants[folder] = Variant(curve.name, folder, curve.settings | own, with_labels=True)
        return tuple(variants.values())


@dataclass(frozen=True)
class Point:
    """A curve at one level: the runs of all seeds, and the results of those that are finished."""

    level: float
    pairs: int  # pairs trained on
    runs: dict[int, str]  # seed -> folder
    results: dict[int, RunResult]

    def spread(self, kind: str) -> Spread | None:
        """Mean and deviation over the seeds, in percent."""
        scores = {seed: result.scores for seed, result in self.results.items()}
        return seed_spread({seed: {kind: 100 * of[kind]} for seed, of in scores.items() if kind in of}, (kind,))

    def record(self) -> dict[str, Any]:
        runs = [{"run": folder, "seed": seed, **_scores(self.results.get(seed))} for seed, folder in self.runs.items()]
        spreads = {kind: self.spread(kind) for kind in SCORE_TITLES}
        mean = {kind: each._asdict() for kind, each in spreads.items() if each is not None}
        return {"false_pairs_percent": self.level, "pairs": self.pairs, "accuracy_percent": mean, "runs": runs}


def _scores(result: RunResult | None) -> dict[str, Any]:
    return {} if result is None else {"scores": result.scores, "class_means": result.class_means}


Curves = dict[str, tuple[Point, ...]]


def ablate_noise(
    source: SourceArgument,
    target: TargetArgument,
    *,
    labels: Annotated[str | Path, Help("Target labels, for pairs and scores: TARGET with its labels.", "LABELLED")],
    out: StudyFolder,
    screen: Screen,
    levels: Annotated[str, Help("Shares of false pairs, in percent.")] = "0,20,40,60,80,100",
    pairs: Annotated[int | None, Help("Pairs to sample (default: one per target image)."), Range(minimum=2)] = None,
    seeds: Annotated[str, Help("How many seeds (3: 1234, 1 and 2), or a list: 1234,1.")] = "1",
    config: SettingsFile = None,
    force: Force = False,
    jobs: Jobs = 1,
    **settings: Unpack[Settings],
) -> BenchResult:
    """Run the points that are not yet done, `jobs` at a time, and leave noise.json, noise.md and noise.png in `out`."""
    shares, numbers = parse_levels(levels), parse_seeds(seeds)
    composed, _ = compose_run(source, target, config, {**settings}, DEFAULTS)
    if pairs is not None and pairs > MOST_PAIRS:
        raise SettingsError("too-many-pairs", f"--pairs must be at most {MOST_PAIRS}, not {pairs}.")
    root = composed.root
    images = len(scan_unlabelled(Path(target), Path(root) if root else None))
    study = Levels(shares, numbers, pairs or images)
    fixed = {"method": f"{METHOD}:SampledPairs", "pairs": study.pairs, "loss_source": "cls", "loss_target": "cls"}
    fixed["rebuild_every"] = composed.epochs  # the sample stays the same
    title = "Robustness to noise (the paper's Fig. 2b)"
    ablation = Ablation(NAME, title, (), study.variants(), NOTES, fixed=fixed)
    plan = make_plan(ablation, composed, Path(labels), Path(out), screen, force=force)
    return NoisePlan(**vars(plan), points=study).carry_out(jobs, screen)


def parse_levels(text: str) -> tuple[float, ...]:
    """'0,20,100': percent, each once, in rising order."""
    try:
        levels = [round(float(word), DECIMALS) for word in text.split(",") if word.strip()]
    except ValueError:
        levels = []
    if not levels or not all(0 <= level <= 100 for level in levels) or len(set(levels)) < len(levels):
        raise SettingsError(
            "levels", f"--levels must be different percentages from 0 to 100, such as 0,25,50, not '{text}'."
        )
    return tuple(sorted(levels))


@dataclass(frozen=True, kw_only=True)
class NoisePlan(AblationPlan):
    """An ablation whose table is a figure."""

    table = f"{NAME}.png"
    points: Levels

    def write(self, results: FinishedRuns) -> dict[str, Any]:
        return write_curves(self, self.points, results)


def write_curves(plan: AblationPlan, study: Levels, results: FinishedRuns) -> dict[str, Any]:
    """Write noise.json, noise.md and noise.png from what the run folders hold now, also those of earlier calls. Returns
    the content of noise.json."""
    before = earlier(results)
    curves = {curve.name: tuple(read_points(study, curve, before, results)) for curve in CURVES}
    points = [point for of_curve in curves.values() for point in of_curve]
    missing = [folder for point in points for seed, folder in point.runs.items() if seed not in point.results]
    unfinished = list(dict.fromkeys(missing))
    numbers: dict[str, Any] = {
        "epochs": plan.config.epochs,
        "seeds": sorted({seed for point in points for seed in point.runs}),
        "sampled_pairs": study.pairs,
        "unfinished": unfinished,
        "curves": [
            {"curve": name, "trained_with_labels": True, "points": [point.record() for point in of_curve]}
            for name, of_curve in curves.items()
        ],
    }
    document = noise_document(plan, curves, numbers["seeds"], unfinished, study.pairs)
    record = plan.write_files(numbers, document)
    with atomic(plan.out / f"{NAME}.png") as file:
        figure(curves, source_only(points)).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return record


def earlier(results: FinishedRuns) -> list[tuple[float, int]]:
    """Level and seed of every finished run in the folder."""
    runs = []
    for folder in results.out.glob("seed-*/*"):
        if is_scored(folder):
            try:
                config = RunRecord(folder).config
            except CdtransError as error:
                results.leave_out(folder, error)
            else:
                runs.append((round(100 * config.method_args["false_share"], DECIMALS), config.seed))
    return runs


def read_points(study: Levels, curve: Curve, before: list[tuple[float, int]], results: FinishedRuns) -> Iterator[Point]:
    """A curve's points: those asked for, and those of earlier calls."""
    for level in sorted({level for level, _ in before}.union(study.levels)):
        folders = {seed: study.run(curve, level, seed) for seed in sorted({s for _, s in before}.union(study.seeds))}
        read = {seed: results.get(results.out / folder) for seed, folder in folders.items() if folder is not None}
        finished = {seed: result for seed, result in read.items() if result is not None}
        wanted = study.seeds if level in study.levels else ()
        runs = {seed: folder for seed, folder in folders.items() if folder and (seed in wanted or seed in finished)}
        if runs:
            pairs = study.left(level) if curve is ONLY_TRUE else study.pairs
            yield Point(level, pairs, runs, finished)


def source_only(points: Sequence[Point]) -> Spread | None:
    """The accuracy before stage 2, which all runs of a seed share."""
    scores = {seed: result.scores for point in points for seed, result in point.results.items()}
    kind = "source_only"
    return seed_spread({seed: {kind: 100 * of[kind]} for seed, of in scores.items() if kind in of}, (kind,))


def noise_document(
    plan: AblationPlan, curves: Curves, seeds: Sequence[int], unfinished: Sequence[str], pairs: int
) -> Document:
    """The content of noise.md."""
    config, points = plan.config, [point for of_curve in curves.values() for point in of_curve]
    finished = [result for point in points for result in point.results.values()]
    before = [
        f"{config.source} to {config.target}; {config.backbone}, {pairs} pairs, {config.epochs} "
        f"epoch{'s' * (config.epochs > 1)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}. Accuracy in "
        "percent, over the percentage of false pairs.",
        f"Target labels: {plan.labels}. EVERY run was trained and scored with them.",
        *scored_images(finished),
        *missing_runs(unfinished, len(plan.ablation.variants)),
    ]
    if len({len(point.results) for point in points}) > 1:
        before.append("Not every point has all seeds; noise.json lists the runs of each.")
    if (start := source_only(points)) is not None:
        before += [f"Source only, before any pair: {start}.", shared_stage_1(finished)]
    return Document(plan.ablation.title, before, [_table(curves, kind) for kind in SHOWN], plan.ablation.notes)


def _table(curves: Curves, kind: str) -> Table:
    rows = []
    for level in sorted({point.level for points in curves.values() for point in points}):
        means = ([p.spread(kind) for p in points if p.level == level] for points in curves.values())
        rows.append((f"{level:g}", *(str(mean[0] or NOTHING) if mean else NOTHING for mean in means)))
    return Table(("false pairs", *curves), [rows], SCORE_TITLES[kind].capitalize())


def figure(curves: Curves, source_only: Spread | None) -> "Figure":
    """The last epoch's accuracy over the share of false pairs. Points of unfinished runs may be missing."""
    from matplotlib.figure import Figure

    whole = Figure(figsize=(5.6, 4.0), layout="constrained")
    axes = whole.subplots()
    for (name, points), (colour, style) in zip(curves.items(), STYLES, strict=True):
        known = [(point.level, mean) for point in points if (mean := point.spread(SHOWN[0])) is not None]
        levels, means = [level for level, _ in known], [mean.mean for _, mean in known]
        axes.plot(levels, means, style, color=colour, markersize=5, label=name)
        for level, mean in known:
            if mean.deviation is not None:
                axes.errorbar(level, mean.mean, mean.deviation, ecolor=colour, elinewidth=1, capsize=3)
    if source_only is not None:
        axes.axhline(source_only.mean, color=GREY, linewidth=1, linestyle=":", label="source only")
    axes.set_xlim(-3, 103)
    axes.set_xlabel("false positive pairs in the training data, %")
    axes.set_ylabel(f"accuracy on the target, %  ({SCORE_TITLES[SHOWN[0]]})")
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return whole


def main() -> None:
    """The command, with the flags of the verbs of `cdtrans`."""
    about = "Replace true pairs, made with target labels, by false ones; with and without cross-attention."
    HELP["verbs"][NAME] = about
    app.VERBS[NAME] = replace(
        app.VERBS["ablate losses"],
        function="research.figures.noise:ablate_noise",
        settings=SETTINGS.keys() - DECIDED_HERE - app.NOT_IN_ROWS,
    )
    sys.argv.insert(1, NAME)
    app.run_program()


if __name__ == "__main__":
    main()
