"""The settings of a run: one flat, frozen, strict record, and the options of a method, which are checked the same way.

The defaults are the authors' recipe (docs/method.md). A field's help line is also the help of its command-line flag.
Where the paper and the authors' code differ, the default is the code's, because the published numbers come from it, and
the help names the paper's value.
"""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin

import yaml

from cdtrans.errors import MissingFileError, SettingsError, ended, nearest
from cdtrans.schema import Help, Misfit, Range, build, option, record_fields, short_repr

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


def _option(group: str, default: Any, text: str, minimum: float | None = None, maximum: float | None = None) -> Any:
    return option(default, text, group=group, minimum=minimum, maximum=maximum)


# A function for each heading in --help.
_data, _recipe, _model = (functools.partial(_option, group) for group in ("Data", "Recipe", "Model"))
_stage_1, _stage_2 = (functools.partial(_option, group) for group in ("Stage 1: source", "Stage 2: adaptation"))
_steps, _trust, _run = (functools.partial(_option, group) for group in ("Optimisation", "Trust", "Run"))
_cdtrans = functools.partial(_option, "Method: cdtrans")


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    source: str = _data("", "Labelled images: a folder of class folders, or a list of 'path label' lines.")
    target: str = _data("", "Unlabelled images: a folder of any depth, or a list of paths.")
    target_labels: str | None = _data(None, "Train with the labels of some target images, in a file of 'cdtrans ask'.")
    root: str | None = _data(None, "Folder that paths in lists are relative to (default: the list's folder).")
    crop: int | Auto = _data("auto", "Image size the model sees (auto: the backbone's).", 8, LARGEST_SIDE)
    resize: int | Auto = _data("auto", "Image size before cropping (auto: 8/7 of the crop).", 8, LARGEST_SIDE)
    flip: float = _data(0.5, "Probability of mirroring a training image.", 0, 1)
    max_bad: float = _data(0.05, "Largest accepted share of unreadable files.", 0, 1)

    recipe: Literal["best", "authors"] = _recipe(
        "authors",
        "Defaults of other settings: the best recipe, the CDTrans authors' (also for other methods), or a named change "
        "of one of them, such as office31-deit-base.",
    )
    effort: Literal["instant", "quick", "full"] = _recipe(
        "full", "For the best recipe: instant does not train the backbone, quick trains a quarter as much as full."
    )

    backbone: str = _model(
        "deit_small_distilled_patch16_224.fb_in1k",
        "Any timm model: a name with its tag, or a short name such as dinov2_small.",
    )
    backbone_args: dict = _model({}, "Arguments for timm's create_model, such as {depth: 4} (YAML only).")
    weights: str | None = _model(None, "A .safetensors or .pth file to start from instead of timm's weights.")
    pretrained: bool = _model(True, "Start from timm's pretrained weights, or from scratch.")
    neck: Literal["batchnorm", "none"] = _model(
        "batchnorm", "The authors' bottleneck norm before the classifier, or a plain linear head (the paper)."
    )
    taps: int = _model(1, "How many of a ViT's last blocks give their class token to the feature.", 1)
    drop_path: float = _model(0.1, "Stochastic depth of the last block.", 0, 0.99)

    source_model: str | None = _stage_1(
        None, "Start from this run's source-only model; without SOURCE also from a weights file of a timm classifier."
    )
    source_classes: str | None = _stage_1(
        None, "For a weights file as --source-model: a file of its class names, one per line, in its outputs' order."
    )
    source_fit: Literal["train", "probe"] = _stage_1(
        "train", "Train the network on the source, or only a linear probe on the frozen backbone."
    )
    source_epochs: int = _stage_1(10, "Epochs on the labelled source.", 1)
    source_lr: float = _stage_1(0.008, "Learning rate (the paper: 0.003).", 0, LARGEST_RATE)
    label_smoothing: float = _stage_1(0.1, "Label smoothing.", 0, 0.99)

    epochs: int = _stage_2(40, "Epochs on source-target pairs.", 1)
    lr: float = _stage_2(0.008, "Learning rate (the paper: 0.003).", 0, LARGEST_RATE)
    rebuild_every: int = _stage_2(10, "Epochs between searches for new pairs.", 1)
    method: str = _stage_2("cdtrans", "A name from 'cdtrans methods', or FILE.py:CLASS for your own method.")
    method_args: dict = _stage_2({}, "Options of the method, such as {trade_off: 0.5}.")

    optimizer: Literal["sgd", "adamw"] = _steps("sgd", "SGD, which the authors use, or AdamW.")
    batch_size: int = _steps(64, "Images (stage 1) or pairs (stage 2) per step.", 2)
    momentum: float = _steps(0.9, "SGD's momentum.", 0, 1)
    weight_decay: float = _steps(1e-4, "Weight decay.", 0, LARGEST_FACTOR)
    bias_lr_factor: float = _steps(2.0, "Learning rate of biases, relative to that of weights.", 0, LARGEST_FACTOR)
    schedule: Literal["authors", "cosine"] = _steps(
        "authors",
        "The authors' rate per epoch and weight decay on all parameters, or one cosine and decay on matrices.",
    )
    warmup_epochs: int = _steps(10, "Warm-up epochs of both stages; a short stage warms up for half of its epochs.", 0)
    backbone_rate: float = _steps(
        1.0, "Learning rate of the backbone in stage 2, relative to --lr (most methods' authors: 0.1).", 0
    )
    layer_decay: float = _steps(1.0, "Learning rate of a backbone layer in stage 2, relative to the next.", 0.01, 1)
    clip_norm: float = _steps(1.0, "Clip gradients to this norm (1e9: never).", 0.001)

    holdout: float | Auto = _trust(
        "auto", "Share of the source to hold out (auto: 0.1 if there are 50 images per class, else 0).", 0, 0.5
    )
    select: Rule = _trust("consensus", "The epoch to keep: the last, or the best by a label-free score.")
    guard: bool = _trust(True, "Keep the source-only model if adaptation seems to have done harm.")

    seed: int = _run(1234, "Random seed.", 0, LARGEST_SEED)
    device: str = _run("auto", "cpu, cuda, cuda:1, ... or mps (auto: a CUDA GPU if there is one).")
    precision: Precision = _run("auto", "Floating-point type (auto: bf16 on a GPU with it, else fp16; fp32 on CPU).")
    compile: Literal["auto", "off", "graph"] = _run(
        "auto", "Capture GPU steps as a CUDA graph or not (auto: graph if there are enough steps)."
    )
    encode_batch: int = _run(256, "Batch size for extracting features.", 1)
    pixels: Literal["auto", "store", "stream"] = _run(
        "auto", "Decode images once into the cache, or every time (auto: every time if the disk is too small)."
    )
    save_every: float = _run(30.0, "Seconds between checkpoints; a kill loses at most this much work.", 0)
    cache: str | None = _run(None, "Folder for decoded images (default: $CDTRANS_CACHE, or the user's cache folder).")
    report: bool = _run(True, "Write report.html at the end.")
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = _run("none", "Also log to one of these.")

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

    first_block_residual: bool = _cdtrans(True, "Residual in the source-target branch's first block (the paper: none).")
    detach_teacher: bool = _cdtrans(False, "Stop distillation's gradient at its teacher, the source-target branch.")
    loss_source: Literal["cls", "none"] = _cdtrans("cls", "Loss of the source branch ('none': for ablations).")
    loss_source_target: Literal["dtl", "cls", "none"] = _cdtrans(
        "dtl", "Loss of the source-target branch: distillation, or classification (Table 6)."
    )
    loss_target: Literal["cls", "none"] = _cdtrans("cls", "Loss of the target branch.")

    def __post_init__(self) -> None:
        if {self.loss_source, self.loss_source_target, self.loss_target} == {"none"}:
            raise SettingsError("no-loss", "Stage 2 needs a loss; leave at least one of --loss-... on.")


@dataclass(frozen=True)
class CDTransOptions(BranchOptions):
    """The options of the method 'cdtrans'. They are declared here and not next to the method, because each is also a
    flag and a setting, which must be known without importing torch."""

    pairing: Pairing = _cdtrans("two_way", "Pairs from both sides (Eq. 3 and 4), or from one (Table 5).")
    center_aware: bool = _cdtrans(True, "Keep only the pairs whose target centre agrees with the source's label.")
    target_class: Literal["center", "pair"] = _cdtrans(
        "center", "Pseudo-label of a target image: its centre's class, or its pair's (Table 5)."
    )
    mutual_pairs: Literal["twice", "once"] = _cdtrans(
        "twice", "How often to count a pair found from both sides; the paper's union counts it once."
    )


# Defaults of every run of a table: without the guard a row shows what its method did (its verdict is in the run folder
# anyway), and nobody reads so many reports.
TABLE_DEFAULTS = {"guard": False, "report": False}


class Settings(TypedDict, total=False):
    """The settings that functions of Python take by name: those of Config and of CDTransOptions, with their types."""

    target_labels: str | Path | None
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
WhichModel = Annotated[str, Help("chosen, adapted (the selected epoch), last (epoch), or source (not adapted).")]
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

PATHS = ("source", "target", "target_labels", "root", "weights", "source_model", "source_classes", "cache")

FIELDS = {name: spec for name, (_, spec) in record_fields(Config).items()}
METHOD_FIELDS = {name: spec for name, (_, spec) in record_fields(CDTransOptions).items()}
SETTINGS = FIELDS | METHOD_FIELDS  # everything that a YAML file or a flag may set
HINTS = {name: hint for kind in (Config, CDTransOptions) for name, (hint, _) in record_fields(kind).items()}


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
    return replace(config, method_args=options, **places)


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
