from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from cdtrans.cli.options import NOT_FLAGS, help_line
from cdtrans.config import (
    FIELDS,
    HINTS,
    METHOD_FIELDS,
    RESUME_MAY_CHANGE,
    SETTINGS,
    CDTransOptions,
    Config,
    check_options,
    config_of,
    flat,
    layered_config,
    make_config,
    option,
    preset_names,
    read_preset,
    read_yaml,
    settle,
)
from cdtrans.errors import CdtransError
from cdtrans.run.session import resolve
from support import error_says, says

# docs/method.md, sections 2 and 3: what the authors' scripts say.
AUTHORS = {
    "resize": 256,
    "crop": 224,
    "flip": 0.5,
    "neck": "batchnorm",
    "drop_path": 0.1,
    "first_block_residual": True,
    "source_epochs": 10,
    "source_lr": 0.008,
    "label_smoothing": 0.1,
    "epochs": 40,
    "lr": 0.008,
    "rebuild_every": 10,
    "detach_teacher": False,
    "loss_source": "cls",
    "loss_source_target": "dtl",
    "loss_target": "cls",
    "pairing": "two_way",
    "center_aware": True,
    "target_class": "center",
    "mutual_pairs": "twice",
    "optimizer": "sgd",
    "batch_size": 64,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "bias_lr_factor": 2.0,
    "warmup_epochs": 10,
    "clip_norm": 1.0,
    "seed": 1234,
    "encode_batch": 256,
    "backbone": "deit_small_distilled_patch16_224.fb_in1k",
    "pretrained": True,
}


def error_of(**values: Any) -> str:
    with pytest.raises(CdtransError) as caught:
        make_config(values)
    return str(caught.value)


def test_the_defaults_are_the_authors_recipe() -> None:
    config = resolve(make_config({"device": "cpu"}))
    assert config.method == "cdtrans"
    values = config.to_dict() | config.method_args
    assert {key: values[key] for key in AUTHORS} == AUTHORS
    assert config.method_args == asdict(CDTransOptions()), "every option is written out"


def test_every_auto_is_resolved() -> None:
    resolved = resolve(make_config({"device": "cpu"})).to_dict()
    assert resolved["precision"] == "fp32"
    assert resolved["device"] == "cpu"
    assert resolved["crop"] == 224


def test_paths_are_resolved_so_that_a_run_can_go_on_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = resolve(make_config({"source": "s", "target": "../t", "cache": "c", "device": "cpu"}))
    assert resolved.source == str(tmp_path / "s")
    assert resolved.target == str(tmp_path.parent / "t")
    assert resolved.cache == str(tmp_path / "c")
    assert resolved.root is None


def test_a_stage_without_any_loss_is_refused() -> None:
    nothing = {"loss_source": "none", "loss_source_target": "none", "loss_target": "none", "device": "cpu"}
    with error_says("without any loss", "stage 2"):
        make_config(nothing)
    assert resolve(make_config(nothing | {"loss_target": "cls"})).method_args["loss_target"] == "cls"


@pytest.mark.parametrize(
    "setting",
    [
        {"loss_source": "none"},
        {"loss_source_target": "cls"},
        {"loss_target": "none"},
        {"pairing": "one_way_source"},
        {"target_class": "pair"},
        {"center_aware": False},
    ],
)
@pytest.mark.parametrize("method", ["rpll", "mrkld_lrent", "dann"])
def test_what_another_method_would_not_look_at_is_refused(setting: dict[str, Any], method: str) -> None:
    resolve(make_config({"method": method, "device": "cpu"}))
    resolve(make_config({"device": "cpu"}, setting))
    with error_says(f"'{method}'", f"no option '{next(iter(setting))}'"):
        resolve(make_config({"method": method, "device": "cpu"}, setting))


# Options of a method


def test_an_option_of_cdtrans_may_stand_beside_the_settings() -> None:
    beside = make_config({"pairing": "one_way_source", "center_aware": False})
    assert beside == make_config({"method_args": {"pairing": "one_way_source", "center_aware": False}})
    assert beside.method_args == {"pairing": "one_way_source", "center_aware": False}
    assert make_config({}).method_args == {}
    with error_says("'method_args'", "mapping"):
        make_config({"method_args": "pairing=one_way_source"})


def test_later_layers_win_option_by_option() -> None:
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
    assert make_config(*layers, {"method": "rpll"}).method_args == {}


def test_flat_has_settings_and_options_side_by_side() -> None:
    values = flat(make_config({"lr": 0.1, "pairing": "two_way"}).to_dict())
    assert (values["lr"], values["method.pairing"]) == (0.1, "two_way")
    assert not {"method_args", "pairing"} & set(values), "an option cannot hide a setting of its name"


@dataclass(frozen=True)
class Options:
    """As a method declares them."""

    weight: float = option(1.0, "A weight.", minimum=0)
    count: int = option(3, "How often.", minimum=1, maximum=9)
    kind: Literal["soft", "hard"] = option("soft", "Of labels.")
    balanced: bool = option(False, "Whether.")
    trade_off: float | Literal["auto"] = option("auto", "Or a number.", minimum=0)


def test_options_are_checked_as_strictly_as_settings() -> None:
    assert check_options(Options, {}, "mine") == Options()
    given = check_options(Options, {"weight": 2, "count": "4", "kind": "hard", "trade_off": "1e-3"}, "mine")
    assert given == Options(2.0, 4, "hard", trade_off=0.001)
    assert type(given.weight) is float
    assert type(given.count) is int
    for values, words in (
        ({"wieght": 1}, ("'mine'", "no option 'wieght'", "did you mean 'weight'?")),
        ({"zzzzzzzz": 1}, ("'mine'", "no option 'zzzzzzzz'", "weight, count, kind, balanced, trade_off")),
        ({"weight": -1}, ("'weight'", "at least 0")),
        ({"weight": "heavy"}, ("'weight'", "a number", "'heavy'")),
        ({"count": 10}, ("'count'", "at most 9", "10")),
        ({"count": 1.5}, ("'count'", "a whole number")),
        ({"count": True}, ("'count'", "a whole number")),
        ({"kind": "sotf"}, ("'sotf'", "'kind'", "did you mean 'soft'?")),
        ({"balanced": 1}, ("'balanced'", "true or false")),
        ({"trade_off": "atuo"}, ("'atuo'", "did you mean 'auto'?")),
    ):
        with error_says(*words):
            check_options(Options, values, "mine")


def test_every_option_of_a_run_is_written_out_with_its_value() -> None:
    config = resolve(make_config({"device": "cpu", "method": "mrkld_lrent", "method_args": {"divergence": "0.3"}}))
    expected = {"first_portion": 0.2, "last_portion": 0.5, "label_entropy": 0.25, "divergence": 0.3}
    assert config.method_args == expected
    assert resolve(make_config({"device": "cpu", "method": "rpll"})).method_args == {}
    with error_says("'rpll'", "no option 'alpha'"):
        resolve(make_config({"device": "cpu", "method": "rpll", "method_args": {"alpha": 1}}))


def test_a_file_with_a_method_is_resolved_like_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settle(make_config({"method": "mine.py:Mine"})).method == f"{tmp_path / 'mine.py'}:Mine"
    assert settle(make_config({"method": "dann"})).method == "dann"


def test_a_crop_that_does_not_fit_is_refused() -> None:
    with error_says("resized to 100", "cropped to 224", "--resize", "--crop"):
        resolve(make_config({"resize": 100, "device": "cpu"}))


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        make_config({}).lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_help_a_group_and_a_default_that_passes_its_own_check(name: str) -> None:
    metadata = SETTINGS[name].metadata
    assert metadata["help"].endswith((".", "]."))
    assert metadata["group"]
    if name in METHOD_FIELDS:
        default = getattr(CDTransOptions(), name)
        assert make_config({name: default}).method_args == {name: default}
    else:
        default = getattr(Config(), name)
        assert getattr(make_config({name: default}), name) == default
    assert not set(FIELDS) & set(METHOD_FIELDS)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epoch", "epochs"),
        ("sorce_lr", "source_lr"),
        ("batchsize", "batch_size"),
        ("source-epochs", "source_epochs"),
        ("center_awre", "center_aware"),
    ],
)
def test_an_unknown_setting_names_the_nearest_known(key: str, meant: str) -> None:
    assert says(error_of(**{key: 1}), "no setting", f"'{key}'", f"did you mean '{meant}'?")


def test_a_setting_like_no_other_lists_what_there_is() -> None:
    assert says(error_of(zzzzzz=1), "no setting", "'zzzzzz'", "known: source, target, ", "mutual_pairs")


@pytest.mark.parametrize("key", [True, 3, None])
def test_a_key_that_yaml_did_not_read_as_text_is_just_unknown(key: Any) -> None:
    with error_says("no setting", f"'{key}'"):
        make_config({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [("optimizer", "sdg", "sgd"), ("neck", "batch_norm", "batchnorm"), ("mutual_pairs", "twise", "twice")],
)
def test_an_unknown_value_names_the_nearest_known(key: str, value: str, meant: str) -> None:
    assert says(error_of(**{key: value}), f"'{value}'", f"'{key}'", f"did you mean '{meant}'?")


def test_a_value_like_no_other_lists_what_there_is() -> None:
    assert says(error_of(precision="int4"), "'int4'", "'precision'", "auto, fp32, bf16, fp16")


def test_auto_is_the_only_word_for_a_number_that_may_be_auto() -> None:
    assert make_config({"crop": "auto"}).crop == "auto"
    assert says(error_of(crop="atuo"), "'atuo'", "'crop'", "did you mean 'auto'?")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("epochs", True, ["whole number"]),  # bool is not int, though Python says so
        ("epochs", 1.5, ["whole number"]),
        ("epochs", "many", ["whole number"]),
        ("epochs", None, ["whole number"]),
        ("epochs", [3], ["whole number"]),
        ("epochs", float("nan"), ["whole number"]),
        ("lr", False, [" number"]),
        ("lr", "fast", [" number"]),
        ("lr", float("nan"), [" number"]),
        ("lr", "inf", [" number"]),
        ("pretrained", 1, ["true", "false"]),
        ("pretrained", "yes", ["true", "false"]),
        ("backbone", 16, ["text"]),
        ("backbone_args", "depth=4", ["mapping"]),
        ("neck", 3, ["batchnorm", "none"]),
        ("crop", [224], ["whole number", "auto"]),
        ("weights", 7, ["text"]),
        ("center_aware", "yes", ["true", "false"]),
        ("pairing", 2, ["two_way", "one_way_source", "one_way_target"]),
    ],
)
def test_a_value_of_the_wrong_type_says_what_it_must_be(key: str, value: Any, expected: list[str]) -> None:
    assert says(error_of(**{key: value}), f"'{key}'", "must be", *expected, f"not {value!r}")


@pytest.mark.parametrize(
    ("key", "value", "limits"),
    [
        ("epochs", 0, "at least 1"),
        ("batch_size", 1, "at least 2"),
        ("lr", -1e-9, "at least 0"),
        ("lr", 1e300, "at most 1e+30"),
        ("flip", 1.1, "at most 1"),
        ("max_bad", -0.1, "at least 0"),
        ("label_smoothing", 1, "at most 0.99"),
        ("crop", 7, "at least 8"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, "at most 9223372036854775807"),
        ("crop", 30_000, "at most 4096"),
        ("resize", 10_000_000, "at most 4096"),
        ("weight_decay", 1e300, "at most 1000000.0"),
        ("bias_lr_factor", 1e300, "at most 1000000.0"),
        ("epochs", 10**12, "at most 1000000000"),
        ("clip_norm", 1e300, "at most 1e+30"),
        ("clip_norm", 0, "at least 0.001"),
    ],
)
def test_a_value_out_of_range_names_the_range(key: str, value: float, limits: str) -> None:
    assert says(error_of(**{key: value}), f"'{key}'", limits, f"not {value}")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        pytest.param("epochs", 10**5000, "thousands of digits", id="digits"),
        pytest.param("epochs", [10**5000], "thousands of digits", id="list of digits"),
        ("weights", "", "is empty"),  # as of a shell variable that is not set
        ("source_model", "", "is empty"),
        ("effort", ["quick"], "effort"),
        ("cache", "a\0b", "character"),
        ("backbone", "\ud800", "character"),
    ],
)
def test_values_that_are_hard_to_print_or_to_look_up(key: str, value: Any, words: str) -> None:
    with error_says(f"'{key}'", words):
        config_of({}, {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 1), ("flip", 0), ("flip", 1), ("batch_size", 2), ("lr", 0), ("save_every", 0), ("warmup_epochs", 0)],
)
def test_the_ends_of_a_range_belong_to_it(key: str, value: float) -> None:
    assert getattr(make_config({key: value}), key) == value


def test_yaml_reads_1e_3_as_text_and_it_is_a_number_all_the_same() -> None:
    assert yaml.safe_load("lr: 1e-3") == {"lr": "1e-3"}
    config = make_config({"lr": "1e-3", "epochs": "5", "crop": "64"})
    assert (config.lr, config.epochs, config.crop) == (0.001, 5, 64)
    assert type(config.epochs) is int


def test_numbers_take_the_type_of_their_field() -> None:
    config = make_config({"lr": 1, "epochs": 5.0})
    assert type(config.lr) is float
    assert type(config.epochs) is int


def test_a_large_seed_keeps_its_every_digit() -> None:
    assert make_config({"seed": 2**53 + 1}).seed == 2**53 + 1


def test_python_paths_are_text() -> None:
    assert make_config({"weights": Path("a/b.pth")}).weights == "a/b.pth"


@pytest.mark.parametrize("key", ["root", "weights", "cache"])
def test_what_may_be_left_out_may_be_none(key: str) -> None:
    assert getattr(make_config({key: None}), key) is None


def test_later_layers_win() -> None:
    config = make_config({"lr": 1.0, "epochs": 3, "seed": 5}, {"lr": 2.0, "epochs": 4}, {"lr": 3.0})
    assert (config.lr, config.epochs, config.seed) == (3.0, 4, 5)


def test_a_bad_value_is_no_harm_when_a_later_layer_replaces_it() -> None:
    assert make_config({"epochs": 0}, {"epochs": 2}).epochs == 2


def test_two_configurations_do_not_share_their_arguments() -> None:
    Config().backbone_args["depth"] = 3
    assert Config().backbone_args == {}


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    config = make_config({"source": "ä b", "backbone_args": {"depth": 2}, "lr": "1e-5", "pairing": "two_way"})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert make_config(read_yaml(file)) == config


def test_there_are_presets() -> None:
    assert "digits" in preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_opens_with_what_it_is(name: str) -> None:
    values = read_preset(name)
    assert values
    config = config_of({}, values)
    read = config.to_dict() | config.method_args
    assert all(read[key] == value or str(read[key]) == str(value) for key, value in values.items())
    text = (Path(__file__).parents[1] / "src" / "cdtrans" / "recipes" / f"{name}.yaml").read_text()
    assert text.startswith("# ")


def test_the_preset_auto_is_the_defaults() -> None:
    assert read_preset("auto") == {}


def test_an_unknown_preset_names_the_nearest() -> None:
    with error_says("unknown preset", "'digit'", "did you mean 'digits'"):
        read_preset("digit")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold 'key: value' lines"),
        ("- a\n- b\n", "must hold"),
        ("a: [1\n", "not valid YAML"),
        ("7", "must hold"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(CdtransError, match=said) as caught:
        read_yaml(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(b"\xff\xfe\x00lr")
    with pytest.raises(CdtransError, match="not valid YAML"):
        read_yaml(file)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CdtransError, match="cannot be read"):
        read_yaml(tmp_path / name)


def test_only_what_does_not_change_the_result_may_change_on_resume() -> None:
    """A new setting must not slip in here unseen: each of these has been thought about."""
    where = {"device", "cache", "tracker", "encode_batch", "save_every", "compile", "pixels"}
    assert set(RESUME_MAY_CHANGE) <= where | {"guard", "report"}, "which look at what has been computed"
    assert set(RESUME_MAY_CHANGE) <= set(HINTS)


def test_the_guide_has_every_setting_as_the_help_says_it() -> None:
    """On a change: paste what this expects into the last section of docs/guide.md."""
    guide = Path(__file__).parents[1] / "docs" / "guide.md"
    told = guide.read_text(encoding="utf-8").partition("## Every setting\n")[2]
    table = [line for line in told.splitlines() if line.startswith("| ")]
    assert "\n".join(table[1:]) == "\n".join(setting_rows())


def setting_rows() -> list[str]:
    rows = []
    for name, spec in SETTINGS.items():
        if name not in NOT_FLAGS:
            dashed = name.replace("_", "-")
            flag = f"`--{dashed}`, `--no-{dashed}`" if isinstance(spec.default, bool) else f"`--{dashed}`"
            rows.append(f"| {flag} | {spec.metadata['group']} | {help_line(name)} |")
    return rows


def test_the_method_instant_is_the_effort_instant() -> None:
    config = config_of({}, {"method": "instant"})
    assert (config.recipe, config.effort, config.epochs) == ("best", "instant", 1)
    assert config == config_of({}, {"effort": "instant"})


@pytest.mark.parametrize(
    ("effort", "method"), [("instant", "cotraining"), ("instant", "dann"), ("quick", "instant"), ("full", "instant")]
)
def test_an_effort_and_a_method_that_contradict_each_other(effort: str, method: str) -> None:
    with error_says(f"'--effort {effort}'", f"'--method {method}'", "leave one"):
        config_of({}, {"recipe": "best", "effort": effort, "method": method})


@pytest.mark.parametrize(("effort", "method", "options"), [("instant", "instant", {}), ("quick", "cotraining", 0.25)])
def test_an_effort_wins_over_the_options_of_a_preset(effort: str, method: str, options: object) -> None:
    """The demo's preset trains twice as long as usual, which is an option of its method."""
    config, _ = layered_config(None, None, "demo", None, {"effort": effort})
    assert config.method == method
    assert (config.method_args["length"] if options else config.method_args) == options
    assert (
        layered_config(None, None, "demo", None, {"effort": "quick", "method_args": {"length": 3}})[0].method_args[
            "length"
        ]
        == 3
    )


BILLION_LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        *("seed: " + "9" * 5000, "backbone_args: &a {x: *a}", "[" * 5000, "a: 2020-99-99", "x: " + "y" * 10**6),
        *(BILLION_LAUGHS, "!!int x", "? {a: 1}\n: 2", "a: \x07"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_breaks_its_reader_is_not_valid(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.yaml").write_text(text)
    with error_says("not valid YAML", "bad.yaml"):
        read_yaml(file)


@pytest.mark.parametrize("value", [5, [1], {"a": 1}, 1.5, True, ""])
@pytest.mark.parametrize("key", ["out", "preset"])
def test_what_a_file_says_besides_settings_is_text(key: str, value: Any, tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text(yaml.safe_dump({key: value}))
    with error_says(f"'{key}'", "text"):
        layered_config(None, None, None, file, {})
