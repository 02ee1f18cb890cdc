"""The configurations of a benchmark's runs: of one method, or of several from one start.

Several methods have stage 1, optimiser and schedule in common. `start` says which: those of the benchmark's recipe
('authors') or of the best recipe ('best'). The methods of the best recipe always have that, since it is theirs. Stage 2
of the authors' recipe is shortened: else a comparison of all methods would take hours for Office-31."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdtrans.config import (
    METHOD_FIELDS,
    RESUME_MAY_CHANGE,
    TABLE_DEFAULTS,
    Config,
    choices,
    compose,
    flat,
    make_config,
    read_recipe,
)
from cdtrans.errors import CdtransError, MethodError, SettingsError, nearest
from cdtrans.inputs.benchmarks import Benchmark
from cdtrans.methods import METHODS, method_class, require_method

AUTHORS_BACKBONES = ("deit_small", "deit_base")  # with a recipe of the authors for every benchmark
DECIDED_HERE = ("source", "target", "root", "seed")  # settings that each run gets from its task
SHORTER = 4  # divisor of the epochs of the authors' stage 2 in a comparison: 10 epochs, like the best recipe
SHORTENED = ("epochs", "rebuild_every")
BEST, INSTANT = read_recipe("best"), read_recipe("instant")
OWN_START = (BEST["method"], INSTANT["method"])  # methods of the best recipe


@dataclass(frozen=True)
class Request:
    """The settings of a benchmark: flags win over the YAML file, which wins over the benchmark's recipe."""

    benchmark: Benchmark
    backbone: str
    from_file: dict[str, Any]
    settings: dict[str, Any]

    @property
    def authors(self) -> str:
        """The authors' recipe for the benchmark; backbones without one take that of DeiT-small."""
        backbone = self.backbone if self.backbone in AUTHORS_BACKBONES else AUTHORS_BACKBONES[0]
        return f"{self.benchmark.name}-{backbone.replace('_', '-')}"

    def configs(self, start: str | None) -> tuple[tuple[Config, ...], str | None]:
        """The configuration of every requested method, checked before any run starts, and the start of several."""
        from cdtrans.network.weights import read_state
        from cdtrans.run.pipeline import resolve

        requested = (self.from_file | self.settings).get("method")
        methods = parse_methods(requested) if isinstance(requested, str) else ()
        if len(methods) > 1:
            start = self._checked_start(start)
            configs = tuple(self.of_method(name, start) for name in methods)
        elif start is not None:
            raise SettingsError(
                "start-of-one", "--start is for several methods; with one method, use --recipe best or authors."
            )
        else:
            configs = (self.config(self.settings),)
        for config in configs:  # report a bad device, backbone or weights file once, and not with every run
            resolve(config)
        if configs[0].weights:
            read_state(Path(configs[0].weights))
        return configs, start

    def config(self, settings: dict[str, Any]) -> Config:
        """The configuration of one method, except for the settings that each task decides."""
        from_file = self.from_file
        if self.backbone not in AUTHORS_BACKBONES:
            settings = {"backbone": self.backbone, **settings}
        given = from_file | settings
        recipe = given.get("recipe", start_of(str(given.get("method")), "authors"))
        if recipe == "best" and "backbone" not in given:
            settings = settings | {"backbone": read_recipe(self.authors)["backbone"]}
        named = self.authors if recipe == "authors" else recipe
        chosen = compose(TABLE_DEFAULTS, from_file, settings, {"recipe": named})
        own = [key for key in DECIDED_HERE if key in settings]
        if own := [*own, *(key for key in ("source_model", "answers") if getattr(chosen, key))]:
            raise SettingsError(
                "decided-by-bench", f"A benchmark decides '{own[0]}' for each of its runs; leave it out."
            )
        require_method(chosen.method)
        return chosen

    def _checked_start(self, start: str | None) -> str:
        """The start of several methods. Options of one method are refused."""
        if options := [key for key in self.from_file | self.settings if key in METHOD_FIELDS or key == "method_args"]:
            option = "--set" if options[0] == "method_args" else f"'{options[0]}'"
            raise SettingsError(
                "option-of-one-method",
                f"{option} is an option of one method, and --method names several; leave it out.",
            )
        if "recipe" in self.settings:
            raise SettingsError(
                "recipe-of-several", "With several methods, use --start, not --recipe, to choose what they start from."
            )
        start = start or self.from_file.get("recipe") or "authors"
        if start not in choices("recipe"):
            raise SettingsError(
                "start-unknown", f"'{start}' is not a value of --start: {nearest(str(start), choices('recipe'))}"
            )
        return start

    def of_method(self, method: str, start: str) -> Config:
        """The configuration of a method of a comparison: the user's, and what tells the methods apart."""
        own = {"recipe": start_of(method, start), "method": method}
        if method == INSTANT["method"]:
            own = INSTANT
        elif own["recipe"] != "best":
            authors = make_config(read_recipe(self.authors))
            shorter = {name: math.ceil(getattr(authors, name) / SHORTER) for name in SHORTENED}
            return self.config({k: n for k, n in shorter.items() if k not in self.from_file} | self.settings | own)
        return self.config(self.settings | own)


def parse_methods(text: str) -> tuple[str, ...]:
    """'dann', 'cdtrans,dann' or 'all' -> methods in the order of METHODS, then the user's own."""
    names = [name for word in text.split(",") for name in (METHODS if word.strip() == "all" else [word.strip()])]
    for name in names:
        require_method(name)
    labels = [label(name) for name in names]
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise SettingsError("method-twice", f"--method names '{twice[0]}' twice; name every method once.")
    return (*(name for name in METHODS if name in names), *(name for name in names if name not in METHODS))


def label(method: str) -> str:
    """A method's name in tables and folders: its own, or that of the class in the user's file."""
    return method.rpartition(":")[2]


def start_of(method: str, start: str | None) -> str | None:
    """The recipe that a method of several begins with; of one it has no name."""
    return "best" if start and method in OWN_START else start


def misfits(configs: tuple[Config, ...], classes: tuple[str, ...]) -> dict[str, str]:
    """The labels of the methods that cannot work with the backbone, and what they need."""
    from cdtrans.network.weights import make_card
    from cdtrans.run.pipeline import resolve
    from cdtrans.run.stage1 import initial_network

    config = resolve(configs[0])
    network = initial_network(config, make_card(config, classes, stage="source", epoch=0), with_weights=False)
    reasons = {}
    for method in (each.method for each in configs):
        kind = method_class(method)
        try:
            kind.check(network, config.backbone)
        except CdtransError:
            reasons[label(method)] = f"needs {'a ' if kind.backbones == 'ViT' else ''}{kind.backbones}"
    if len(reasons) == len(configs):
        raise MethodError(
            "no-method-fits",
            f"None of these methods works with the backbone '{config.backbone}'; see 'cdtrans methods' for their "
            "needs.",
        )
    return reasons


def recipe_of(config: Config, decided: tuple[str, ...]) -> dict[str, Any]:
    """The settings that all runs of a study share, with all options of the method: not those `decided` run by run, nor
    the machine. The guard may change when a single run resumes, but it decides which model is selected, so it is the
    same in a whole table."""
    free = {*decided, *(f"method.{name}" for name in decided), *RESUME_MAY_CHANGE} - {"guard"}
    options = asdict(method_class(config.method).Options()) | config.method_args
    return {key: value for key, value in flat(config.to_dict() | {"method_args": options}).items() if key not in free}
