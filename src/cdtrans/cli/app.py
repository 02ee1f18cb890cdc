"""The command line: one function per verb, with its options and help, and nothing else."""

import platform
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cdtrans.cli.ablate import ablate
from cdtrans.cli.bench import bench
from cdtrans.cli.labelling import answer, ask
from cdtrans.cli.methods import methods
from cdtrans.cli.options import (
    Debug,
    Device,
    Force,
    Json,
    MaxBad,
    Model,
    Quiet,
    Root,
    Source,
    Target,
    print_json,
    with_settings,
)
from cdtrans.cli.tables import before_and_after, cell, class_table, confusion_table, finding_table, score_table, whole
from cdtrans.config import recipe_names
from cdtrans.errors import HARM, CdtransError, named
from cdtrans.runtime.environment import package_version
from cdtrans.runtime.screen import Screen

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

SHOWN_CLASSES = 12  # a wider confusion matrix does not fit in a terminal
CHECK_FLAGS = (  # what decides which images a run would see, and through which backbone
    *("root", "crop", "resize", "max_bad", "backbone", "weights", "pretrained"),
    *("seed", "device", "precision", "encode_batch", "pixels", "cache"),
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        beside = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "timm"))
        typer.echo(f"cdtrans {package_version('cdtrans')} (Python {platform.python_version()}, {beside})")
        raise typer.Exit


@app.callback(help="Labelled source images and unlabelled target images in, a target classifier out.")
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@with_settings
def adapt(
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE", help="Folder of class folders, or a list of 'path label' lines.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="TARGET", help="Folder with images at any depth, or a list of paths. Labels are not read."
        ),
    ] = None,
    target_alone: Annotated[
        Path | None,
        typer.Option(
            "--target",
            metavar="TARGET",
            hidden=True,
            help="TARGET, where there is no SOURCE: with --source-model and --method shot.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder (default: runs/adapt); an unfinished run there is resumed.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(hidden=True, help=f"A named set of settings (default: auto): {', '.join(recipe_names())}."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Adapt a classifier from labelled SOURCE images to unlabelled TARGET images."""
    from cdtrans.record import wording
    from cdtrans.run.pipeline import adapt as adapt_images

    if target is not None and target_alone is not None:
        raise CdtransError("The target is given twice, as second argument and with --target; give it once.")
    screen = Screen(quiet=quiet, machine=json)
    target = target or target_alone
    result = adapt_images(
        source=source, target=target, out=out, preset=preset, config=config, force=force, screen=screen, **settings
    )
    if json:
        print_json(result.summary())
    else:
        screen.result(wording.done(result.outcome, result.run, with_estimate=quiet))  # else the screen has shown it
        screen.say(wording.next_step(result.run))
    if result.harm:
        raise typer.Exit(HARM)


@app.command()
@partial(with_settings, names=CHECK_FLAGS)
def check(
    source: Source,
    target: Target,
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Also check with the backbone, if its weights are available.")
    ] = True,
    preset: Annotated[str | None, typer.Option(help="A named set of settings, as for 'adapt'.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags override it.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Check SOURCE and TARGET for problems before a run; exit 1 if it should not start."""
    from cdtrans.run.check import check as check_images

    screen = Screen(quiet=quiet, machine=json)
    result = check_images(
        source=source, target=target, preset=preset, config=config, model=model, screen=screen, **settings
    )
    if json:
        print_json(result.summary())
    else:
        screen.result(finding_table(result))
    if result.skipped:
        screen.say(f"Not checked with a backbone: {result.skipped}.")
    screen.say(f"{result.verdict} Use --json for every name and number.")
    if result.state == "stop":
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    labelled: Annotated[
        Path,
        typer.Argument(
            metavar="LABELLED", help="Labelled target images: a folder of class folders, or a list of 'path label'."
        ),
    ],
    root: Root = None,
    model: Model = "chosen",
    device: Device = "auto",
    max_bad: MaxBad = 0.05,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the accuracy of a run on LABELLED target images."""
    from cdtrans.measure.comparison import EXACT
    from cdtrans.measure.evaluate import evaluate as evaluate_run
    from cdtrans.measure.evaluate import kept_images

    screen = Screen(quiet=quiet, machine=json)
    result = evaluate_run(run, labelled, root=root, model=model, device=device, max_bad=max_bad, screen=screen)
    if json:
        print_json(result.summary())
        return
    screen.result(score_table(result, model))
    screen.result(class_table(result))
    if len(result.classes) <= SHOWN_CLASSES:
        screen.result(confusion_table(result))
    else:
        screen.result(f"The confusion matrix of {len(result.classes)} classes is in --json.")
    if result.whole_target:
        screen.result(EXACT)
    if result.comparison is not None:
        screen.result(f"{result.comparison.sentence} {result.choice}")
    saved = result.history is not None and model == "chosen" and kept_images(run) <= result.scores.images
    if saved and (run / "report.html").exists():
        screen.say(f"'cdtrans report {run}' adds this to report.html.")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder, or an exported file.")],
    images: Annotated[
        Path,
        typer.Argument(metavar="IMAGES", help="A folder with images at any depth, an image, a list of paths, or tars."),
    ],
    csv: Annotated[Path | None, typer.Option(help="Write the predictions here (default: standard output).")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the predictions to a Parquet file instead.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the most probable classes to list.")] = 1,
    abstain: Annotated[
        float | None, typer.Option(min=0, max=1, help="Leave the label empty below this probability.")
    ] = None,
    keep: Annotated[
        float | None, typer.Option(help="Label only this share of the images, the most confident, such as 0.8.")
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Label as many images as this expected accuracy allows, such as 0.95.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Add a score for images of no class, by the source-only model.")
    ] = False,
    root: Root = None,
    model: Model = "chosen",
    device: Device = "auto",
    max_bad: MaxBad = 0.05,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Label IMAGES with a run's classifier."""
    from cdtrans.serving.predict import predict as predict_images

    to_file = csv is not None or parquet is not None
    if json and not to_file:
        raise CdtransError("With --json, predictions must go to a file; give --csv FILE or --parquet FILE.")
    screen = Screen(quiet=quiet, machine=json or not to_file)
    predicted = predict_images(
        run,
        images,
        csv=csv if to_file else sys.stdout.buffer,
        parquet=parquet,
        top=top,
        abstain=abstain,
        keep=keep,
        accuracy=accuracy,
        unknown=unknown,
        root=root,
        model=model,
        device=device,
        max_bad=max_bad,
        screen=screen,
    )
    if json:
        print_json(predicted.summary())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(help="FILE.onnx (default: RUN/model.onnx), FILE.safetensors for timm, or a hub folder (RUN/hub)."),
    ] = None,
    to: Annotated[str, typer.Option(help="file, or hub-folder: a folder of weights, ONNX and a model card.")] = "file",
    model: Model = "chosen",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Export a run's classifier for other programs, and check that its output is the same."""
    from cdtrans.serving.export import export as export_model

    screen = Screen(quiet=quiet, machine=json)
    exported = export_model(run, out, to=to, model=model, screen=screen)
    if json:
        print_json(exported.summary())
        return
    screen.result(f"Exported: {exported.file} ({exported.model}; {exported.bytes / 1e6:.1f} MB)")
    screen.say(f"Checked on {exported.checked} images: logits differ by {exported.difference:.0e} of the largest one.")


@app.command()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    model: Model = "chosen",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Upload a run's classifier to the Hugging Face hub: weights, ONNX and a model card, no images."""
    from cdtrans.serving.export import push as push_model

    screen = Screen(quiet=quiet, machine=json)
    pushed = push_model(run, name, private=private, model=model, screen=screen)
    if json:
        print_json(pushed.summary())
        return
    screen.result(f"Uploaded: {pushed.address} ({pushed.model}; {pushed.bytes / 1e6:.1f} MB)")
    screen.say(f'cdtrans.load("hf://{name}") loads it.')


@app.command()
def choose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="adapted, or source (not adapted).")],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Change which model a finished run uses, whatever the guard said; nothing is trained."""
    from cdtrans.run.choose import choose as choose_model

    screen = Screen(quiet=quiet, machine=json)
    choice = choose_model(run, model, screen)
    if json:
        print_json(choice.summary())
    else:
        screen.result(str(choice))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a one-page report, RUN/report.html: verdict, scores, pairs, images, cost."""
    from cdtrans.reporting.report import report as make_report

    screen = Screen(quiet=quiet, machine=json)
    file = make_report(run, screen=screen)
    if json:
        print_json({"report": str(file)})
    else:
        screen.result(f"Report: {file}")


@app.command()
@partial(with_settings, preset="demo")
def demo(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the task and of the run.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Try it on a built-in task, from rendered digits to real handwriting: a few minutes on a CPU."""
    from cdtrans.run.demo import demo as run_demo

    screen = Screen(quiet=quiet, machine=json)
    result = run_demo(out, seed=seed, screen=screen, **settings)
    if json:
        print_json(
            {
                "source_only_accuracy": result.source_only_accuracy,
                "adapted_accuracy": result.adapted_accuracy,
                "run": str(result.run),
                "harm": result.harm,
            }
        )
    else:
        screen.result(before_and_after(result))
        report = " (open report.html)" if (result.run / "report.html").exists() else ""
        screen.result(f"Run folder: {result.run}{report}")
    if result.harm:
        raise typer.Exit(HARM)


@app.command()
def cache(
    folder: Annotated[Path | None, typer.Option("--cache", help="The cache folder.")] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete what is listed; later runs decode the images again.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="Only images decoded for exactly this folder, as given to a run.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the decoded images that runs share, or clear them."""
    from cdtrans.inputs.pixels import clear_stores, default_cache, list_stores

    screen = Screen(quiet=quiet, machine=json)
    place = folder or default_cache()
    every = list_stores(place)
    stores = [s for s in every if root is None or s.root == root.resolve()]
    below = sorted({str(s.root) for s in every if root is not None and root.resolve() in s.root.parents})
    freed = clear_stores(place, root) if clear else 0
    if json:
        listed = [{"root": str(s.root), "size": s.size, "images": s.images, "bytes": s.nbytes} for s in stores]
        print_json({"cache": str(place), "stores": listed, "below": below, "freed": freed})
        return
    table = Table(whole("images of"), "size", "images", "MB", "last used", title=str(place))
    for s in stores:
        used = f"{s.last_used:%Y-%m-%d %H:%M}"
        table.add_row(cell(str(s.root)), str(s.size), f"{s.images:,}", f"{s.nbytes / 1e6:,.1f}", used)
    screen.result(table if stores else f"Nothing is cached in {place}{f' for {root} itself' if root else ''}.")
    if below:
        screen.result(f"Folders below it are cached separately and not affected by --root {root}: {named(below)}.")
    if clear:
        screen.result(f"Freed {freed / 1e6:,.1f} MB.")


app.command()(ask)
app.command()(answer)
app.command()(methods)
app.command()(bench)
app.add_typer(ablate, name="ablate")
