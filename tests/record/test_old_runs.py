"""Run folders that an earlier version wrote: before there were methods, settings chose what is a method now."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cdtrans.config import make_config, upgraded
from cdtrans.record.run import Run
from cdtrans.record.run_folder import check_folder
from cdtrans.training.state import STATE_FILE, load_state
from support import error_says

OLD: dict[str, Any] = {  # of config.yaml, with the backbone's name as it was given
    "backbone": "vit_tiny_patch16_224",
    "epochs": 40,
    "loss_source": "cls",
    "loss_source_target": "dtl",
    "loss_target": "cls",
    "pairing": "two_way",
    "self_training": "none",
    "center_aware": True,
    "target_class": "center",
    "sampled_pairs": 0,
    "false_share": 0.0,
}
NOW = {"backbone": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "epochs": 40}


def old_run(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(OLD | settings))
    return folder


def test_the_same_settings_are_recognised(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run")
    check_folder(run, make_config(NOW))
    check_folder(run, make_config(NOW, {"pairing": "two_way", "method": "cdtrans"}))


@pytest.mark.parametrize(
    ("recorded", "now", "words"),
    [
        ({}, {"pairing": "one_way_source"}, ["pairing", "two_way", "one_way_source"]),
        ({"pairing": "one_way_target"}, {"pairing": "two_way"}, ["pairing", "one_way_target"]),
        ({"self_training": "rpll"}, {}, ["method", "rpll", "cdtrans"]),
        ({"pairing": "ground_truth", "center_aware": False}, {}, ["method", "ground_truth"]),
        ({"epochs": 4}, {}, ["epochs: 4", "40"]),
        ({"backbone": "vit_small_patch16_224"}, {}, ["backbone", "vit_small"]),
    ],
)
def test_other_settings_are_another_run(
    tmp_path: Path, recorded: dict[str, Any], now: dict[str, Any], words: list[str]
) -> None:
    run = old_run(tmp_path / "run", **recorded)
    with error_says("another run", *words):
        check_folder(run, make_config(NOW, now))


def test_self_training_was_what_is_a_method_now(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run", self_training="mrkld_lrent")
    check_folder(run, make_config(NOW, {"method": "mrkld_lrent"}))


@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.5, "graph": 1.0}])
def test_layer_decay_was_an_option_of_cotraining(options: dict[str, float]) -> None:
    now = upgraded({"method": "cotraining", "method_args": options})
    assert now["layer_decay"] == options.get("layer_decay", 0.75)
    assert "layer_decay" not in now["method_args"]
    assert now["method_args"].get("graph") == options.get("graph")


@pytest.mark.parametrize("method", ["dann", "mstn"])
def test_the_backbone_s_rate_was_an_option_of_two_methods(tmp_path: Path, method: str) -> None:
    (tmp_path / "config.yaml").write_text(f"method: {method}\nmethod_args: {{backbone_rate: 0.1}}\n")
    check_folder(tmp_path, make_config({"method": method, "backbone_rate": 0.1}), resolved=False)
    with error_says("another run", "backbone_rate: 0.1 there, 1.0 now"):
        check_folder(tmp_path, make_config({"method": method}), resolved=False)


@pytest.mark.parametrize("pairing", ["sampled", "sampled_true"])
def test_pairs_made_with_labels_are_a_method_now(pairing: str) -> None:
    assert upgraded(OLD | {"pairing": pairing})["method"] == "sampled_pairs"


def test_before_resolving_a_backbone_s_name_is_not_compared(tmp_path: Path) -> None:
    """Which model a short or deprecated name means is known to timm alone."""
    run = old_run(tmp_path / "run")
    unresolved = make_config({"epochs": 40, "backbone": "vit_tiny_patch16_224_in21k"})
    check_folder(run, unresolved, resolved=False)
    with error_says("another run", "backbone"):
        check_folder(run, unresolved)


@pytest.mark.parametrize("state", [{"stage": "source", "epoch": 1, "model": {}}, [1, 2], {"version": 1}])
def test_a_state_of_another_version_is_refused_in_one_sentence(tmp_path: Path, state: Any) -> None:
    run = Run(tmp_path, None)
    (tmp_path / STATE_FILE).parent.mkdir()
    torch.save(state, tmp_path / STATE_FILE)
    with error_says("another version", "--out"):
        load_state(run)
