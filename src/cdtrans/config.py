"""The settings of a run: one flat, frozen, strict record, and the options of a method, which are checked the same way.

The defaults are the authors' recipe (docs/method.md). A field's help line is also the help of its command-line flag.
Where the paper and the authors' code differ, the default is the code's, because the published numbers come from it, and
the help names the paper's value.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from cdtrans.errors import CdtransError, SettingsError, ended, nearest
from cdtrans.schema import Misfit, build, option, quoted

LARGEST_SIDE = 4096  # pixels of an image, which then takes 50 MB
LARGEST_RATE = 1e30  # beyond it a step does not fit into float32
LARGEST_FACTOR = 1e6  # of what is multiplied by a rate
LARGEST_SEED = 2**63 - 1
LARGEST_YAML, MOST_VALUES = 10**6, 10**4  # bytes of a file of settings, and values in it


def _option(default: Any, group: str, text: str, **limits: Any) -> Any:
    return option(default, text, group=group, **limits)


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes."""

    source: str = _option("", "Data", "Labelled images: a folder of class folders, or a list of 'path label' lines.")
    target: str = _option("", "Data", "Unlabelled images: a folder of any depth, or a list of paths.")
    target_labels: str | None = _option(
        None, "Data", "Train with the labels of some target images: a file as 'cdtrans ask' writes it."
    )
    root: str | None = _option(None, "Data", "Folder that paths in lists are relative to (default: the list's folder).")
    crop: int | Literal["auto"] = _option(
        "auto", "Data", "Image size the model sees (auto: the backbone's).", minimum=8, maximum=LARGEST_SIDE
    )
    resize: int | Literal["auto"] = _option(
        "auto",
        "Data",
        "Resize both sides to this before cropping (auto: 8/7 of the crop).",
        minimum=8,
        maximum=LARGEST_SIDE,
    )
    flip: float = _option(0.5, "Data", "Probability of mirroring a training image.", minimum=0, maximum=1)
    max_bad: float = _option(0.05, "Data", "Largest accepted share of unreadable files.", minimum=0, maximum=1)

    recipe: Literal["best", "authors"] = _option(
        "authors",
        "Recipe",
        "Defaults for the other settings: this project's best recipe, or the CDTrans authors', which presets and other "
        "methods also use.",
    )
    effort: Literal["instant", "quick", "full"] = _option(
        "full",
        "Recipe",
        "For the best recipe: instant does not train the backbone, quick trains a quarter as much as full.",
    )

    backbone: str = _option(
        "deit_small_distilled_patch16_224.fb_in1k",
        "Model",
        "Any timm model: a name with its tag, or a short name such as dinov2_small.",
    )
    backbone_args: dict = _option({}, "Model", "Arguments for timm's create_model, such as {depth: 4} (YAML only).")
    weights: str | None = _option(None, "Model", "A .safetensors or .pth file to start from instead of timm's weights.")
    pretrained: bool = _option(True, "Model", "Start from timm's pretrained weights, or from scratch.")
    neck: Literal["batchnorm", "none"] = _option(
        "batchnorm", "Model", "The authors' bottleneck norm before the classifier, or a plain linear head (the paper)."
    )
    taps: int = _option(1, "Model", "How many of a ViT's last blocks give their class token to the feature.", minimum=1)
    drop_path: float = _option(0.1, "Model", "Stochastic depth of the last block.", minimum=0, maximum=0.99)

    source_model: str | None = _option(
        None,
        "Stage 1: source",
        "Use the source-only model of this run instead of training stage 1. Without SOURCE: also a weights file of a "
        "timm classifier.",
    )
    source_classes: str | None = _option(
        None,
        "Stage 1: source",
        "If --source-model is a weights file: a file with its class names, one per line, in the order of its outputs.",
    )
    source_fit: Literal["train", "probe"] = _option(
        "train", "Stage 1: source", "Train the network on the source, or only a linear probe on the frozen backbone."
    )
    source_epochs: int = _option(10, "Stage 1: source", "Epochs on the labelled source.", minimum=1)
    source_lr: float = _option(
        0.008, "Stage 1: source", "Learning rate (the paper: 0.003).", minimum=0, maximum=LARGEST_RATE
    )
    label_smoothing: float = _option(0.1, "Stage 1: source", "Label smoothing.", minimum=0, maximum=0.99)

    epochs: int = _option(40, "Stage 2: adaptation", "Epochs on source-target pairs.", minimum=1)
    lr: float = _option(
        0.008, "Stage 2: adaptation", "Learning rate (the paper: 0.003).", minimum=0, maximum=LARGEST_RATE
    )
    rebuild_every: int = _option(10, "Stage 2: adaptation", "Epochs between searches for new pairs.", minimum=1)
    method: str = _option(
        "cdtrans",
        "Stage 2: adaptation",
        "How to adapt: a name from 'cdtrans methods', or FILE.py:CLASS for your own method.",
    )
    method_args: dict = _option({}, "Stage 2: adaptation", "Options of the method, such as {trade_off: 0.5}.")

    optimizer: Literal["sgd", "adamw"] = _option("sgd", "Optimisation", "SGD, which the authors use, or AdamW.")
    batch_size: int = _option(64, "Optimisation", "Images (stage 1) or pairs (stage 2) per step.", minimum=2)
    momentum: float = _option(0.9, "Optimisation", "SGD's momentum.", minimum=0, maximum=1)
    weight_decay: float = _option(1e-4, "Optimisation", "Weight decay.", minimum=0, maximum=LARGEST_FACTOR)
    bias_lr_factor: float = _option(
        2.0, "Optimisation", "Learning rate of biases, relative to that of weights.", minimum=0, maximum=LARGEST_FACTOR
    )
    schedule: Literal["authors", "cosine"] = _option(
        "authors",
        "Optimisation",
        "The authors' learning rate per epoch and weight decay on every parameter, or one cosine over all steps and "
        "weight decay on matrices only.",
    )
    warmup_epochs: int = _option(
        10, "Optimisation", "Warm-up epochs of both stages; a shorter stage warms up for half of its epochs.", minimum=0
    )
    backbone_rate: float = _option(
        1.0,
        "Optimisation",
        "Learning rate of the backbone in stage 2, relative to --lr (the authors of most compared methods: 0.1).",
        minimum=0,
    )
    layer_decay: float = _option(
        1.0,
        "Optimisation",
        "Learning rate of each backbone layer in stage 2, relative to the next layer's.",
        minimum=0.01,
        maximum=1,
    )
    clip_norm: float = _option(1.0, "Optimisation", "Clip gradients to this norm (1e9: never).", minimum=0.001)

    holdout: float | Literal["auto"] = _option(
        "auto",
        "Trust",
        "Share of the source to hold out (auto: 0.1 if there are 50 images per class, else 0).",
        minimum=0,
        maximum=0.5,
    )
    select: Literal[
        "consensus", "last", "confidence", "information", "nuclear_norm", "clusters", "density", "centers", "holdout"
    ] = _option("consensus", "Trust", "The epoch to keep: the last, or the best by a label-free score.")
    guard: bool = _option(
        True, "Trust", "Keep the source-only model (and exit 3) if adaptation seems to have done harm."
    )

    seed: int = _option(1234, "Run", "Random seed.", minimum=0, maximum=LARGEST_SEED)
    device: str = _option("auto", "Run", "cpu, cuda, cuda:1, ... or mps (auto: a CUDA GPU if there is one).")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _option(
        "auto", "Run", "Floating-point type (auto: bf16 on a GPU that has it, else fp16; fp32 on CPU)."
    )
    compile: Literal["auto", "off", "graph"] = _option(
        "auto", "Run", "Capture GPU steps as a CUDA graph or not (auto: graph if there are enough steps)."
    )
    encode_batch: int = _option(256, "Run", "Batch size for extracting features.", minimum=1)
    pixels: Literal["auto", "store", "stream"] = _option(
        "auto",
        "Run",
        "Decode images once into the cache, or every time (auto: every time if the disk is too small).",
    )
    save_every: float = _option(
        30.0, "Run", "Seconds between checkpoints; a kill loses at most this much work.", minimum=0
    )
    cache: str | None = _option(
        None, "Run", "Folder for decoded images (default: $CDTRANS_CACHE, or the user's cache folder)."
    )
    report: bool = _option(True, "Run", "Write report.html at the end.")
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = _option(
        "none", "Run", "Also log to TensorBoard, Weights & Biases or MLflow."
    )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BranchOptions:
    """The three branches of CDTrans and the loss on each."""

    first_block_residual: bool = _option(
        True,
        "Method: cdtrans",
        "Residual addition in the source-target branch's first block; the paper has none.",
    )
    detach_teacher: bool = _option(
        False, "Method: cdtrans", "Stop the gradient of the distillation loss at its teacher, the source-target branch."
    )
    loss_source: Literal["cls", "none"] = _option(
        "cls", "Method: cdtrans", "Loss of the source branch ('none': for ablations)."
    )
    loss_source_target: Literal["dtl", "cls", "none"] = _option(
        "dtl", "Method: cdtrans", "Loss of the source-target branch: distillation, or classification (Table 6)."
    )
    loss_target: Literal["cls", "none"] = _option("cls", "Method: cdtrans", "Loss of the target branch.")

    def __post_init__(self) -> None:
        if {self.loss_source, self.loss_source_target, self.loss_target} == {"none"}:
            raise CdtransError("Stage 2 cannot train without any loss; leave at least one of --loss-... on.")


@dataclass(frozen=True)
class CDTransOptions(BranchOptions):
    """The options of the method 'cdtrans'. They are declared here and not next to the method, because each is also a
    flag and a setting, which must be known without importing torch."""

    pairing: Literal["two_way", "one_way_source", "one_way_target"] = _option(
        "two_way", "Method: cdtrans", "Pairs from both sides (Eq. 3 and 4), or from one (Table 5)."
    )
    center_aware: bool = _option(
        True, "Method: cdtrans", "Keep only the pairs whose target centre agrees with the source's label."
    )
    target_class: Literal["center", "pair"] = _option(
        "center", "Method: cdtrans", "Pseudo-label of a target image: its centre's class, or its pair's (Table 5)."
    )
    mutual_pairs: Literal["twice", "once"] = _option(
        "twice", "Method: cdtrans", "How often to count a pair found from both sides; the paper's union counts it once."
    )


# The best recipe (docs/results/recipe.md), and what the shorter efforts change in it.
BEST: dict[str, Any] = {
    **{"recipe": "best", "method": "cotraining", "neck": "none", "taps": 4, "drop_path": 0.0, "source_fit": "probe"},
    **{"holdout": 0.0, "epochs": 10, "rebuild_every": 1, "warmup_epochs": 1, "schedule": "cosine"},
    **{"optimizer": "adamw", "lr": 4e-4, "weight_decay": 0.05, "bias_lr_factor": 1.0, "source_lr": 1e-3},
    "layer_decay": 0.75,
}
WERE_OPTIONS = {  # settings that were options of these methods, and their defaults then
    "cotraining": {"layer_decay": 0.75},
    "dann": {"backbone_rate": 1.0},
    "mstn": {"backbone_rate": 1.0},
}
EFFORTS: dict[str, dict[str, Any]] = {
    "full": {},
    "quick": {"epochs": 4, "method_args": {"length": 0.25}},
    "instant": {"method": "instant", "epochs": 1},
}

# What may change when a run is resumed: where it runs, not what it computes.
RESUME_MAY_CHANGE = (
    *("device", "cache", "tracker", "encode_batch", "save_every", "compile", "pixels", "guard", "report"),
)

# What is resolved once torch and timm are imported: 'auto', and short names of backbones.
DECIDED_LATE = ("device", "crop", "resize", "precision", "backbone")

HINTS = get_type_hints(Config)
FIELDS = {f.name: f for f in fields(Config)}
METHOD_FIELDS = {f.name: f for f in fields(CDTransOptions)}
METHOD_HINTS = get_type_hints(CDTransOptions)
SETTINGS = FIELDS | METHOD_FIELDS  # everything that a YAML file or a flag may set


def choices(name: str) -> list[str]:
    """The words that a setting accepts; none if it accepts anything else."""
    hint = (HINTS | METHOD_HINTS)[name]
    return list(get_args(hint)) if get_origin(hint) is Literal else []


def make_config(*layers: dict[str, Any]) -> Config:
    """Merge layers of values, the later ones winning, and check every key and value. An option of CDTrans may also
    be given as a setting, such as `pairing: two_way`, instead of in `method_args`."""
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merged(values, with_method_args(layer))
    for key in values:
        if key not in FIELDS:
            raise SettingsError("setting-unknown", f"There is no setting '{key}': {nearest(str(key), list(SETTINGS))}")
    config = _built(Config, values)
    if config.method == "cdtrans":  # known without torch; other methods are checked when they are loaded
        options = check_options(CDTransOptions, config.method_args, config.method)
        config = replace(config, method_args={key: getattr(options, key) for key in config.method_args})
    return config


def with_method_args(values: dict[str, Any]) -> dict[str, Any]:
    """Moves options of CDTrans that are given as settings into `method_args`."""
    beside = {key: value for key, value in values.items() if key in METHOD_FIELDS}
    options = values.get("method_args", {})
    if not isinstance(options, dict):
        raise CdtransError(f"'method_args' must be a mapping such as {{trade_off: 0.5}}, not {options!r}.")
    if twice := [key for key in beside if key in options]:
        raise CdtransError(f"'{twice[0]}' is given twice, as a setting and as an option of the method; give it once.")
    rest = {key: value for key, value in values.items() if key not in METHOD_FIELDS}
    return rest | ({"method_args": beside | options} if beside or options else {})


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings and method options in one mapping, to compare two runs: {"lr": ..., "method.ramp": ...}."""
    rest = {key: value for key, value in values.items() if key != "method_args"}
    return rest | {f"method.{key}": value for key, value in values["method_args"].items()}


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings of any version in the current form. Early versions chose a method with `self_training` and
    `pairing`."""
    values = dict(values)
    training, pairing = values.pop("self_training", "none"), values.get("pairing")
    if training != "none":
        values = {key: value for key, value in values.items() if key not in METHOD_FIELDS} | {"method": training}
    elif pairing in ("ground_truth", "sampled", "sampled_true"):
        values = {key: value for key, value in values.items() if key not in METHOD_FIELDS}
        values["method"] = "ground_truth" if pairing == "ground_truth" else "sampled_pairs"
    values = with_method_args(values)
    for name, default in WERE_OPTIONS.get(str(values.get("method")), {}).items():
        if name not in values:
            options = dict(values.get("method_args", {}))
            values |= {name: options.pop(name, default), "method_args": options}
    return values


def is_method_file(name: str) -> bool:
    """Whether a method is named as FILE.py:CLASS."""
    return name.rpartition(":")[0].endswith(".py")


def _merged(values: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """The later layer wins, option by option; if it changes the method, the earlier method's options are dropped."""
    before = values.get("method", FIELDS["method"].default)
    same = _method_place(layer.get("method", before)) == _method_place(before)
    arguments = (values.get("method_args", {}) if same else {}) | layer.get("method_args", {})
    return values | layer | ({"method_args": arguments} if arguments or "method_args" in values else {})


def check_options(options: type[Any], values: dict[str, Any], method: str) -> Any:
    """A method's options from what the user gave, checked as strictly as the settings."""
    return _built(options, values, f"The method '{method}' has no option")


def _built(kind: type[Any], values: dict[str, Any], unknown: str = "") -> Any:
    try:
        return build(kind, values, written=True, unknown=unknown)
    except Misfit as misfit:
        raise SettingsError(f"setting-{misfit.code}", ended(str(misfit))) from None


def layered_config(
    source: str | Path | None,
    target: str | Path | None,
    preset: str | None,
    config: str | Path | None,
    settings: dict[str, Any],
) -> tuple[Config, str | None]:
    """Preset, YAML file, settings and paths, the later ones winning; and the run folder that the YAML file names."""
    places = {k: str(v) for k, v in (("source", source), ("target", target)) if v is not None}
    from_file = read_yaml(Path(config)) if config is not None else {}
    out, preset_there = _pop_text(from_file, "out"), _pop_text(from_file, "preset")
    name = next((name for name in (preset, preset_there) if name is not None), "auto")
    layers = (read_preset(name), from_file, settings, places)
    if layers[0].get("recipe") == "authors" and (from_file | settings).get("recipe") == "best":
        raise CdtransError(f"The preset '{name}' is the authors' recipe, not the best one; leave one of the two out.")
    return config_of(*layers), out


def _pop_text(values: dict[str, Any], key: str) -> str | None:
    """A key of the YAML file that is not a setting."""
    text = values.pop(key, None)
    if text is not None and (not isinstance(text, str) or not text):
        raise CdtransError(f"'{key}' must be text, not {quoted(text)}.")
    return text


def config_of(preset: dict[str, Any], *layers: dict[str, Any]) -> Config:
    """The recipe, the preset, the effort, and what the user gave, the later ones winning."""
    recipe = recipe_layer((preset, *layers))
    effort = effort_layer((preset, *layers)) if recipe else {}
    return make_config(recipe, preset, effort, *layers)


def recipe_layer(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The defaults that the settings start from. If no recipe is given it is the best one, or the authors' if another
    method or an option of CDTrans is given. Without pretrained weights there is nothing to probe."""
    given = together(layers)
    best_methods = (None, BEST["method"], EFFORTS["instant"]["method"])
    of_cdtrans = any(key in METHOD_FIELDS for key in given.get("method_args", {}))
    implied = "authors" if of_cdtrans or given.get("method") not in best_methods else "best"
    recipe, effort = given.get("recipe", implied), given.get("effort")
    if recipe != "best":
        if effort not in (None, "full"):
            raise CdtransError(
                f"'--effort {effort}' belongs to the best recipe, but this run uses the recipe 'authors'"
                f"{'' if 'recipe' in given else ', which --method and the options of CDTrans imply'}; leave it out, or "
                "use the recipe 'best'."
            )
        return {}
    if effort is not None and effort not in list(EFFORTS):  # a list, because it may be anything
        raise CdtransError(f"'{effort}' is not a value of 'effort': {nearest(str(effort), list(EFFORTS))}")
    scratch = not given.get("pretrained", True) and not given.get("weights")
    return BEST | ({"source_fit": "train"} if scratch else {})


def effort_layer(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a shorter effort changes in the best recipe, even if a preset sets other options. The method 'instant' is
    the effort of that name."""
    given, instant = together(layers), EFFORTS["instant"]["method"]
    effort, method = given.get("effort"), given.get("method")
    if method == instant and effort is None:
        return EFFORTS["instant"] | {"effort": "instant"}
    if method is not None and (method == instant) != (effort == "instant"):
        raise CdtransError(
            f"'--effort {effort}' does not go with '--method {method}', because only the method '{instant}' "
            "does not train; leave one of the two out."
        )
    layer = dict(EFFORTS[effort or "full"])
    if method not in (None, layer.get("method", BEST["method"])):
        layer.pop("method_args", None)
    return layer


def together(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for layer in layers:
        given |= with_method_args(layer)
    return given


def require_weights(file: str | Path | None) -> None:
    """Refuse a weights file that does not exist."""
    if file and not os.path.isfile(file):
        raise CdtransError(f"There is no weights file '{file}'; check --weights.")


def require_device(name: str) -> None:
    """Refuse an invalid device name. Whether this machine has the device is known once torch is imported."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", name):
        raise CdtransError(f"Unknown device '{name}'; use cpu, cuda, cuda:N or mps.")


def settle(config: Config) -> Config:
    """Paths made absolute; settings that contradict each other are refused."""
    require_device(config.device)
    crop, resize = config.crop, config.resize
    if isinstance(crop, int) and isinstance(resize, int) and resize < crop:
        raise CdtransError(f"Images resized to {resize} cannot be cropped to {crop}; raise --resize or lower --crop.")
    names = ("source", "target", "target_labels", "root", "weights", "source_model", "source_classes", "cache")
    places = {name: os.path.abspath(place) for name in names if (place := getattr(config, name))}
    return make_config(config.to_dict() | places | {"method": _method_place(config.method)})


def _method_place(name: Any) -> Any:
    """A method in a file by the absolute path of the file."""
    return os.path.abspath(name) if isinstance(name, str) and is_method_file(name) else name


def read_yaml(file: Path) -> dict[str, Any]:
    """A flat mapping from a YAML file; the keys are checked when the configuration is made."""
    try:
        with file.open("rb") as lines:
            values = parse_yaml(lines.read(LARGEST_YAML + 1).decode())
    except OSError as error:
        raise CdtransError(f"The configuration '{file}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CdtransError(f"'{file}' is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise CdtransError(f"'{file}' must hold 'key: value' lines, one for each setting.")
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


def preset_names() -> list[str]:
    folder = resources.files("cdtrans") / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """A named recipe. 'auto' is the defaults: the authors' recipe for Office-31, Office-Home and DomainNet."""
    if name == "auto":
        return {}
    if name not in preset_names():
        raise CdtransError(f"Unknown preset '{name}': {nearest(name, ['auto', *preset_names()])}")
    text = (resources.files("cdtrans") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    return values
