"""Settings: recipes, layers, checks and what they become on this machine."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdtrans.config import (
    FIELDS,
    METHOD_FIELDS,
    RESUME_MAY_CHANGE,
    SETTINGS,
    CDTransOptions,
    Config,
    Resolved,
    compose,
    compose_run,
    flat,
    make_config,
    read_recipe,
    read_yaml,
    recipe_names,
)
from cdtrans.run.pipeline import resolve
from support import raises

# docs/method.md, sections 2 and 3: what the authors' scripts say.
AUTHORS = yaml.safe_load("""
    {resize: 256, crop: 224, flip: 0.5, neck: batchnorm, drop_path: 0.1, first_block_residual: true,
    source_epochs: 10, source_lr: 0.008, label_smoothing: 0.1, epochs: 40, lr: 0.008, rebuild_every: 10,
    detach_teacher: false, loss_source: cls, loss_source_target: dtl, loss_target: cls,
    pairing: two_way, center_aware: true, target_class: center, mutual_pairs: twice,
    optimizer: sgd, batch_size: 64, momentum: 0.9, weight_decay: 0.0001, bias_lr_factor: 2.0, warmup_epochs: 10,
    clip_norm: 1.0, seed: 1234, encode_batch: 256,
    backbone: deit_small_distilled_patch16_224.fb_in1k, pretrained: true}
""")


def test_the_defaults_are_the_authors_recipe() -> None:
    config = resolve(compose({"recipe": "authors", "device": "cpu"}))
    values = config.to_dict() | config.method_args
    assert {key: values[key] for key in AUTHORS} == AUTHORS
    assert (config.method, config.method_args) == ("cdtrans", asdict(CDTransOptions())), "every option is written out"
    assert config == resolve(make_config({"device": "cpu"}))


def test_resolving_leaves_no_auto_and_narrows_the_types() -> None:
    resolved = resolve(make_config({"device": "cpu"}))
    assert (resolved.precision, resolved.device, resolved.crop) == ("fp32", "cpu", 224)
    assert [f.name for f in fields(Resolved)] == [f.name for f in fields(Config)]
    given = {"device": "cpu", "method": "mrkld_lrent", "method_args": {"divergence": "0.3"}}
    expected = {"first_portion": 0.2, "last_portion": 0.5, "label_entropy": 0.25, "divergence": 0.3}
    assert resolve(make_config(given)).method_args == expected
    assert resolve(make_config({"device": "cpu", "method": "rpll"})).method_args == {}


def test_paths_become_absolute_so_that_a_run_can_go_on_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config({"source": "s", "target": "../t", "cache": Path("c"), "method": "mine.py:Mine"})
    assert (config.source, config.target) == (str(tmp_path / "s"), str(tmp_path.parent / "t"))
    assert (config.cache, config.root) == (str(tmp_path / "c"), None)
    assert config.method == f"{tmp_path / 'mine.py'}:Mine"
    assert make_config({"method": "dann"}).method == "dann"


# Checks


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"loss_source": "none", "loss_source_target": "none", "loss_target": "none"}, "no-loss"),
        *(({"resize": 100, "crop": 224}, "crop-too-large"), ({"device": "gpu"}, "device-unknown")),
        ({"method_args": "pairing=one_way_source"}, "setting-kind"),
        ({"pairing": "two_way", "method_args": {"pairing": "two_way"}}, "option-twice"),
        *(({name: 1}, "setting-unknown") for name in ("epoch", "sorce_lr", "source-epochs", "zzzzzz", True, 3, None)),
        *(({"method_args": {"zzz": 1}}, "setting-unknown"), ({"optimizer": "sdg"}, "setting-choice")),
        *(({"precision": "int4"}, "setting-choice"), ({"crop": "atuo"}, "setting-choice")),
        *(({"epochs": value}, "setting-kind") for value in (True, 1.5, "many", None, [3], float("nan"))),
        *(({"lr": value}, "setting-kind") for value in (False, "fast", float("nan"), "inf")),
        *(({"pretrained": 1}, "setting-kind"), ({"pretrained": "yes"}, "setting-kind")),
        *(({"backbone": 16}, "setting-kind"), ({"backbone_args": "depth=4"}, "setting-kind")),
        *(({"neck": 3}, "setting-kind"), ({"crop": [224]}, "setting-kind"), ({"pairing": 2}, "setting-kind")),
        *(({"epochs": value}, "setting-range") for value in (0, 10**12, 10**5000)),
        *(({"lr": -1e-9}, "setting-range"), ({"lr": 1e300}, "setting-range"), ({"flip": 1.1}, "setting-range")),
        *(({"seed": value}, "setting-range") for value in (-1, 2**63)),
        *(({"weights": ""}, "setting-empty"), ({"source_model": ""}, "setting-empty")),  # as of an unset variable
        *(({"cache": "a\0b"}, "setting-character"), ({"backbone": "\ud800"}, "setting-character")),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_what_is_refused(values: dict[Any, Any], code: str) -> None:
    with raises(code):
        make_config(values)


def test_a_misspelt_name_is_told_the_nearest() -> None:
    for values, meant in (
        ({"center_awre": 1}, "center_aware"),
        ({"epoch": 1}, "epochs"),
        ({"neck": "batch"}, "batchnorm"),
    ):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            make_config(values)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"method": "rpll", "method_args": {"alpha": 1}}, "setting-unknown"),
        *(({"method": method, "center_aware": False}, "setting-unknown") for method in ("rpll", "dann")),
        ({"method": "instant", "epochs": 2}, "no-epochs"),
        ({"resize": 100}, "crop-too-large"),  # smaller than the backbone's crop
    ],
)
def test_what_is_refused_once_the_method_and_the_backbone_are_known(values: dict[str, Any], code: str) -> None:
    with raises(code):
        resolve(make_config({"device": "cpu"} | values))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_help_a_group_and_a_default_that_passes_its_own_check(name: str) -> None:
    metadata = SETTINGS[name].metadata
    assert metadata["help"].endswith((".", "]."))
    assert metadata["group"]
    default = getattr(CDTransOptions() if name in METHOD_FIELDS else Config(), name)
    config = make_config({name: default})
    assert (config.method_args if name in METHOD_FIELDS else config.to_dict())[name] == default
    assert not set(FIELDS) & set(METHOD_FIELDS)


def test_numbers_take_the_type_of_their_field() -> None:
    assert yaml.safe_load("lr: 1e-3") == {"lr": "1e-3"}, "YAML reads it as text"
    config = make_config({"lr": "1e-3", "epochs": 5.0, "crop": "64", "flip": 1, "seed": 2**53 + 1})
    assert (config.lr, config.epochs, config.crop, config.seed) == (0.001, 5, 64, 2**53 + 1)
    assert [type(value) for value in (config.epochs, config.crop, config.flip)] == [int, int, float]


# Layers


def test_an_option_of_cdtrans_may_stand_beside_the_settings() -> None:
    beside = make_config({"pairing": "one_way_source", "center_aware": False})
    assert beside == make_config({"method_args": {"pairing": "one_way_source", "center_aware": False}})
    assert beside.method_args == {"pairing": "one_way_source", "center_aware": False}
    assert make_config({}).method_args == {}


def test_later_layers_win_option_by_option() -> None:
    config = make_config({"lr": 1.0, "epochs": 0, "seed": 5}, {"lr": 2.0, "epochs": 4}, {"lr": 3.0})
    assert (config.lr, config.epochs, config.seed) == (3.0, 4, 5)
    layers: list[dict[str, Any]] = [
        {"pairing": "one_way_source", "mutual_pairs": "once"},
        {"method_args": {"pairing": "one_way_target", "center_aware": False}},
        {"center_aware": True},
    ]
    expected = {"pairing": "one_way_target", "mutual_pairs": "once", "center_aware": True}
    assert make_config(*layers).method_args == expected
    assert make_config(*layers, {"method": "cdtrans"}).method_args == expected
    other = make_config(*layers, {"method": "dann", "method_args": {"ramp": 5.0}})
    assert (other.method, other.method_args) == ("dann", {"ramp": 5.0}), "options of the method before are dropped"


def test_flat_has_settings_and_options_side_by_side() -> None:
    values = flat(make_config({"lr": 0.1, "pairing": "two_way"}).to_dict())
    assert (values["lr"], values["method.pairing"]) == (0.1, "two_way")
    assert not {"method_args", "pairing"} & set(values), "an option cannot hide a setting of its name"


def test_two_configurations_do_not_share_their_arguments() -> None:
    Config().backbone_args["depth"] = 3
    assert Config().backbone_args == {}


# Recipes


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_opens_with_what_it_is(name: str) -> None:
    values = read_recipe(name)
    config = compose(values)
    read = config.to_dict() | config.method_args
    assert all(read[key] == value or str(read[key]) == str(value) for key, value in values.items())
    assert values["recipe"] in ("best", "authors")
    text = (Path(__file__).parents[1] / "src" / "cdtrans" / "recipes" / f"{name}.yaml").read_text()
    assert text.startswith("# ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("best", "full", "cotraining", 10)),
        ({"method": "cotraining", "effort": "quick"}, ("best", "quick", "cotraining", 4)),
        *(({key: "instant"}, ("best", "instant", "instant", 1)) for key in ("method", "effort")),
        ({"method": "dann"}, ("authors", "full", "dann", 40)),
        ({"method": "dann", "recipe": "best"}, ("best", "full", "dann", 10)),
        ({"pairing": "two_way"}, ("authors", "full", "cdtrans", 40)),
        ({"recipe": "authors"}, ("authors", "full", "cdtrans", 40)),
    ],
)
def test_what_a_method_implies(given: dict[str, Any], expected: tuple[str, str, str, int]) -> None:
    config = compose(given)
    assert (config.recipe, config.effort, config.method, config.epochs) == expected


def test_without_pretrained_weights_the_source_is_trained_on() -> None:
    assert compose().source_fit == "probe"
    assert compose({"pretrained": False}).source_fit == "train"
    assert compose({"pretrained": False, "weights": "w.pth"}).source_fit == "probe"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *(
            ({"recipe": "best", "effort": "instant", "method": m}, "effort-contradicts-method")
            for m in ("dann", "cotraining")
        ),
        *(({"effort": e, "method": "instant"}, "effort-contradicts-method") for e in ("quick", "full")),
        *(({"effort": "quick", "method": "dann"}, "effort-not-here"), ({"effort": "qick"}, "setting-choice")),
        *(({"effort": ["quick"]}, "setting-kind"), ({"recipe": "authors", "effort": "quick"}, "effort-not-here")),
    ],
)
def test_an_effort_that_contradicts_the_rest(given: dict[str, Any], code: str) -> None:
    with raises(code):
        compose(given)


def test_an_effort_wins_over_the_options_of_a_recipe() -> None:
    """The demo's recipe trains twice as long as usual, which is an option of its method."""
    assert compose({"recipe": "demo", "effort": "instant"}).method_args == {}
    assert compose({"recipe": "demo", "effort": "quick"}).method_args["length"] == 0.25
    given = {"effort": "quick", "method_args": {"length": 3}}
    assert compose({"recipe": "demo"}, given).method_args["length"] == 3


def test_a_named_recipe_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("recipe: digits\nout: runs/x\nepochs: 3\nlr: 0.5\n")
    config, out = compose_run("s", None, file, {"lr": 0.25})
    assert (config.recipe, config.epochs, config.lr, out) == ("authors", 3, 0.25, "runs/x")
    assert compose_run(None, None, file, {"recipe": "demo"})[0].neck == "batchnorm", "the later recipe wins"
    for unknown in ("digit", 5, None, ["best"]):
        with raises("recipe-unknown"):
            compose_run(None, None, None, {"recipe": unknown})


def test_only_what_does_not_change_the_result_may_change_on_resume() -> None:
    """A new setting must not slip in here unseen: each of these has been thought about."""
    where = {"device", "cache", "tracker", "encode_batch", "save_every", "compile", "pixels"}
    assert set(RESUME_MAY_CHANGE) <= where | {"guard", "report"}, "which look at what has been computed"
    assert set(RESUME_MAY_CHANGE) <= set(FIELDS)


# YAML


BILLION_LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        *("seed: " + "9" * 5000, "backbone_args: &a {x: *a}", "[" * 5000, "a: 2020-99-99", "x: " + "y" * 10**6),
        *(BILLION_LAUGHS, "!!int x", "? {a: 1}\n: 2", "a: \x07", "5", "[a]", "\xff"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_breaks_its_reader_is_not_valid(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.yaml").write_text(text, encoding="latin-1")
    with raises("settings-not-yaml"):
        read_yaml(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none.yaml"):
        with raises("settings-unreadable"):
            read_yaml(file)


@pytest.mark.parametrize("value", [5, [1], {"a": 1}, 1.5, True, ""])
def test_the_run_folder_in_a_file_is_text(value: Any, tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text(yaml.safe_dump({"out": value}))
    with raises("setting-kind"):
        compose_run(None, None, file, {})
