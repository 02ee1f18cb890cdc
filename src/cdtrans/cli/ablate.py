"""`cdtrans ablate`: the verbs that rerun the paper's ablations, and figures."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cdtrans.cli.options import (
    TABLE_TEXTS,
    Debug,
    Device,
    Force,
    Jobs,
    Json,
    Key,
    Quiet,
    Root,
    Source,
    Target,
    print_json,
    with_settings,
)
from cdtrans.config import SETTINGS
from cdtrans.errors import HARM, counted
from cdtrans.runtime.screen import Screen

ablate = typer.Typer(no_args_is_help=True, help="Rerun the paper's ablations.")

LOSS_FLAGS = {"loss_source", "loss_source_target", "loss_target"}  # what the rows of Table 6, all of CDTrans, differ in
PAIRING_FLAGS = {"method", "pairing", "center_aware", "target_class"}  # and those of Table 5
PAIR_OPTIONS = {"pairing", "center_aware", "target_class", "mutual_pairs"}  # sampled pairs have none of these
NOISE_FLAGS = LOSS_FLAGS | PAIR_OPTIONS | {"method", "rebuild_every", "seed"}  # and the runs of Fig. 2b
NOT_HERE = {"target_labels", "source_classes", "effort"}  # rows have a source and no target labels
TEXTS = {
    "recipe": "Defaults for the other settings: the CDTrans authors' recipe, or this project's best one. (authors, "
    "best; default: authors)",
    **TABLE_TEXTS,
}


@ablate.command()
@partial(with_settings, names=SETTINGS.keys() - LOSS_FLAGS - {"method", "recipe"} - NOT_HERE, texts=TEXTS)
def losses(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the table; resumed if it exists.")],
    preset: Annotated[str | None, typer.Option(help="A named set of settings, as for 'adapt'.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Table 6, the losses of the three branches: five runs, scored with target labels afterwards."""
    from cdtrans.paper.ablation_rows import LOSSES

    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force, "jobs": jobs}
    _ablate(LOSSES, source, target, quiet, json, **how, **settings)


@ablate.command(name="pseudo-labels")
@partial(with_settings, names=SETTINGS.keys() - PAIRING_FLAGS - NOT_HERE, texts=TEXTS)  # each row has its own
def pseudo_labels(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the table; resumed if it exists.")],
    preset: Annotated[str | None, typer.Option(help="A named set of settings, as for 'adapt'.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Table 5, the ways to find pairs: one run each, scored with target labels; one run trains on them."""
    from cdtrans.paper.ablation_rows import PSEUDO_LABELS

    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force, "jobs": jobs}
    _ablate(PSEUDO_LABELS, source, target, quiet, json, **how, **settings)


@ablate.command()
@partial(with_settings, names=SETTINGS.keys() - NOISE_FLAGS - NOT_HERE, texts=TEXTS)  # each run has its own
def noise(
    source: Source,
    target: Target,
    key: Annotated[
        Path, typer.Option(metavar="LABELLED", help="Target labels, for pairs and scores: TARGET with its labels.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the plot; resumed if it exists.")],
    levels: Annotated[str, typer.Option(help="Shares of false pairs, in percent.")] = "0,20,40,60,80,100",
    pairs: Annotated[int | None, typer.Option(min=2, help="Pairs to sample (default: one per target image).")] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds (3: 1234, 1 and 2), or a list: 1234,1.")] = "1",
    preset: Annotated[str | None, typer.Option(help="A named set of settings, as for 'adapt'.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Fig. 2b: replace true pairs, made with target labels, by false ones; with and without cross-attention."""
    from cdtrans.paper.noise import ablate_noise

    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force, "jobs": jobs}
    study = {"levels": levels, "pairs": pairs, "seeds": seeds}
    screen = Screen(quiet=quiet, machine=json)
    outcome = ablate_noise(source, target, screen=screen, **how, **study, **settings)  # type: ignore[arg-type]
    _show(outcome, out / "noise.png", quiet, json)


@ablate.command()
def attention(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The picture, a PNG.")],
    key: Annotated[
        Path | None,
        typer.Option(metavar="LABELLED", help="The run's target with its labels. Finds false pairs."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, max=100, help="How many false pairs to show at most.")] = 8,
    pair: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE,TARGET", help="Show this pair (paths as in images.csv); may be repeated."),
    ] = None,
    root: Root = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw Fig. 2a: the attention of false-positive pairs of RUN, found with target labels, or of chosen pairs."""
    from cdtrans.paper.attention_figure import draw_attention

    shown = draw_attention(run, key, out, pairs=pairs, chosen=pair or (), root=root, device=device)
    if json:
        print_json({"out": str(out), "pairs": shown.record()})
    else:
        kind = "chosen" if pair else "false-positive"
        Screen(quiet=quiet).result(f"{counted(len(shown.pairs), f'{kind} pair')}: {out}")


@ablate.command(name="with-key", hidden=True)  # a row of pseudo-labels or a run of noise, as a process of its own
@with_settings
def with_key(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(help="The run folder.")],
    preset: Annotated[str | None, typer.Option(help="A named set of settings, as for 'adapt'.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """One run on pairs made with target labels: a measurement, not a way to adapt."""
    from cdtrans.paper.known_pairs import adapt_with_labels

    screen = Screen(quiet=quiet)
    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force}
    result = adapt_with_labels(source, target, screen=screen, **how, **settings)  # type: ignore[arg-type]
    screen.result(f"Done: {result.run} (trained with target labels)")
    if result.harm:
        raise typer.Exit(HARM)


def _ablate(ablation: Any, source: Path, target: Path, quiet: bool, json: bool, **how: Any) -> None:
    from cdtrans.paper.ablations import ablate as run_ablation

    outcome = run_ablation(ablation, source, target, screen=Screen(quiet=quiet, machine=json), **how)
    _show(outcome, outcome.out / f"{ablation.name}.md", quiet, json)


def _show(outcome: Any, file: Path, quiet: bool, json: bool) -> None:
    if json:
        print_json(outcome.summary())
    else:
        finished = outcome.runs - len(outcome.table.unfinished)
        Screen(quiet=quiet).result(f"{finished} of {outcome.runs} runs are finished: {file}")
    if outcome.failed:
        raise typer.Exit(1)
