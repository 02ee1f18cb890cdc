"""The verbs for a few target labels: which images to label, and what the labels show."""

from pathlib import Path
from typing import Annotated

import typer

from cdtrans.cli.options import Debug, Json, Quiet, print_json
from cdtrans.errors import counted
from cdtrans.runtime.screen import Screen

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")]


def ask(
    run: Run,
    budget: Annotated[int, typer.Option(min=1, help="How many images to label.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Folder for the page and the files (default: RUN/ask).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random part.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace labels that 'answer' has not read.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Choose target images to label, and write a labelling page (ask.html), a CSV and a Label Studio file."""
    from cdtrans.measure.ask import ask as ask_for_labels

    screen = Screen(quiet=quiet, machine=json)
    asked = ask_for_labels(run, budget=budget, out=out, seed=seed, force=force, screen=screen)
    summary = asked.summary()
    if json:
        print_json(summary)
        return
    screen.result(
        f"{counted(summary['images'], 'image')} to label: {summary['random']} chosen at random, to measure accuracy,"
        f" and {summary['informative']} that the model is least sure of, to train on."
    )
    screen.result(f"Open {summary['page']} in a browser, or fill in {summary['labels']}.")
    screen.say(f"Then: cdtrans answer {run} {summary['labels']} (or the labels.csv that the page saved)")


def answer(
    run: Run,
    labels: Annotated[
        Path,
        typer.Argument(
            metavar="LABELS", help="labels.csv, from ask.html or filled in by hand, or a Label Studio export."
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure a run with LABELS for some target images: accuracy with a 95% interval, and which model is better."""
    from cdtrans.measure.answer import answer as measure_labels

    screen = Screen(quiet=quiet, machine=json)
    result = measure_labels(run, labels, screen=screen)
    if json:
        print_json(result.summary())
        return
    for sentence in result.sentences(run):
        screen.result(sentence)
    screen.say(f"Stored in {run / 'answers.json'}; 'cdtrans report {run}' adds the accuracy to report.html.")
