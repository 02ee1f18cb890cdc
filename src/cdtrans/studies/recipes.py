"""What the runs of a benchmark train with: the configuration of one method, or of several from one start.

Several methods have stage 1, optimiser and schedule in common. `start` says which: those of the benchmark's preset
('authors') or of the best recipe ('best'). The methods of the best recipe always have that, since it is theirs. Stage 2
of the authors' recipe is shortened: else a comparison of all methods would take hours for Office-31."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdtrans.config import METHOD_FIELDS, Config, choices, compose, make_config, read_recipe, read_yaml
from cdtrans.errors import CdtransError, nearest
from cdtrans.inputs.benchmarks import Benchmark
from cdtrans.methods import METHODS, method_class, require_method
from cdtrans.network.weights import make_card, read_state
from cdtrans.run.resolve import resolve
from cdtrans.run.stage1 import initial_network
from cdtrans.studies.folder import flags, with_table_defaults

PRESET_BACKBONES = {"deit_small": "deit-small", "deit_base": "deit-base"}  # those with presets
ALL = "all"  # as --method
SHORTER = 4  # stage 2 of the authors' recipe is so many times shorter in a comparison: 10 epochs, as the best recipe's
SHORTENED = ("epochs", "rebuild_every")
OWN_START = (read_recipe("best")["method"], read_recipe("instant")["method"])  # methods of the best recipe


@dataclass(frozen=True)
class Recipe:
    """The configuration of a method's runs, except for what their task decides, and the flags that give it to
    `adapt`."""

    method: str
    config: Config
    flags: tuple[str, ...]


def parse_methods(text: str) -> tuple[str, ...]:
    """'dann', 'cdtrans,dann' or 'all' -> methods in the order of METHODS, then the user's own."""
    names = [name for word in text.split(",") for name in (METHODS if word.strip() == ALL else [word.strip()])]
    for name in names:
        require_method(name)
    labels = [label(name) for name in names]
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise CdtransError(f"--method names '{twice[0]}' twice; name every method once.")
    return (*(name for name in METHODS if name in names), *(name for name in names if name not in METHODS))


def label(method: str) -> str:
    """What tables and folders call a method: its name, or the class in the user's file."""
    return method.rpartition(":")[2]


def start_of(method: str, start: str) -> str:
    """The recipe that a method begins with."""
    return "best" if method in OWN_START else start


def make_recipe(benchmark: Benchmark, backbone: str, config: Path | None, settings: dict[str, Any]) -> Recipe:
    """A method's recipe from flags (`settings`), which win over the YAML file `config`, which wins over the preset."""
    preset = _preset(benchmark, backbone)
    if backbone not in PRESET_BACKBONES:
        settings = {"backbone": backbone, **settings}
    from_file = _from_file(config)
    file = (f"--config={config}",) if config is not None else ()
    settings = with_table_defaults(settings, config)
    given = from_file | settings
    if given.get("recipe", start_of(str(given.get("method")), "authors")) == "best":
        # the preset is the authors' recipe: only its backbone is taken
        settings = ({} if "backbone" in from_file else {"backbone": read_recipe(preset)["backbone"]}) | settings
        layers, begin = [{}, from_file, settings], []
    else:
        layers, begin = [read_recipe(preset), from_file, settings], [f"--preset={preset}"]
    chosen = compose(*layers)
    if chosen.source_model:
        raise CdtransError(
            "A benchmark has several sources and shares stage 1 among its runs by itself; leave 'source_model' out."
        )
    if chosen.target_labels:
        raise CdtransError("A benchmark trains without target labels; leave 'target_labels' out.")
    require_method(chosen.method)
    return Recipe(chosen.method, chosen, (*begin, *file, *flags(settings)))


def make_recipes(
    benchmark: Benchmark, backbone: str, config: Path | None, settings: dict[str, Any], start: str | None
) -> tuple[tuple[Recipe, ...], str | None]:
    """The recipe of every method that is asked for, checked before any run starts, and the start of several methods."""
    from_file = _from_file(config)
    asked = (from_file | settings).get("method")
    methods = parse_methods(asked) if isinstance(asked, str) else ()
    if len(methods) < 2:
        if start is not None:
            raise CdtransError("--start is for several methods; with one method, use --recipe best or authors.")
        recipes: tuple[Recipe, ...] = (make_recipe(benchmark, backbone, config, settings),)
    else:
        start, preset = _checked_start(from_file, settings, start), _preset(benchmark, backbone)
        recipes = tuple(
            make_recipe(benchmark, backbone, config, _settings_of(name, start, preset, from_file, settings))
            for name in methods
        )
    for recipe in recipes:  # what is wrong with the device, the backbone or the weights would be wrong with every run
        resolve(recipe.config)
    if recipes[0].config.weights:
        read_state(Path(recipes[0].config.weights))
    return recipes, start


def shared_recipe(
    benchmark: Benchmark, backbone: str, config: Path | None, settings: dict[str, Any], start: str
) -> Config:
    """What several methods share, as the configuration of CDTrans."""
    of_cdtrans = _settings_of("cdtrans", start, _preset(benchmark, backbone), _from_file(config), settings)
    return make_recipe(benchmark, backbone, config, of_cdtrans).config


def misfits(recipes: tuple[Recipe, ...], classes: tuple[str, ...]) -> dict[str, str]:
    """The methods that cannot work with the backbone, and what they need."""
    config = resolve(recipes[0].config)
    network = initial_network(config, make_card(config, classes, stage="source", epoch=0), with_weights=False)
    reasons = {}
    for recipe in recipes:
        kind = method_class(recipe.method)
        try:
            kind.check(network, config.backbone)
        except CdtransError:
            reasons[recipe.method] = f"needs {'a ' if kind.backbones == 'ViT' else ''}{kind.backbones}"
    if len(reasons) == len(recipes):
        raise CdtransError(
            f"None of these methods works with the backbone '{config.backbone}'; see 'cdtrans methods' for their needs."
        )
    return reasons


def with_flags(recipe: Recipe, *words: str) -> Recipe:
    return replace(recipe, flags=(*recipe.flags, *words))


def _from_file(config: Path | None) -> dict[str, Any]:
    values = read_yaml(config) if config is not None else {}
    return {key: value for key, value in values.items() if key not in ("out", "preset")}


def _checked_start(from_file: dict[str, Any], settings: dict[str, Any], start: str | None) -> str:
    """The start of several methods; refuses what is of one method."""
    if options := [key for key in from_file | settings if key in METHOD_FIELDS or key == "method_args"]:
        what = "--set" if options[0] == "method_args" else f"'{options[0]}'"
        raise CdtransError(f"{what} is an option of one method, and --method names several; leave it out.")
    if "recipe" in settings:
        raise CdtransError("With several methods, use --start, not --recipe, to choose what they start from.")
    start = start or from_file.get("recipe") or "authors"
    if start not in choices("recipe"):
        raise CdtransError(f"'{start}' is not a value of --start: {nearest(str(start), choices('recipe'))}")
    return start


def _settings_of(
    method: str, start: str, preset: str, from_file: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """The settings of a method of a comparison: the user's, and what tells the methods apart."""
    own = {"recipe": start_of(method, start), "method": method}
    if method == read_recipe("instant")["method"]:
        return settings | own | {"effort": "instant", "epochs": 1}
    if own["recipe"] == "best":
        return settings | own
    authors = make_config(read_recipe(preset))
    shorter = {name: math.ceil(getattr(authors, name) / SHORTER) for name in SHORTENED}
    return {name: n for name, n in shorter.items() if name not in from_file} | settings | own


def _preset(benchmark: Benchmark, backbone: str) -> str:
    """Any other backbone takes the recipe of DeiT-small."""
    return f"{benchmark.name}-{PRESET_BACKBONES.get(backbone, PRESET_BACKBONES['deit_small'])}"
