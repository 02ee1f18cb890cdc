"""`cdtrans ablate noise`: the paper's Fig. 2b on anybody's data.

Pairs of one true class are sampled with target labels (known_pairs.py), and some are replaced by false ones. Three
curves over the share of false pairs: trained with cross-attention, trained without it, and with cross-attention on the
true pairs that are left. Each point is a run folder like a row of the other ablations, trained with the key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.config import compose_run, read_yaml
from cdtrans.errors import CdtransError
from cdtrans.inputs.scan import scan_unlabelled
from cdtrans.paper.ablation_rows import LEFT_OUT, MOST_PAIRS, Ablation, Variant
from cdtrans.paper.ablation_tables import NOTHING, Scored, scored_images
from cdtrans.paper.ablations import Outcome, Plan, carry_out, make_plan, read_scored, with_recipe, write_files
from cdtrans.paper.noise_figure import write_figure
from cdtrans.record.run_folder import CONFIG
from cdtrans.runtime.screen import Screen
from cdtrans.studies.benchmark import parse_seeds
from cdtrans.studies.results import KINDS, SCORED, Spread, shared_stage_1, spread

SHOWN = ("last_epoch", "label_free", "best_by_labels")  # a table for each; the picture has the first
NAME = "noise"
DECIMALS = 6  # of a level
NOTES = (
    "Every run, of every curve, was trained on pairs that were made with target labels: this measures what false pairs "
    "do, and is no way to adapt. With cross-attention: the three branches and all three losses. Without: the source's "
    "and the target's classification alone, each target image taught the label of its source image. Only true positive "
    "pairs: with cross-attention, on those that the false ones have not replaced, and so in fewer steps.",
    LEFT_OUT,
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
class Study:
    """What is asked for."""

    levels: tuple[float, ...]  # percent of false pairs
    seeds: tuple[int, ...]
    pairs: int

    def left(self, level: float) -> int:
        """True pairs, as known_pairs.py counts them."""
        return self.pairs - round(level / 100 * self.pairs)

    def run(self, curve: Curve, level: float, seed: int) -> str | None:
        """The folder of a point. Without a false pair to remove, two curves have one; None where nothing is left."""
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
                        variants[folder] = Variant(curve.name, folder, curve.settings | own, with_key=True)
        return tuple(variants.values())


@dataclass(frozen=True)
class Point:
    """A curve at one level: the runs of all seeds, and what those that are finished came to."""

    level: float
    pairs: int  # trained on
    runs: dict[int, str]  # seed -> folder
    scored: dict[int, Scored]

    def spread(self, kind: str, metric: str = "accuracy") -> Spread | None:
        """Percent, over the seeds."""
        by_seed = {seed: scored.scores for seed, scored in self.scored.items() if kind in scored.scores}
        return spread({seed: {kind: 100 * scores[kind][metric]} for seed, scores in by_seed.items()}, (kind,))

    def record(self) -> dict[str, Any]:
        runs = [
            {"run": folder, "seed": seed} | ({"scores": self.scored[seed].scores} if seed in self.scored else {})
            for seed, folder in self.runs.items()
        ]
        spreads = {kind: self.spread(kind) for kind in KINDS}
        mean = {kind: each._asdict() for kind, each in spreads.items() if each is not None}
        return {"false_pairs_percent": self.level, "pairs": self.pairs, "accuracy_percent": mean, "runs": runs}


@dataclass(frozen=True)
class NoiseCurves:
    """Everything that the page and the picture say: of what is asked for, and of what was scored here before."""

    plan: Plan
    pairs: int
    curves: dict[str, tuple[Point, ...]]

    def points(self) -> list[Point]:
        return [point for points in self.curves.values() for point in points]

    @property
    def levels(self) -> list[float]:
        return sorted({point.level for point in self.points()})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for point in self.points() for seed in point.runs})

    def scored(self) -> list[Scored]:
        return [scored for point in self.points() for scored in point.scored.values()]

    @property
    def unfinished(self) -> list[str]:
        missing = [folder for p in self.points() for seed, folder in p.runs.items() if seed not in p.scored]
        return list(dict.fromkeys(missing))

    def source_only(self) -> Spread | None:
        """Before stage 2, of which the runs of a seed have the same."""
        first = {seed: scored.scores for p in self.points() for seed, scored in p.scored.items()}
        return spread({seed: {"": 100 * s["source_only"]["accuracy"]} for seed, s in first.items()}, ("",))

    def trained(self) -> dict[str, str]:
        """For each finished run the one that trained its stage 1."""
        return {p.runs[seed]: scored.stage_1 for p in self.points() for seed, scored in p.scored.items()}

    def record(self) -> dict[str, Any]:
        """noise.json."""
        config = self.plan.config
        return {
            "ablation": NAME,
            "source": config.source,
            "target": config.target,
            "key": str(self.plan.key),
            "backbone": config.backbone,
            "epochs": config.epochs,
            "seeds": self.seeds,
            "sampled_pairs": self.pairs,
            "unfinished": self.unfinished,
            "curves": [
                {"curve": name, "trained_with_key": True, "points": [point.record() for point in points]}
                for name, points in self.curves.items()
            ],
        }


def ablate_noise(
    source: Path,
    target: Path,
    *,
    key: Path,
    out: Path,
    screen: Screen,
    levels: str = "0,20,40,60,80,100",
    pairs: int | None = None,
    seeds: str = "1",
    preset: str | None = None,
    config: Path | None = None,
    force: bool = False,
    jobs: int = 1,
    **settings: Any,
) -> Outcome:
    """Run the points that are not yet done, `jobs` at a time, and leave noise.json, noise.md and noise.png in `out`."""
    shares, numbers = parse_levels(levels), parse_seeds(seeds)
    chosen, _ = compose_run(source, target, preset, config, with_recipe(settings, config))
    images = len(scan_unlabelled(target, Path(chosen.root) if chosen.root else None))
    if pairs is not None and pairs > MOST_PAIRS:
        raise CdtransError(f"--pairs must be at most {MOST_PAIRS}, not {pairs}.")
    study = Study(shares, numbers, pairs or images)
    fixed = {"method": "sampled_pairs", "pairs": study.pairs, "loss_source": "cls", "loss_target": "cls"}
    fixed["rebuild_every"] = chosen.epochs  # the sample stays the same
    title = "Robustness to noise (the paper's Fig. 2b)"
    ablation = Ablation(NAME, title, (), study.variants(), NOTES, fixed=fixed)
    plan = make_plan(
        ablation,
        source,
        target,
        settings,
        key=key,
        out=out,
        preset=preset,
        config=config,
        force=force,
        screen=screen,
    )
    return carry_out(plan, jobs, screen, lambda plan: write_curves(plan, study))


def parse_levels(text: str) -> tuple[float, ...]:
    """'0,20,100': percent, each once, in rising order."""
    try:
        levels = [round(float(word), DECIMALS) for word in text.split(",") if word.strip()]
    except ValueError:
        levels = []
    if not levels or not all(0 <= level <= 100 for level in levels) or len(set(levels)) < len(levels):
        raise CdtransError(f"--levels must be different percentages from 0 to 100, such as 0,25,50, not '{text}'.")
    return tuple(sorted(levels))


def write_curves(plan: Plan, study: Study) -> NoiseCurves:
    """noise.json, noise.md and noise.png, from what the run folders hold now, also those of earlier calls."""
    curves = {curve.name: tuple(_points(plan.out, study, curve)) for curve in CURVES}
    noise = NoiseCurves(plan, study.pairs, curves)
    write_files(plan, noise.record(), markdown(noise))
    drawn = {
        name: [(p.level, mean) for p in points if (mean := p.spread(SHOWN[0])) is not None]
        for name, points in curves.items()
    }
    write_figure(plan.out / f"{NAME}.png", drawn, noise.source_only(), what=KINDS[SHOWN[0]])
    return noise


def _points(out: Path, study: Study, curve: Curve) -> Iterator[Point]:
    before = [read_yaml(file.with_name(CONFIG)) for file in out.glob(f"seed-*/*/{SCORED}")]
    levels = {round(100 * config["method_args"]["false_share"], DECIMALS) for config in before}
    seeds = {config["seed"] for config in before}
    for level in sorted(levels.union(study.levels)):
        folders = {seed: study.run(curve, level, seed) for seed in sorted(seeds.union(study.seeds))}
        read = {seed: read_scored(out / folder, out) for seed, folder in folders.items() if folder is not None}
        scored = {seed: score for seed, score in read.items() if score is not None}
        wanted = study.seeds if level in study.levels else ()
        runs = {seed: folder for seed, folder in folders.items() if folder and (seed in wanted or seed in scored)}
        if runs:
            pairs = study.left(level) if curve is ONLY_TRUE else study.pairs
            yield Point(level, pairs, runs, scored)


def markdown(noise: NoiseCurves) -> str:
    config, seeds = noise.plan.config, noise.seeds
    lines = [
        f"# {noise.plan.ablation.title}",
        f"{config.source} to {config.target}; {config.backbone}, {noise.pairs} pairs, {config.epochs} "
        f"epoch{'s' * (config.epochs > 1)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}. Accuracy in "
        "percent, over the percentage of false pairs.",
        f"Target labels: {noise.plan.key}. EVERY run was trained and scored with them.",
    ]
    lines += scored_images(noise.scored())
    if noise.unfinished:
        runs = len(noise.plan.ablation.variants)
        lines.append(f"UNFINISHED: {len(noise.unfinished)} of {runs} runs are missing: {', '.join(noise.unfinished)}.")
    if len({len(point.scored) for point in noise.points()}) > 1:
        lines.append("Not every point has all seeds; noise.json lists the runs of each.")
    if (source_only := noise.source_only()) is not None:
        lines.append(f"Source only, before any pair: {source_only}.")
        lines.append(shared_stage_1(noise.trained()))
    for kind in SHOWN:
        lines += [f"## {KINDS[kind].capitalize()}", _table(noise, kind)]
    return "\n\n".join([*lines, *noise.plan.ablation.notes]) + "\n"


def _table(noise: NoiseCurves, kind: str) -> str:
    rows: list[Sequence[str]] = [("false pairs", *noise.curves), ("---",) * (1 + len(noise.curves))]
    for level in noise.levels:
        cells = []
        for points in noise.curves.values():
            mean = next((point.spread(kind) for point in points if point.level == level), None)
            cells.append(NOTHING if mean is None else str(mean))
        rows.append((f"{level:g}", *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
