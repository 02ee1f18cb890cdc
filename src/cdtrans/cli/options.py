"""Commands from public functions: an argument or a flag for each of their parameters, and a flag for every setting."""

import inspect
import json as json_format
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from cdtrans.config import HINTS, SETTINGS, Config, choices, compose, parse_yaml
from cdtrans.errors import VERDICT_AGAINST, SettingsError
from cdtrans.network import SHORT_NAMES
from cdtrans.runtime.ranks import launched_rank
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, alternatives

COMMON = (  # settings that --help shows; --help-all shows all
    *("recipe", "effort", "backbone", "weights", "method", "source_model", "answers", "guard", "seed", "device"),
)
NOT_FLAGS = ("source", "target", "backbone_args", "method_args")  # arguments of a verb, YAML only, or --set
OF_THE_PROGRAM = ("screen", "quiet")  # parameters of public functions that every command handles alike
EVERY_VERB = {
    "json": typer.Option("--json", help="Print one JSON object to stdout, everything else to stderr."),
    "quiet": typer.Option("--quiet", "-q", help="Print only results, warnings and errors."),
    "debug": typer.Option("--debug", help="Show the traceback of an error."),
}


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: a public function, and how its result is shown."""

    function: str  # module:name, imported when the verb is used
    show: Callable[[Any, Screen, dict[str, Any]], None] = lambda result, screen, given: screen.result(str(result))
    settings: Collection[str] = tuple(SETTINGS)  # flags in place of its **settings
    texts: Mapping[str, str] = field(default_factory=dict)  # help of settings that have another meaning here
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the verb's own defaults of settings
    against: Callable[[Any], bool] = lambda result: False  # whether the result is a verdict against the user
    as_json: Callable[[Any], dict[str, Any]] = lambda result: result.summary()
    prepare: Callable[[dict[str, Any], bool], bool] = lambda given, json: json  # says whether stdout is for a program
    hidden: bool = False


def verb_command(verb: Verb) -> Callable[..., None]:
    """The function that typer makes a command of. Its exit code is 3 if the result is a verdict against the user."""
    function = resolve_name(verb.function)
    signature = inspect.signature(function)
    hints = get_type_hints(getattr(function, "func", function), include_extras=True)  # it may be a partial function
    own = [p for name, p in signature.parameters.items() if name not in OF_THE_PROGRAM and p.kind is not p.VAR_KEYWORD]
    parameters = [made for each in own for made in _parameters(each, hints[each.name])]
    parameters += [_flag(name, bool, option, False) for name, option in EVERY_VERB.items()]
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        taken = {each.name for each in own}
        parameters += _setting_flags([name for name in verb.settings if name not in taken], verb)

    def run(*, json: bool, quiet: bool, debug: bool, help_all: bool = False, **values: Any) -> None:
        given = {each.name: values.pop(each.name) for each in own}
        for each in own:
            beside = values.pop(f"{each.name}_flag", None)
            if beside is not None and given[each.name] is not None:
                raise SettingsError("given-twice", f"'{each.name}' is given twice, in its place and as a flag.")
            given[each.name] = given[each.name] if beside is None else beside
        settings = {name: value for name, value in values.items() if value is not None}
        if isinstance(word := settings.get("other_classes"), str):
            settings["other_classes"] = {"yes": True, "no": False, "true": True, "false": False}.get(word, word)
        if "method_args" in settings:
            settings["method_args"] = parse_options(settings["method_args"])
        screen = Screen(quiet=quiet, machine=verb.prepare(given, json))
        how = {"screen": screen} if "screen" in signature.parameters else {}
        with screen.working():
            result = function(**given, **settings, **how)
        if json:
            print_json(verb.as_json(result))
        else:
            verb.show(result, screen, given)
        if verb.against(result):
            raise typer.Exit(VERDICT_AGAINST)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameters(parameter: inspect.Parameter, hint: Any) -> list[inspect.Parameter]:
    """A parameter of a public function as an argument or a flag of its command, and the flag that an argument may also
    be given as."""
    help_of = _help_in(hint) or Help("")
    kind, required = _command_line_type(alternatives(hint)), parameter.default is parameter.empty
    default = parameter.default
    if kind is str and default not in (None, parameter.empty):
        default = str(default)
    place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and not help_of.flag
    if place:
        option: Any = typer.Argument(metavar=help_of.metavar or parameter.name.upper(), help=help_of.text)
    else:
        dashed = f"--{parameter.name.replace('_', '-')}"
        name = help_of.flag or (f"{dashed}/--no-{dashed[2:]}" if default is True else dashed)
        option = typer.Option(name, metavar=help_of.metavar or None, help=help_of.text)
    made = [_flag(parameter.name, kind if required or kind is bool else kind | None, option, default)]
    if help_of.also:
        option = typer.Option(help_of.also, metavar=help_of.metavar or None, help=help_of.text, hidden=True)
        made.append(_flag(f"{parameter.name}_flag", kind | None, option, None))
    return made


def _help_in(hint: Any) -> Help | None:
    """The help inside a type hint."""
    if isinstance(hint, Help):
        return hint
    nested = (*getattr(hint, "__metadata__", ()), *get_args(hint))
    return next(filter(None, map(_help_in, nested)), None)


def _command_line_type(kinds: list[Any]) -> Any:
    """The type of an argument as typer has it; what a function takes besides is for Python."""
    if found := [kind for kind in (Path, bool, str) if kind in kinds]:
        return found[0]
    kind = next(kind for kind in kinds if kind is not NoneType)
    return kind if kind in (int, float) else str if get_origin(kind) in (None, Literal) else list[str]


def _flag(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _setting_flags(names: Collection[str], verb: Verb) -> list[inspect.Parameter]:
    """A flag for every setting and every option of CDTrans among these names; with `method`, --set gives the options of
    any method."""
    parameters, composed = [], compose({**verb.defaults})
    for name, spec in SETTINGS.items():
        if name not in names or name in NOT_FLAGS:
            continue
        kind = HINTS[name] if HINTS[name] in (bool, int, float) else str
        dashed = name.replace("_", "-")
        option = typer.Option(
            f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
            help=verb.texts.get(name) or help_line(name, verb.defaults, composed),
            rich_help_panel="Settings" if name in COMMON else spec.metadata["group"],
            hidden=name not in COMMON,
        )
        parameters.append(_flag(name, kind | None, option, None))
        if name == "method":
            text = "An option of the method; may be repeated. 'cdtrans methods NAME' lists them."
            panel = spec.metadata["group"]
            option = typer.Option("--set", metavar="KEY=VALUE", help=text, rich_help_panel=panel, hidden=True)
            parameters.append(_flag("method_args", list[str] | None, option, None))
    everything = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every flag and exit.")
    return [*parameters, _flag("help_all", bool, everything, False)]


def _show_all(context: typer.Context, wanted: bool | None) -> None:
    if wanted:
        show_all_flags(context.command)
        for parameter in context.command.params:
            if parameter.secondary_opts:  # two columns of long names would cut them
                parameter.opts, parameter.secondary_opts = [f"--[no-]{parameter.opts[0].lstrip('-')}"], []
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def show_all_flags(command: Any) -> None:
    """Show every flag in the help and in shell completion from now on."""
    for parameter in command.params:
        parameter.hidden = False
        if parameter.name in COMMON and parameter.name in SETTINGS:
            parameter.rich_help_panel = SETTINGS[parameter.name].metadata["group"]


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """['trade_off=0.5', 'ramp=1'] -> {'trade_off': 0.5, 'ramp': 1}, each value as YAML reads it."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise SettingsError("option-form", f"--set takes KEY=VALUE, such as --set trade_off=0.5, not '{word}'.")
        if key in options:
            raise SettingsError("given-twice", f"--set gives '{key}' twice; give it once.")
        try:
            options[key] = parse_yaml(value)
        except ValueError:
            options[key] = value
    return options


def help_line(name: str, changed: Mapping[str, Any], composed: Config) -> str:
    """A setting's help text with its choices and its default; where the recipes differ, both defaults. A `changed`
    value is the default of both."""
    spec = SETTINGS[name]
    first = spec.default if spec.default_factory is MISSING else spec.default_factory()
    value = changed.get(name, first)
    best = value if name in changed else getattr(composed, name, first)  # options of CDTrans have one default
    default = str(value).lower() if isinstance(value, bool) else str(value)
    default = next((short for short, full in SHORT_NAMES.items() if full == default), default)
    if best != value:
        default = str(best) if name == "recipe" else f"{best}; authors: {default}"
    notes = [", ".join(choices(name)), "" if value in (None, "auto", {}) else f"default: {default}"]
    note = f" ({'; '.join(filter(None, notes))})" if any(notes) else ""
    text: str = spec.metadata["help"]
    return text + note


def print_json(values: dict[str, Any]) -> None:
    if launched_rank() == 0:
        sys.stdout.write(json_format.dumps(values) + "\n")
