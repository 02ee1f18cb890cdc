"""`cdtrans methods`: what there is to choose from with --method."""

from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cdtrans.cli.options import Debug, Json, Quiet, print_json
from cdtrans.methods import METHODS, require_method
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import importing


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show the options of this method (also FILE.py:CLASS).")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the adaptation methods, or the options of one."""
    if name is not None:
        require_method(name)
    with importing():
        from cdtrans.methods import method_class

    screen = Screen(quiet=quiet, machine=json)
    rows = [description(each, method_class(each)) for each in ([name] if name else METHODS)]
    if json:
        print_json({"methods": rows})
        return
    if name is None:
        table = Table("method", "step", "needs", "what it does", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for row in rows:
            cells = (row["name"], row["cost"], row["backbones"], f"{row['summary']} ({row['paper'] or 'this project'})")
            table.add_row(*map(escape, cells))
        screen.result(table)
        screen.say("step: time of a training step, CDTrans = 1.")
        screen.say("needs: a ViT, BatchNorm, gates as in seresnet50 (SE), or any backbone.")
        screen.say("Options of a method: 'cdtrans methods NAME'.")
        return
    (row,) = rows
    paper = f"Reference: {row['paper']}" if row["paper"] else ""
    reference = ", ".join(filter(None, (paper, row["title"])))
    sentences = (f"{row['name']}: {row['summary']}", reference, f"Backbones: {row['backbones']}")
    screen.result(" ".join(f"{sentence}." for sentence in sentences if sentence))
    table = Table("option", "default", "meaning", title="options, given as --set OPTION=VALUE")
    for option in row["options"]:
        table.add_row(escape(option["name"]), escape(str(option["default"])), escape(option["help"]))
    screen.result(table if row["options"] else "It has no options.")


def description(name: str, method: Any) -> dict[str, Any]:
    """The promised keys of a method in `methods --json`."""
    return {
        "name": name,
        "summary": next(iter((method.__doc__ or name).strip().splitlines()), name).rstrip("."),
        "paper": method.paper,
        "title": method.title,
        "backbones": method.backbones,
        "cost": method.cost,
        "options": [
            {"name": f.name, "default": f.default, "help": f.metadata.get("help", "")} for f in fields(method.Options)
        ],
    }
