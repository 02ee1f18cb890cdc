"""The command line: one verb, one function; options, help and error messages, nothing else."""

import inspect
import io
import json as json_format
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cdtrans.config import FIELDS, HINTS, offered, preset_names
from cdtrans.errors import HARM, CdtransError, Interrupted
from cdtrans.screen import Screen
from cdtrans.tables import before_and_after, class_table, confusion_table, finding_table, score_table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Labelled source images and unlabelled target images in, a target classifier out.",
)
ablate = typer.Typer(no_args_is_help=True, help="The paper's ablations and its theory, rerun.")
app.add_typer(ablate, name="ablate")

# typer carries a copy of click of its own, so the class is found through the one that typer names in every version.
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException

SHOWN_CLASSES = 12  # a wider confusion matrix does not fit a terminal
NOT_FLAGS = ("source", "target", "backbone_args", "sampled_pairs", "false_share")  # arguments of a verb, or YAML only
CHECK_FLAGS = (  # what decides which images a run would see, and through which backbone
    *("root", "crop", "resize", "max_bad", "backbone", "weights", "pretrained"),
    *("seed", "device", "precision", "encode_batch", "pixels", "cache"),
)
LOSS_FLAGS = {"loss_source", "loss_source_target", "loss_target"}  # what the rows of Table 6 differ in
PAIRING_FLAGS = {"pairing", "self_training", "center_aware", "target_class"}  # and those of Table 5
NOISE_FLAGS = LOSS_FLAGS | PAIRING_FLAGS | {"rebuild_every", "mutual_pairs", "seed"}  # and the runs of Fig. 2b
VERDICTS = {
    "ok": "Nothing stands in the way of a run.",
    "warning": "A run can begin; read the warnings first.",
    "stop": "A run should not begin; 'cdtrans adapt' refuses it too.",
}

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, all else on standard error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... (auto: a GPU if there is one).")]
Model = Annotated[
    str, typer.Option(help="chosen, adapted (the selected epoch), last (epoch), or source (not adapted).")
]
MaxBad = Annotated[float, typer.Option(min=0, max=1, help="Share of unreadable files that is still accepted.")]
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Folder of class folders, or a list of 'path label' lines.")
]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder of any depth, or a list of paths. Labels are not read.")
]
Key = Annotated[
    Path, typer.Option(metavar="LABELLED", help="The answer key, for scores after training: TARGET with its labels.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on where 'cdtrans check' says stop.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs side by side, on one device.")]
Root = Annotated[Path | None, typer.Option(help="Folder that paths in a list are relative to (default: the list's).")]


def with_settings(verb: Callable[..., None], names: Collection[str] = FIELDS.keys()) -> Callable[..., None]:
    """Give a verb a flag for every field of Config, or for those named, in place of its **settings."""
    signature = inspect.signature(verb)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, spec in FIELDS.items():
        if name in names and name not in NOT_FLAGS and name not in signature.parameters:
            kind = HINTS[name] if HINTS[name] in (bool, int, float) else str
            dashed = name.replace("_", "-")
            flag = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
            told = spec.default in (None, "auto")  # the help line says what that means
            notes = [", ".join(offered(name)), "" if told else f"default: {_shown(spec.default)}"]
            note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
            option = typer.Option(flag, help=spec.metadata["help"] + note, rich_help_panel=spec.metadata["group"])
            annotation: Any = Annotated[kind | None, option]  # type: ignore[valid-type]
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )

    def run(**values: Any) -> None:
        settings = {k: values.pop(k) for k in list(values) if k not in signature.parameters}
        verb(**values, **{k: v for k, v in settings.items() if v is not None})

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


@app.command()
@with_settings
def adapt(
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE", help="Folder of class folders, or a list of 'path label' lines.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="Folder of any depth, or a list of paths. Labels are not read."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder (default: runs/adapt); an unfinished run there is continued.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"A named recipe (default: auto): {', '.join(preset_names())}.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Adapt a classifier from labelled SOURCE images to unlabelled TARGET images."""
    from cdtrans.pipeline import adapt as adapt_images

    screen = Screen(quiet=quiet, machine=json)
    result = adapt_images(
        source=source, target=target, out=out, preset=preset, config=config, force=force, screen=screen, **settings
    )
    if json:
        _print_json({"run": str(result.run), "chosen_epoch": result.chosen_epoch, "harm": result.harm})
    else:
        chosen = f"epoch {result.chosen_epoch}" if result.chosen_epoch else "the source-only model"
        screen.result(f"Done: {result.run} (chosen: {chosen})")
        screen.say(f"Next: cdtrans predict {result.run} IMAGES --csv predictions.csv")
    if result.harm:
        raise typer.Exit(HARM)


@app.command()
@partial(with_settings, names=CHECK_FLAGS)
def check(
    source: Source,
    target: Target,
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Look through the backbone too, if its weights can be had.")
    ] = True,
    preset: Annotated[str | None, typer.Option(help="As for adapt.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Say what is wrong with SOURCE and TARGET before a run; exit 1 if it should not begin."""
    from cdtrans.check import check as check_images

    screen = Screen(quiet=quiet, machine=json)
    result = check_images(
        source=source, target=target, preset=preset, config=config, model=model, screen=screen, **settings
    )
    if json:
        _print_json(result.summary())
    else:
        screen.result(finding_table(result))
    if result.skipped:
        screen.say(f"Not looked at through the backbone: {result.skipped}.")
    screen.say(f"{VERDICTS[result.state]} Every name and number is in --json.")
    if result.state == "stop":
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    labelled: Annotated[
        Path,
        typer.Argument(
            metavar="LABELLED", help="The answer key: a folder of class folders, or a list of 'path label'."
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
    """Score a run on LABELLED images: the place for target labels."""
    from cdtrans.evaluation.evaluate import evaluate as evaluate_run

    screen = Screen(quiet=quiet, machine=json)
    result = evaluate_run(run, labelled, root=root, model=model, device=device, max_bad=max_bad, screen=screen)
    summary = result.summary()
    if json:
        _print_json(summary)
        return
    screen.result(score_table(result, model))
    screen.result(class_table(result))
    if len(result.classes) <= SHOWN_CLASSES:
        screen.result(confusion_table(result))
    else:
        screen.result(f"The confusion matrix of {len(result.classes)} classes is in --json.")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="A folder of any depth, an image, or a list of paths.")
    ],
    csv: Annotated[Path | None, typer.Option(help="Write the predictions here (default: standard output).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the most probable classes to list.")] = 1,
    abstain: Annotated[float, typer.Option(min=0, max=1, help="Leave the label empty below this probability.")] = 0.0,
    root: Root = None,
    model: Model = "chosen",
    device: Device = "auto",
    max_bad: MaxBad = 0.05,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Label IMAGES with a run's classifier."""
    from cdtrans.classifier import key_warning, load
    from cdtrans.predict import predict_to_csv

    if json and csv is None:
        raise CdtransError("With --json the predictions need a file of their own: give --csv FILE.")
    screen = Screen(quiet=quiet, machine=json or csv is None)
    classifier = load(run, model=model, device=device)
    if warning := key_warning(run, classifier):
        screen.warn(warning)
    counts = predict_to_csv(
        classifier, images, csv, root=root, top=top, abstain=abstain, max_bad=max_bad, screen=screen
    )
    if json:
        _print_json({"csv": str(csv), **counts.summary()})


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run folder.")],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a run on one page, RUN/report.html: verdict, scores, pairs, pictures, cost."""
    from cdtrans.report.page import write_report

    screen = Screen(quiet=quiet, machine=json)
    file = write_report(run, screen)
    if json:
        _print_json({"report": str(file)})
    else:
        screen.result(f"Report: {file}")


@app.command()
@with_settings
def demo(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the task and of the run.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Adapt from rendered digits to real handwriting: the built-in task, a few minutes on a CPU."""
    from cdtrans.demo import demo as run_demo

    screen = Screen(quiet=quiet, machine=json)
    result = run_demo(out, seed=seed, screen=screen, **settings)
    if json:
        _print_json(
            {
                "source_only_accuracy": result.source_only_accuracy,
                "adapted_accuracy": result.adapted_accuracy,
                "run": str(result.run),
                "harm": result.harm,
            }
        )
    else:
        screen.result(before_and_after(result))
        report = " (look at report.html)" if (result.run / "report.html").exists() else ""
        screen.result(f"Run folder: {result.run}{report}")
    if result.harm:
        raise typer.Exit(HARM)


@app.command()
def cache(
    folder: Annotated[Path | None, typer.Option("--cache", help="The cache folder.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete what is listed; later runs decode again.")] = False,
    root: Annotated[Path | None, typer.Option(help="Only the images of this folder.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the decoded images that runs share, or clear them."""
    from cdtrans.data.pixels import default_cache
    from cdtrans.data.store import clear_stores, list_stores

    screen = Screen(quiet=quiet, machine=json)
    place = folder or default_cache()
    stores = [s for s in list_stores(place) if root is None or s.root == root.resolve()]
    freed = clear_stores(place, root) if clear else 0
    if json:
        listed = [{"root": str(s.root), "size": s.size, "images": s.images, "bytes": s.nbytes} for s in stores]
        _print_json({"cache": str(place), "stores": listed, "freed": freed})
        return
    table = Table("images of", "size", "images", "MB", "last used", title=str(place))
    for s in stores:
        used = f"{s.last_used:%Y-%m-%d %H:%M}"
        table.add_row(escape(str(s.root)), str(s.size), f"{s.images:,}", f"{s.nbytes / 1e6:,.1f}", used)
    screen.result(table if stores else f"Nothing is cached in {place}.")
    if clear:
        screen.result(f"Freed {freed / 1e6:,.1f} MB.")


@ablate.command()
def theory(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pictures and theory.json.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Simulate the supplement's two theorems: the noise before and after averaging, against their bounds."""
    from cdtrans.evaluation.theory_study import SHOWN, run_study

    screen = Screen(quiet=quiet, machine=json)
    study = run_study(out, seed=seed, screen=screen)
    if json:
        _print_json({"out": str(out), "summary": study.summary(), "cases": study.record()["cases"]})
        return
    table = Table(*SHOWN, title="noise |x - u| in units of sigma")
    for cells in study.table(SHOWN):
        table.add_row(*cells)
    screen.result(table)
    for line in study.findings():
        screen.result(line)
    screen.say(f"Every number: {out / 'theory.json'}; pictures beside it.")


@ablate.command()
@partial(with_settings, names=FIELDS.keys() - LOSS_FLAGS - {"self_training"})  # each row has its own
def losses(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the table; it is continued.")],
    preset: Annotated[str | None, typer.Option(help="As for adapt.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Table 6, the losses of the three branches: five runs, scored with the target's labels afterwards."""
    from cdtrans.evaluation.ablations import LOSSES

    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force, "jobs": jobs}
    _ablate(LOSSES, source, target, quiet, json, **how, **settings)


@ablate.command(name="pseudo-labels")
@partial(with_settings, names=FIELDS.keys() - PAIRING_FLAGS)  # each row has its own
def pseudo_labels(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the table; it is continued.")],
    preset: Annotated[str | None, typer.Option(help="As for adapt.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Table 5, the ways to find pairs: a run for each, scored with the target's labels afterwards."""
    from cdtrans.evaluation.ablations import PSEUDO_LABELS

    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force, "jobs": jobs}
    _ablate(PSEUDO_LABELS, source, target, quiet, json, **how, **settings)


@ablate.command()
@partial(with_settings, names=FIELDS.keys() - NOISE_FLAGS)  # each run has its own
def noise(
    source: Source,
    target: Target,
    key: Annotated[
        Path, typer.Option(metavar="LABELLED", help="The answer key, for pairs and scores: TARGET with its labels.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the plot; it is continued.")],
    levels: Annotated[str, typer.Option(help="Shares of false pairs, in percent.")] = "0,20,40,60,80,100",
    pairs: Annotated[int | None, typer.Option(min=2, help="Pairs to sample (default: one per target image).")] = None,
    seeds: Annotated[str, typer.Option(help="How many (3: 1234, 1 and 2), or which: 1234,1.")] = "1",
    preset: Annotated[str | None, typer.Option(help="As for adapt.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    jobs: Jobs = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun Fig. 2b: true pairs, made with the target's labels, replaced by false ones; with cross-attention or not."""
    from cdtrans.evaluation.noise import ablate_noise

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
        typer.Option(metavar="LABELLED", help="The answer key: the run's target with its labels. Finds false pairs."),
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
    """Draw Fig. 2a: false-positive pairs of RUN, found with the key, or chosen ones, and where the source looks in the
    target."""
    from cdtrans.evaluation.attention_figure import draw_attention

    shown = draw_attention(run, key, out, pairs=pairs, chosen=pair or (), root=root, device=device)
    if json:
        _print_json({"out": str(out), "pairs": shown.record()})
    else:
        kind = "chosen" if pair else "false-positive"
        Screen(quiet=quiet).result(f"{len(shown.pairs)} {kind} pair{'s' * (len(shown.pairs) != 1)}: {out}")


@ablate.command(name="with-key", hidden=True)  # a row of pseudo-labels or a run of noise, as a process of its own
@with_settings
def with_key(
    source: Source,
    target: Target,
    key: Key,
    out: Annotated[Path, typer.Option(help="The run folder.")],
    sampled_pairs: Annotated[int, typer.Option(min=0, help="How many, for --pairing sampled and sampled_true.")] = 0,
    false_share: Annotated[float, typer.Option(min=0, max=1, help="How many of these are false.")] = 0.0,
    preset: Annotated[str | None, typer.Option(help="As for adapt.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """One run on pairs that are made with the target's labels: a measurement, not a way to adapt."""
    from cdtrans.evaluation.with_key import adapt_with_key

    screen = Screen(quiet=quiet)
    settings |= {"sampled_pairs": sampled_pairs, "false_share": false_share}
    how = {"key": key, "out": out, "preset": preset, "config": config, "force": force}
    result = adapt_with_key(source, target, screen=screen, **how, **settings)  # type: ignore[arg-type]
    screen.result(f"Done: {result.run} (trained with the answer key)")
    if result.harm:
        raise typer.Exit(HARM)


def _ablate(ablation: Any, source: Path, target: Path, quiet: bool, json: bool, **how: Any) -> None:
    from cdtrans.evaluation.ablations import ablate as run_ablation

    outcome = run_ablation(ablation, source, target, screen=Screen(quiet=quiet, machine=json), **how)
    _show(outcome, outcome.out / f"{ablation.name}.md", quiet, json)


def _show(outcome: Any, file: Path, quiet: bool, json: bool) -> None:
    if json:
        _print_json(outcome.summary())
    else:
        finished = outcome.runs - len(outcome.table.unfinished)
        Screen(quiet=quiet).result(f"{finished} of {outcome.runs} runs are finished: {file}")
    if outcome.failed:
        raise typer.Exit(1)


@app.command()
@partial(with_settings, names=FIELDS.keys() - {"root", "seed", "source_model"})  # each run gets its own
def bench(
    benchmark: Annotated[str, typer.Argument(metavar="NAME", help="office31, office-home, visda2017 or domainnet.")],
    data: Annotated[Path, typer.Option(help="The folder that holds the benchmark's domains, as folders or lists.")],
    backbone: Annotated[
        str,
        typer.Option(help="deit_small or deit_base (with their presets), or any timm VisionTransformer."),
    ] = "deit_small",
    seeds: Annotated[str, typer.Option(help="How many (3: 1234, 1 and 2), or which: 1234,1.")] = "3",
    tasks: Annotated[str | None, typer.Option(help="Only these, such as 'A>W,amazon>dslr' or A-W,A-D.")] = None,
    jobs: Jobs = 1,
    out: Annotated[
        Path | None, typer.Option(help="The benchmark's folder (default: runs/NAME-BACKBONE); it is continued.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
    force: Force = False,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Accept data that differ from the published; the table says so.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Rerun a table of the paper: every task with every seed, scored with the target's labels afterwards."""
    from cdtrans.evaluation.bench import bench as run_bench

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
        force=force,
        allow_incomplete=allow_incomplete,
        screen=screen,
        **settings,
    )
    if json:
        _print_json(outcome.summary())
    else:
        screen.result(f"{outcome.finished} of {outcome.asked} runs are finished: {outcome.out / 'table.md'}")
    if outcome.failed:
        raise typer.Exit(1)


def _print_json(values: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first speaks for all
        sys.stdout.write(json_format.dumps(values) + "\n")


def main() -> None:
    """Exit 0, 2 for bad input, 130 for Ctrl-C; an error is one sentence, the traceback only with --debug."""
    debug = "--debug" in sys.argv
    if not debug:
        warnings.filterwarnings("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names may hold bytes that are no text
    sys.exit(_exit_code(debug))


def _exit_code(debug: bool) -> int:
    try:
        # not app(): typer would keep Ctrl-C and a closed pipe to itself
        command = typer.main.get_command(app)
        with command.make_context("cdtrans", sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()  # here, where a closed pipe is expected, and not when Python ends
        return 0
    except typer.Exit as error:  # after --help
        return error.exit_code
    except CommandLineError as error:
        _fail_usage(error, debug)
        return 2
    except CdtransError as error:
        _fail(str(error), debug)
        return 2
    except Interrupted as error:
        _fail("Interrupted; the state is saved. Give the same command again to go on.", debug)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _fail("Interrupted.", debug)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:  # a disk or a permission that no room has a sentence of its own for
        where = f"'{error.filename}': " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and the disk.", debug)
        return 2
    except Exception as error:
        _fail(f"Internal error, {type(error).__name__}: {error}. Run it again with --debug and report it.", debug)
        return 1


def _fail_usage(error: Any, debug: bool) -> None:
    """A flag or argument that is wrong; a bare `cdtrans` gets the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        help_command = f"; see '{context.command_path} --help'" if context else ""
        _fail(f"{error.format_message().rstrip('.')}{help_command}.", debug)


def _discard_output() -> None:
    """The reader has gone, as in `cdtrans predict ... | head`: what is still buffered goes nowhere, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {sentence}", file=sys.stderr)
