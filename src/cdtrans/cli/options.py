"""What the verbs of the command line share: options, and a flag for every setting."""

import inspect
import json as json_format
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from cdtrans.config import FIELDS, HINTS, offered

NOT_FLAGS = ("source", "target", "backbone_args", "sampled_pairs", "false_share")  # arguments of a verb, or YAML only

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
            option = typer.Option(flag, help=help_line(name), rich_help_panel=spec.metadata["group"])
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


def help_line(name: str) -> str:
    """What a setting does, what it may be and what it is if nothing is said, unless the first says so."""
    spec = FIELDS[name]
    told = spec.default in (None, "auto")
    default = str(spec.default).lower() if isinstance(spec.default, bool) else str(spec.default)
    notes = [", ".join(offered(name)), "" if told else f"default: {default}"]
    note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
    text: str = spec.metadata["help"]
    return text + note


def print_json(values: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first speaks for all
        sys.stdout.write(json_format.dumps(values) + "\n")
