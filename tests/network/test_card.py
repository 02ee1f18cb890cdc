"""A saved network and the card beside it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cdtrans.record.model as model_module
from cdtrans.config import make_config
from cdtrans.network.network import Network
from cdtrans.network.weights import build_model, load_model, make_card
from cdtrans.record.layout import CARD, WEIGHTS
from cdtrans.record.model import Card, save_model
from support import raises
from tiny_task import TINY

CLASSES = ("Äpfel", "a b", "[red]")


def card_of(**settings: object) -> Card:
    return make_card(make_config(TINY, {"precision": "fp32"} | settings), CLASSES, stage="source", epoch=3)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Network:
    torch.manual_seed(0)
    model = build_model(card_of())
    model.train().encode(torch.randn(4, 3, 16, 16))  # running statistics that are not the initial ones
    return model


@pytest.fixture
def saved(tmp_path: Path, model: Network) -> Path:
    save_model(tmp_path / "source", model, card_of())
    return tmp_path / "source"


def test_round_trip_to_the_bit(saved: Path, model: Network, tmp_path: Path) -> None:
    assert {p.name for p in saved.iterdir()} == {WEIGHTS, CARD}
    assert [p.name for p in saved.parent.iterdir() if p.name != "cache"] == ["source"], "no draft is left"
    shutil.move(saved, tmp_path / "elsewhere")
    again, card = load_model(tmp_path / "elsewhere")
    assert card == card_of()
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.eval().encode(images).logits, again.encode(images).logits)


def test_the_card_says_how_to_run_the_model_and_follows_the_settings(saved: Path) -> None:
    card = json.loads((saved / CARD).read_text(encoding="utf-8"))
    assert card["classes"] == list(CLASSES)
    assert card["backbone"] == "vit_tiny_patch16_224"
    assert (card["resize"], card["crop"]) == (18, 16)
    assert card["mean"] == card["std"] == [0.5, 0.5, 0.5]  # as augreg's weights expect
    assert card["weights"] == "none: trained from scratch"
    assert (card["stage"], card["epoch"]) == ("source", 3)
    assert card["versions"] == {name: version(name) for name in ("torch", "timm")}
    deit = card_of(backbone="deit_tiny_patch16_224", weights="/somewhere/deit.pth")
    assert deit.mean == pytest.approx((0.485, 0.456, 0.406))
    assert deit.std == pytest.approx((0.229, 0.224, 0.225))
    assert deit.weights == "/somewhere/deit.pth"
    assert card_of(precision="bf16").precision == "bf16"
    assert card_of(pretrained=True).weights == "vit_tiny_patch16_224"


def test_a_kill_never_leaves_one_model_s_weights_beside_the_other_s_card(
    saved: Path, model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(draft: Path, final: Path) -> None:
        assert {p.name for p in draft.iterdir()} == {WEIGHTS, CARD}  # whole before it takes the place
        raise Killed

    with monkeypatch.context() as m:
        m.setattr(model_module, "replace_folder", die)
        with pytest.raises(Killed):
            save_model(saved, model, replace(card_of(), epoch=9))
    assert load_model(saved)[1].epoch == 3
    (saved / "left-over.txt").write_text("of the older one")
    save_model(saved, model, replace(card_of(), epoch=9))  # the draft that the kill left is in nobody's way
    assert load_model(saved)[1].epoch == 9
    assert {p.name for p in saved.iterdir()} == {WEIGHTS, CARD}
    assert [p.name for p in saved.parent.iterdir() if p.name != "cache"] == ["source"]


def test_a_lost_file(saved: Path, tmp_path: Path) -> None:
    with raises("model-missing"):
        load_model(tmp_path / "nothing")
    for name in (WEIGHTS, CARD):
        (saved / name).unlink()
        with raises("model-missing") as error:
            load_model(saved)
        assert str(saved) in str(error.value)


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda _: b"", lambda _: b"\xff\xfe" * 50]
)
def test_a_damaged_file_is_an_error_that_names_the_folder(
    saved: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    (saved / name).write_bytes(damage((saved / name).read_bytes()))
    with raises("run-damaged") as error:
        load_model(saved)
    assert str(saved) in str(error.value)


@pytest.mark.parametrize("change", ["not finite", "missing"])
def test_damaged_weights(saved: Path, change: str) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors["backbone.norm.weight"][3] = torch.nan
    if change == "missing":
        del tensors["backbone.norm.weight"]
    save_file(tensors, saved / WEIGHTS)
    with raises("run-damaged"):
        load_model(saved)


@pytest.mark.parametrize(
    "change",
    [
        *({"surprise": 1}, {"classes": ["one", "two"]}, {"classes": None}, {"classes": [1, 2, 3]}, {"resize": -3}),
        *({"resize": 15}, {"resize": 10**9}, {"crop": 15.5}, {"std": [0, 1, 1]}, {"mean": [0.5]}, {"temperature": -1}),
        *({"backbone_args": {"img_size": "x"}}, {"precision": "auto"}, {"epoch": float("nan")}, "crop", "classes", []),
    ],
    ids=str,
)  # fmt: skip
def test_a_card_that_does_not_fit_is_an_error(saved: Path, change: Any) -> None:
    values = json.loads((saved / CARD).read_text(encoding="utf-8"))
    if isinstance(change, str):
        del values[change]
    (saved / CARD).write_text(json.dumps(values | change if isinstance(change, dict) else change or values))
    if change == []:
        (saved / CARD).write_text("[]")
    with raises("run-damaged"):
        load_model(saved)
