"""Fills the page reference.md from the settings and the verbs, so that it cannot differ from the program."""

from typing import Any

import typer

from cdtrans.cli.app import build_program
from cdtrans.cli.options import help_line
from cdtrans.config import SETTINGS, compose

NO_FLAGS = ("source", "target")  # arguments


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown + reference() if page.file.src_uri == "reference.md" else markdown


def reference() -> str:
    return "\n".join([*settings(), *verbs()]) + "\n"


def settings() -> list[str]:
    lines = ["\n## Settings\n", "Flags of `adapt` and keys of a YAML file (`--config`), with their defaults.\n"]
    for group in dict.fromkeys(spec.metadata["group"] for spec in SETTINGS.values()):
        lines += [f"\n### {group}\n", "| setting | |", "|---|---|"]
        of_group = [name for name, spec in SETTINGS.items() if spec.metadata["group"] == group and name not in NO_FLAGS]
        lines += [f"| `{name}` | {cell(help_line(name, {}, compose({})))} |" for name in of_group]
    return lines


def verbs() -> list[str]:
    lines = ["\n## Verbs\n", "Flags that are settings are left out here.\n"]
    program: Any = typer.main.get_command(build_program())
    for name, verb in program.commands.items():
        inner = {f"{name} {word}": command for word, command in getattr(verb, "commands", {}).items()}
        shown = {title: command for title, command in {name: verb, **inner}.items() if not command.hidden}
        for title, command in shown.items():
            own = [p for p in command.params if p.name not in SETTINGS and p.name != "help"]
            lines += [f"\n### {title}\n", " ".join((command.help or "").split()) + "\n"]
            lines += ["| | |", "|---|---|"] if own else []
            lines += [f"| `{called(p)}` | {cell(getattr(p, 'help', '') or '')} |" for p in own]
    return lines


def called(parameter: Any) -> str:
    return " ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.metavar or parameter.name


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
