"""`cdtrans bench`: the verb that reruns the paper's tables."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cdtrans.cli.options import TABLE_TEXTS, Debug, Force, Jobs, Json, Quiet, print_json, with_settings
from cdtrans.config import SETTINGS
from cdtrans.runtime.screen import Screen

OF_EACH_RUN = {
    "root",
    "seed",
    "source_model",
    "source_classes",
    "target_labels",
}  # set for each run by bench

TEXTS = {
    "recipe": "With one method: authors, the benchmark's preset, or best. With several methods, use --start. "
    "(default: authors; best for cotraining and instant)",
    "effort": "With --recipe best or --start best: quick trains a quarter as much as full. Without --method also "
    "instant, which does not train the backbone. (default: full)",
    "method": "A name from 'cdtrans methods', or FILE.py:CLASS for your own method; all, or several names with commas, "
    "to compare them. (default: cdtrans; cotraining with --recipe best)",
    **TABLE_TEXTS,
}


@partial(with_settings, names=SETTINGS.keys() - OF_EACH_RUN, texts=TEXTS)
def bench(
    benchmark: Annotated[
        str, typer.Argument(metavar="NAME", help="office31, office-home, visda2017, domainnet or pacs.")
    ],
    data: Annotated[Path, typer.Option(help="Folder with the benchmark's domains, as folders or lists.")],
    backbone: Annotated[
        str,
        typer.Option(help="deit_small or deit_base (with their presets), or any timm model."),
    ] = "deit_small",
    seeds: Annotated[str, typer.Option(help="How many seeds (3: 1234, 1 and 2), or a list: 1234,1.")] = "3",
    tasks: Annotated[
        str | None, typer.Option(help="Run only these tasks, such as 'A>W,amazon>dslr' or A-W,A-D.")
    ] = None,
    jobs: Jobs = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and tables (default: one in runs/); resumed if it exists.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="With several methods (--method all, or cdtrans,dann): which stage 1, optimiser and schedule all of "
            "them use, authors (the preset) or best (the best recipe)."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    allow_incomplete: Annotated[
        bool,
        typer.Option("--allow-incomplete", help="Accept data that differs from the published data; the table says so."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun a table of the paper, or compare methods: every task and seed, scored with target labels."""
    from cdtrans.studies.benchmark import bench as run_bench

    screen = Screen(quiet=quiet, machine=json)
    outcome = run_bench(
        benchmark,
        data,
        backbone=backbone,
        seeds=seeds,
        tasks=tasks,
        jobs=jobs,
        out=out,
        config=config,
        start=start,
        force=force,
        allow_incomplete=allow_incomplete,
        screen=screen,
        **settings,
    )
    if json:
        print_json(outcome.summary())
    else:
        screen.result(f"{outcome.finished} of {outcome.asked} runs are finished: {outcome.out / outcome.table}")
    if outcome.failed:
        raise typer.Exit(1)
