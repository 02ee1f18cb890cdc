"""What the verbs share: options, and a flag for every setting."""

import inspect
import json as json_format
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cdtrans.config import HINTS, SETTINGS, choices, merged, parse_yaml, read_recipe, starting_layers
from cdtrans.errors import CdtransError
from cdtrans.network.backbone import SHORT_NAMES
from cdtrans.runtime.ranks import launched_rank

COMMON = (  # settings that --help shows; --help-all shows all
    *("recipe", "effort", "backbone", "weights", "method", "source_model", "target_labels", "guard", "seed", "device"),
)
COMMON_PANEL = "Settings"
NOT_FLAGS = ("source", "target", "backbone_args", "method_args")  # arguments of a verb, YAML only, or --set
TABLE_TEXTS = {  # settings that have another default in the runs of a table
    "guard": "Keep the source-only model if adaptation seems to have done harm. (default: false)",
    "report": "Write report.html at the end of each run. (default: false)",
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, everything else to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or mps (auto: a CUDA GPU if there is one).")]
Model = Annotated[
    str, typer.Option(help="chosen, adapted (the selected epoch), last (epoch), or source (not adapted).")
]
MaxBad = Annotated[float, typer.Option(min=0, max=1, help="Largest accepted share of unreadable files.")]
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Folder of class folders, or a list of 'path label' lines.")
]
Target = Annotated[
    Path,
    typer.Argument(metavar="TARGET", help="Folder with images at any depth, or a list of paths. Labels are not read."),
]
Key = Annotated[
    Path, typer.Option(metavar="LABELLED", help="Target labels, for scores after training: TARGET with its labels.")
]
Force = Annotated[bool, typer.Option("--force", help="Continue even if 'cdtrans check' says stop.")]
Jobs = Annotated[int, typer.Option(min=1, help="How many runs to start in parallel, on one device.")]
Root = Annotated[
    Path | None, typer.Option(help="Folder that paths in a list are relative to (default: the list's folder).")
]


def with_settings(
    verb: Callable[..., None],
    names: Collection[str] = SETTINGS.keys(),
    texts: Mapping[str, str] | None = None,
    preset: str = "auto",
) -> Callable[..., None]:
    """Give a verb a flag for every setting and every option of CDTrans, or for those named, in place of its
    **settings. Where `method` is among them, `--set` gives the options of any method. `texts` are the help lines of
    settings that mean something else here than for 'adapt', or have another default; `preset` is the one whose defaults
    the verb has."""
    changed = read_recipe(preset)
    signature = inspect.signature(verb)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, spec in SETTINGS.items():
        if name in names and name not in NOT_FLAGS and name not in signature.parameters:
            hint = HINTS[name]
            kind = hint if hint in (bool, int, float) else str
            dashed = name.replace("_", "-")
            flag = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
            panel = COMMON_PANEL if name in COMMON else spec.metadata["group"]
            text = (texts or {}).get(name) or help_line(name, changed)
            option = typer.Option(flag, help=text, rich_help_panel=panel, hidden=name not in COMMON)
            parameters.append(_parameter(name, kind, option))
            if name == "method":
                text = "An option of the method; may be repeated. 'cdtrans methods NAME' lists them."
                group = spec.metadata["group"]
                option = typer.Option("--set", metavar="KEY=VALUE", help=text, rich_help_panel=group, hidden=True)
                parameters.append(_parameter("method_args", list[str], option))
    everything = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every flag and exit.")
    parameters.append(_parameter("help_all", bool, everything))

    def run(help_all: bool | None, **values: Any) -> None:
        settings = {k: values.pop(k) for k in list(values) if k not in signature.parameters}
        chosen = {k: v for k, v in settings.items() if v is not None}
        if "method_args" in chosen:
            chosen["method_args"] = parse_options(chosen["method_args"])
        verb(**values, **chosen)

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _show_all(context: typer.Context, wanted: bool | None) -> None:
    if wanted:
        show_all_flags(context.command)
        for parameter in context.command.params:
            if parameter.secondary_opts:  # two columns of long names would cut them
                parameter.opts, parameter.secondary_opts = [f"--[no-]{parameter.opts[0].lstrip('-')}"], []
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def show_all_flags(command: Any) -> None:
    """In the help and in shell completion, from now on."""
    for parameter in command.params:
        parameter.hidden = False
        if parameter.name in COMMON and parameter.name in SETTINGS:
            parameter.rich_help_panel = SETTINGS[parameter.name].metadata["group"]


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """['trade_off=0.5', 'ramp=1'] -> {'trade_off': 0.5, 'ramp': 1}, each value as YAML reads it."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise CdtransError(f"--set takes KEY=VALUE, such as --set trade_off=0.5, not '{word}'.")
        if key in options:
            raise CdtransError(f"--set gives '{key}' twice; give it once.")
        try:
            options[key] = parse_yaml(value)
        except ValueError:
            options[key] = value
    return options


def help_line(name: str, preset: Mapping[str, Any] | None = None) -> str:
    """A setting's help text with its choices and its default; where the recipes differ, both defaults. A preset's value
    is the default of both."""
    spec, changed = SETTINGS[name], dict(preset or {})
    value, best = changed.get(name, spec.default), starting_layers(merged(changed))[0]
    in_text = value in (None, "auto")
    default = str(value).lower() if isinstance(value, bool) else str(value)
    default = next((short for short, full in SHORT_NAMES.items() if full == default), default)
    if name not in changed and best.get(name, spec.default) != spec.default:
        default = str(best[name]) if name == "recipe" else f"{best[name]}; authors: {default}"
    notes = [", ".join(choices(name)), "" if in_text else f"default: {default}"]
    note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
    text: str = spec.metadata["help"]
    return text + note


def print_json(values: dict[str, Any]) -> None:
    if launched_rank() == 0:
        sys.stdout.write(json_format.dumps(values) + "\n")
