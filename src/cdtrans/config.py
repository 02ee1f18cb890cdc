"""The settings of a run: one flat, frozen, strict record, and the options of a method, which are checked the same way.

The defaults are the authors' recipe (docs/method.md). help.yaml says what every setting means, under its heading in
--help. Where the paper and the authors' code differ, the default is the code's, because the published numbers come from
it, and the help names the paper's value.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import yaml

from cdtrans.errors import MissingFileError, SettingsError, ended, nearest
from cdtrans.schema import Help, Misfit, Range, build, record_fields, short_repr

LARGEST_SIDE = 4096  # pixels of an image, which then takes 50 MB
LARGEST_RATE = 1e30  # beyond it a step does not fit into float32
LARGEST_FACTOR = 1e6  # limit of factors that a rate is multiplied by
LARGEST_SEED = 2**63 - 1
RECIPES = Path(__file__).with_name("recipes")
LARGEST_YAML, MOST_VALUES = 10**6, 10**4  # bytes of a file of settings, and values in it

Auto = Literal["auto"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Pairing = Literal["two_way", "one_way_source", "one_way_target"]
Rule = Literal[
    "consensus", "last", "confidence", "information", "nuclear_norm", "clusters", "density", "centers", "holdout"
]

Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, LARGEST_RATE)]
Factor = Annotated[float, Range(0, LARGEST_FACTOR)]
BelowOne = Annotated[float, Range(0, 0.99)]
Count = Annotated[int, Range(1)]
Pixels = Annotated[int, Range(8, LARGEST_SIDE)]


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    source: str = ""
    target: str = ""
    answers: str | None = None
    target_classes: list[str] | str | None = None
    other_classes: bool | None = None
    root: str | None = None
    crop: Pixels | Auto = "auto"
    resize: Pixels | Auto = "auto"
    flip: Share = 0.5
    max_bad: Share = 0.05

    recipe: Literal["best", "authors"] = "authors"
    effort: Literal["instant", "quick", "full"] = "full"

    backbone: str = "deit_small_distilled_patch16_224.fb_in1k"
    backbone_args: dict = field(default_factory=dict)
    weights: str | None = None
    pretrained: bool = True
    neck: Literal["batchnorm", "none"] = "batchnorm"
    taps: Count = 1
    drop_path: BelowOne = 0.1

    source_model: str | None = None
    source_classes: str | None = None
    source_fit: Literal["train", "probe"] = "train"
    source_epochs: Count = 10
    source_lr: Rate = 0.008
    label_smoothing: BelowOne = 0.1

    epochs: Count = 40
    lr: Rate = 0.008
    rebuild_every: Count = 10
    method: str = "cdtrans"
    method_args: dict = field(default_factory=dict)

    optimizer: Literal["sgd", "adamw"] = "sgd"
    batch_size: Annotated[int, Range(2)] = 64
    momentum: Share = 0.9
    weight_decay: Factor = 1e-4
    bias_lr_factor: Factor = 2.0
    schedule: Literal["authors", "cosine"] = "authors"
    warmup_epochs: Annotated[int, Range(0)] = 10
    backbone_rate: Annotated[float, Range(0)] = 1.0
    layer_decay: Annotated[float, Range(0.01, 1)] = 1.0
    clip_norm: Annotated[float, Range(0.001)] = 1.0

    holdout: Annotated[float, Range(0, 0.5)] | Auto = "auto"
    select: Rule = "consensus"
    guard: bool = True

    max_steps: Annotated[int, Range(0)] = 0
    seed: Annotated[int, Range(0, LARGEST_SEED)] = 1234
    device: str = "auto"
    precision: Precision = "auto"
    compile: Literal["auto", "off", "graph"] = "auto"
    encode_batch: Count = 256
    pixels: Literal["auto", "store", "stream"] = "auto"
    save_every: Annotated[float, Range(0)] = 30.0
    cache: str | None = None
    report: bool = True
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Resolved(Config):
    """The settings of a run on this machine, for its backbone: nothing that decides a result is 'auto' any more, and
    every option of the method is written out. `run.pipeline.resolve` makes it."""

    crop: int = 224
    resize: int = 256
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclass(frozen=True)
class BranchOptions:
    """The three branches of CDTrans and the loss on each."""

    first_block_residual: bool = True
    detach_teacher: bool = False
    loss_source: Literal["cls", "none"] = "cls"
    loss_source_target: Literal["dtl", "cls", "none"] = "dtl"
    loss_target: Literal["cls", "none"] = "cls"

    def __post_init__(self) -> None:
        if {self.loss_source, self.loss_source_target, self.loss_target} == {"none"}:
            raise SettingsError("no-loss", "Stage 2 needs a loss; leave at least one of --loss-... on.")


@dataclass(frozen=True)
class CDTransOptions(BranchOptions):
    """The options of the method 'cdtrans'. They are declared here and not next to the method, because each is also a
    flag and a setting, which must be known without importing torch."""

    pairing: Pairing = "two_way"
    center_aware: bool = True
    target_class: Literal["center", "pair"] = "center"
    mutual_pairs: Literal["twice", "once"] = "twice"


# Defaults of every run of a table: without the guard a row shows what its method did (its verdict is in the run folder
# anyway), and nobody reads so many reports.
TABLE_DEFAULTS = {"guard": False, "report": False}


class Settings(TypedDict, total=False):
    """The settings that functions of Python take by name: those of Config and of CDTransOptions, with their types."""

    answers: str | Path | None
    target_classes: list[str] | str | None
    other_classes: bool | None
    root: str | Path | None
    crop: int | Auto
    resize: int | Auto
    flip: float
    max_bad: float
    recipe: str
    effort: Literal["instant", "quick", "full"]
    backbone: str
    backbone_args: dict[str, Any]
    weights: str | Path | None
    pretrained: bool
    neck: Literal["batchnorm", "none"]
    taps: int
    drop_path: float
    source_model: str | Path | None
    source_classes: str | Path | None
    source_fit: Literal["train", "probe"]
    source_epochs: int
    source_lr: float
    label_smoothing: float
    epochs: int
    lr: float
    rebuild_every: int
    method: str
    method_args: dict[str, Any]
    optimizer: Literal["sgd", "adamw"]
    batch_size: int
    momentum: float
    weight_decay: float
    bias_lr_factor: float
    schedule: Literal["authors", "cosine"]
    warmup_epochs: int
    backbone_rate: float
    layer_decay: float
    clip_norm: float
    holdout: float | Auto
    select: Rule
    guard: bool
    max_steps: int
    seed: int
    device: str
    precision: Precision
    compile: Literal["auto", "off", "graph"]
    encode_batch: int
    pixels: Literal["auto", "store", "stream"]
    save_every: float
    cache: str | Path | None
    report: bool
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"]
    first_block_residual: bool
    detach_teacher: bool
    loss_source: Literal["cls", "none"]
    loss_source_target: Literal["dtl", "cls", "none"]
    loss_target: Literal["cls", "none"]
    pairing: Pairing
    center_aware: bool
    target_class: Literal["center", "pair"]
    mutual_pairs: Literal["twice", "once"]


# Parameters that several public functions have, with their help on the command line.
SourceArgument = Annotated[str | Path, Help("Folder of class folders, or a list of 'path label' lines.", "SOURCE")]
TargetArgument = Annotated[
    str | Path, Help("Folder with images at any depth, or a list of paths. Labels are not read.", "TARGET")
]
RunFolder = Annotated[str | Path, Help("A finished run folder.", "RUN")]
WhichModel = Annotated[
    Literal["chosen", "adapted", "last", "source"],
    Help("chosen, adapted (the selected epoch), last (epoch), or source (not adapted)."),
]
DeviceName = Annotated[str, Help("cpu, cuda, cuda:1, ... or mps (auto: a CUDA GPU if there is one).")]
Root = Annotated[str | Path | None, Help("Folder that paths in a list are relative to (default: the list's folder).")]
LargestBad = Annotated[float, Help("Largest accepted share of unreadable files."), Range(0, 1)]
SettingsFile = Annotated[str | Path | None, Help("A YAML file of settings; flags override it.")]
Force = Annotated[bool, Help("Continue even if 'cdtrans check' says stop.")]
Jobs = Annotated[int, Help("How many runs to start in parallel, on one device."), Range(minimum=1)]

# What may change when a run is resumed: where it runs, not what it computes.
RESUME_MAY_CHANGE = ("device", "cache", "tracker", "encode_batch", "save_every", "compile", "pixels", "guard", "report")

# What is resolved once torch and timm are imported: 'auto', and short names of backbones.
DECIDED_LATE = ("device", "crop", "resize", "precision", "backbone")

PATHS = ("source", "target", "answers", "root", "weights", "source_model", "source_classes", "cache")

FIELDS = {name: spec for name, (_, spec) in record_fields(Config).items()}
METHOD_FIELDS = {name: spec for name, (_, spec) in record_fields(CDTransOptions).items()}
SETTINGS = FIELDS | METHOD_FIELDS  # everything that a YAML file or a flag may set
HINTS = {name: hint for kind in (Config, CDTransOptions) for name, hint in get_type_hints(kind).items()}
HELP = yaml.safe_load(Path(__file__).with_name("help.yaml").read_text(encoding="utf-8"))
# A setting's heading in --help, and its help line.
for heading, lines in HELP["settings"].items():
    for name, line in lines.items():
        SETTINGS[name].metadata = MappingProxyType({"group": heading, "help": line})


def choices(name: str) -> list[str]:
    """The words that a setting accepts; none if it accepts anything else."""
    return list(get_args(HINTS[name])) if get_origin(HINTS[name]) is Literal else []


def make_config(*layers: dict[str, Any]) -> Config:
    """Merge layers of values, the later ones winning, and check every key and value, and what contradicts each other.
    Paths become absolute. An option of CDTrans may also be given as a setting, such as `pairing: two_way`, instead of
    in `method_args`."""
    values = merged(*layers)
    for key in values:
        if key not in FIELDS:
            raise SettingsError("setting-unknown", f"There is no setting '{key}': {nearest(str(key), list(SETTINGS))}")
    config: Config = _built(Config, values)
    require_device(config.device)
    crop, resize = config.crop, config.resize
    if isinstance(crop, int) and isinstance(resize, int) and resize < crop:
        raise SettingsError("crop-too-large", f"--crop {crop} is larger than --resize {resize}; change one of the two.")
    options = config.method_args
    if config.method == "cdtrans":  # known without torch; other methods are checked when they are loaded
        checked = check_options(CDTransOptions, options, config.method)
        options = {key: getattr(checked, key) for key in options}
    paths = (*PATHS, "method") if is_method_file(config.method) else PATHS
    places = {name: os.path.abspath(place) for name in paths if (place := getattr(config, name))}
    tried: dict[str, Any] = {"source_epochs": 1, "epochs": 1} if config.max_steps else {}
    return replace(config, method_args=options, **places, **tried)


def compose(*layers: dict[str, Any]) -> Config:
    """The settings of a run: its recipe < its effort < what the user gave, the later ones winning. A recipe other than
    best and authors says which of the two it changes. Where recipe and effort are not given, the method implies them:
    the methods of the best recipe and of its efforts mean the best recipe; another method, or an option of CDTrans,
    means the authors'."""
    changed: dict[str, Any] = {}
    if (name := merged(*layers).get("recipe", "best")) not in choices("recipe"):
        changed = read_recipe(name)
        layers = (*layers, {"recipe": changed["recipe"]})
    given, best, instant = merged(changed, *layers), read_recipe("best"), read_recipe("instant")
    method, of_cdtrans = given.get("method"), METHOD_FIELDS.keys() & given["method_args"].keys()
    implied = "authors" if of_cdtrans or method not in (None, best["method"], instant["method"]) else "best"
    recipe, effort = read_recipe("authors"), {}
    if given.get("recipe", implied) == "best":
        recipe, chosen = best, given.get("effort", "instant" if method == instant["method"] else "full")
        effort = read_recipe(chosen) if chosen in ("instant", "quick") else {}
        if method not in (None, effort.get("method", best["method"])):
            effort.pop("method_args", None)  # options of the best recipe's method
        if not given.get("pretrained", True) and not given.get("weights"):
            recipe["source_fit"] = "train"  # there is nothing to probe
    config = make_config(recipe, changed, effort, *layers)
    if config.recipe == "authors" and config.effort != "full":
        why = "" if "recipe" in given else ", which --method and the options of CDTrans imply"
        raise SettingsError(
            "effort-not-here",
            f"'--effort {config.effort}' belongs to the best recipe, but this run uses the recipe 'authors'{why}; "
            "leave it out, or use the recipe 'best'.",
        )
    if config.recipe == "best" and (config.method == instant["method"]) != (config.effort == "instant"):
        raise SettingsError(
            "effort-contradicts-method",
            f"'--effort {config.effort}' does not go with '--method {config.method}'; leave one of the two out.",
        )
    return config


def compose_run(
    source: str | Path | None,
    target: str | Path | None,
    config: str | Path | None,
    settings: dict[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Config, str | None]:
    """The settings of a run: recipe < defaults < YAML file < settings < paths; and the run folder that the YAML file
    names."""
    places = {k: str(v) for k, v in (("source", source), ("target", target)) if v is not None}
    from_file = read_yaml(Path(config)) if config is not None else {}
    out = from_file.pop("out", None)
    if out is not None and (not isinstance(out, str) or not out):
        raise SettingsError("setting-kind", f"'out' must be text, not {short_repr(out)}.")
    return compose({**(defaults or {})}, from_file, settings, places), out


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The later layer wins, option by option; where it changes the method, the earlier method's options are dropped.
    Options of CDTrans that are given as settings are moved into `method_args`."""
    values: dict[str, Any] = {"method_args": {}}
    for layer in layers:
        beside = {key: value for key, value in layer.items() if key in METHOD_FIELDS}
        options = layer.get("method_args", {})
        if not isinstance(options, dict):
            raise SettingsError("setting-kind", f"'method_args' must be a mapping, not {short_repr(options)}.")
        if twice := [key for key in beside if key in options]:
            raise SettingsError("option-twice", f"'{twice[0]}' is given twice, also in 'method_args'; give it once.")
        layer = {key: value for key, value in layer.items() if key not in METHOD_FIELDS}
        before = values.get("method", FIELDS["method"].default)
        same = layer.get("method", before) == before
        values |= layer | {"method_args": (values["method_args"] if same else {}) | beside | options}
    return values


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings and method options in one mapping, to compare two runs: {"lr": ..., "method.ramp": ...}."""
    rest = {key: value for key, value in values.items() if key != "method_args"}
    return rest | {f"method.{key}": value for key, value in values["method_args"].items()}


def check_options(options: type[Any], values: dict[str, Any], method: str) -> Any:
    """A method's options from what the user gave, checked as strictly as the settings."""
    return _built(options, values, f"The method '{method}' has no option")


def is_method_file(name: str) -> bool:
    """Whether a method is named as FILE.py:CLASS."""
    return name.rpartition(":")[0].endswith(".py")


def require_weights(file: str | Path | None) -> None:
    """Refuse a weights file that does not exist."""
    if file and not os.path.isfile(file):
        raise MissingFileError("no-weights-file", f"There is no weights file '{file}'; check --weights.")


def require_device(name: str) -> None:
    """Refuse an invalid device name. Whether this machine has the device is known once torch is imported."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", name):
        raise SettingsError("device-unknown", f"Unknown device '{name}'; use cpu, cuda, cuda:N or mps.")


def read_yaml(file: Path) -> dict[str, Any]:
    """A flat mapping from a YAML file; the keys are checked when the configuration is made."""
    try:
        with file.open("rb") as lines:
            values = parse_yaml(lines.read(LARGEST_YAML + 1).decode())
    except OSError as error:
        raise SettingsError("settings-unreadable", f"'{file}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise SettingsError("settings-not-yaml", f"'{file}' is not valid YAML: {cause}.") from error
    if not isinstance(values, dict):
        raise SettingsError("settings-not-yaml", f"'{file}' must hold 'key: value' lines, one for each setting.")
    return values


def parse_yaml(text: str) -> Any:
    """Parse a text, or raise ValueError. A few bytes of YAML can describe a value that contains itself, or a billion
    values; copying or printing it would never end."""
    if len(text) > LARGEST_YAML:
        raise ValueError(f"it is larger than {LARGEST_YAML} bytes")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    waiting, count = [value], 0
    while waiting and count <= MOST_VALUES:
        each, count = waiting.pop(), count + 1
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple | set) else ()
    if waiting:
        raise ValueError(f"it has more than {MOST_VALUES} values, or one that contains itself")
    return value


def recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The settings in a file of recipes/."""
    if name not in recipe_names():
        known = nearest(str(name), recipe_names())
        raise SettingsError("recipe-unknown", f"Unknown recipe {short_repr(name)}: {known}")
    return read_yaml(RECIPES / f"{name}.yaml")


def _built(kind: type[Any], values: dict[str, Any], unknown: str = "") -> Any:
    try:
        return build(kind, values, written=True, unknown=unknown)
    except Misfit as misfit:
        raise SettingsError(f"setting-{misfit.code}", ended(str(misfit))) from None
