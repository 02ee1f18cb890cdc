"""`adapt` without flags, its efforts, and small and odd data: whole runs with weights that are there to be probed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

import cdtrans
from cdtrans.serving.export import export
from cdtrans.sklearn import InstantClassifier
from tiny_task import TINY, draw, log_lines, make_source, make_target

pytestmark = pytest.mark.slow

OF_RUN = ("backbone", "backbone_args", "crop", "resize", "device", "report")  # nothing of a recipe
SHORT = {"method_args": {"length": 0.02}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where everything is, and a file of weights: `adapt` then needs no other word."""
    folder = tmp_path_factory.mktemp("recipe")
    torch.manual_seed(0)
    vit = timm.create_model(TINY["backbone"], img_size=TINY["crop"], num_classes=0, **TINY["backbone_args"])
    save_file(vit.state_dict(), folder / "weights.safetensors")
    return {key: TINY[key] for key in OF_RUN} | {
        "weights": folder / "weights.safetensors",
        "source": make_source(folder / "source"),
        "target": make_target(folder / "target"),
        "cache": folder / "cache",
        "quiet": True,
    }


def adapted(settings: dict[str, Any], out: Path, **more: Any) -> Path:
    return cdtrans.adapt(**settings | more, out=out).run


def config_of(run: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return config


def backbone(model: Path) -> dict[str, torch.Tensor]:
    weights = load_file(model / "model.safetensors")
    return {key: value for key, value in weights.items() if key.startswith("backbone.")}


def test_without_flags_it_is_the_best_recipe_on_a_probed_backbone(settings: dict[str, Any], tmp_path: Path) -> None:
    run = adapted(settings, tmp_path / "run", **SHORT)
    config = config_of(run)
    assert (config["recipe"], config["effort"], config["method"]) == ("best", "full", "cotraining")
    assert (config["source_fit"], config["optimizer"], config["epochs"]) == ("probe", "adamw", 10)
    given = load_file(settings["weights"])
    for key, value in backbone(run / "source").items():
        assert torch.equal(value, given[key.removeprefix("backbone.")]), "stage 1 fits the head alone"
    assert any(not torch.equal(value, backbone(run / "source")[key]) for key, value in backbone(run / "last").items())
    losses = next(line for line in log_lines(run) if line["event"] == "epoch")
    assert {"loss_source", "loss_target", "loss_information"} <= losses.keys()
    assert sum(line["event"] == "pairs" for line in log_lines(run)) == 10, "new labels in every round"


def test_instant_trains_nothing_and_hands_over_an_ordinary_model(settings: dict[str, Any], tmp_path: Path) -> None:
    run = adapted(settings, tmp_path / "run", effort="instant", report=True)
    for model in ("source", "adapted", "last"):
        for key, value in backbone(run / model).items():
            assert torch.equal(value, load_file(settings["weights"])[key.removeprefix("backbone.")])
    assert not [line for line in log_lines(run) if line["event"] == "epoch"]
    assert "<html" in (run / "report.html").read_text(encoding="utf-8")
    classifier = cdtrans.load(run, device="cpu")
    predictions = classifier.predict(settings["target"])
    assert len(predictions) == 21
    source, target = (classifier.embed(settings[domain]) for domain in ("source", "target"))
    marked = [p.parent.name for p in sorted(settings["source"].rglob("*.png"))] + [None] * len(target)
    alone = InstantClassifier(leading=classifier.model.leading).fit(np.concatenate([source, target]), marked)
    assert alone.predict(target).tolist() == [p.label for p in predictions], "the same for scikit-learn"
    assert export(run, tmp_path / "model.onnx").difference < 1e-4


def test_instant_sees_every_image_once(settings: dict[str, Any], tmp_path: Path, monkeypatch) -> None:
    """Encoding is nearly all of its cost."""
    seen, real = [], cdtrans.network.network.Network.features

    def features(self, images):
        seen.append(len(images))
        return real(self, images)

    monkeypatch.setattr("cdtrans.network.network.Network.features", features)
    adapted(settings, tmp_path / "run", effort="instant")
    assert sum(seen) == 24 + 21


@pytest.mark.parametrize("effort", ["instant", "full"])
@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param([50, 1, 1], 20, id="a source of 50 to 1"), pytest.param([2, 2, 2], 2, id="two target images")],
)
def test_small_and_odd_data_need_no_flag(
    settings: dict[str, Any], tmp_path: Path, source: list[int], target: int, effort: str
) -> None:
    for kind, count in enumerate(source):
        for n in range(count):
            draw(tmp_path / "source" / f"class{kind}" / f"{n}.png", kind, seed=n)
    for n in range(target):
        draw(tmp_path / "target" / f"{n}.png", n % len(source), seed=100 + n, shift=0.5)
    places = {"source": tmp_path / "source", "target": tmp_path / "target", "cache": tmp_path / "cache"}
    more = SHORT if effort == "full" else {}
    run = adapted(settings | places, tmp_path / "run", effort=effort, guard=False, **more)
    assert len((run / "predictions.csv").read_text().splitlines()) == 1 + target
