"""A saved model and the card beside it."""

import errno
import json
import os
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cdtrans.config import make_config
from cdtrans.errors import CdtransError
from cdtrans.network.network import Network
from cdtrans.network.weights import build_model, load_model, make_card
from cdtrans.record import model as record_model
from cdtrans.record.layout import CARD, WEIGHTS
from cdtrans.record.model import Card, save_model, set_temperature
from support import error_says, raises
from tiny_task import TINY

CLASSES = ("Äpfel", "a b", "[red]")


@pytest.fixture
def card() -> Card:
    return make_card(make_config(TINY, {"precision": "fp32"}), CLASSES, stage="source", epoch=3)


@pytest.fixture
def model(card: Card) -> Network:
    torch.manual_seed(0)
    model = build_model(card)
    model.train().encode(torch.randn(4, 3, 16, 16))  # running statistics that are not the initial ones
    return model


@pytest.fixture
def saved(tmp_path: Path, model: Network, card: Card) -> Path:
    save_model(tmp_path / "source", model, card)
    return tmp_path / "source"


def test_round_trip_to_the_bit(saved: Path, model: Network, card: Card) -> None:
    again, its_card = load_model(saved)
    assert its_card == card
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.eval().encode(images).logits, again.encode(images).logits)


def test_two_files_and_no_draft(saved: Path) -> None:
    assert {p.name for p in saved.iterdir()} == {WEIGHTS, CARD}
    assert [p.name for p in saved.parent.iterdir() if p.name != "cache"] == ["source"]


def test_the_card_says_how_to_run_the_model(saved: Path) -> None:
    card = json.loads((saved / CARD).read_text(encoding="utf-8"))
    assert card["classes"] == list(CLASSES)
    assert card["backbone"] == "vit_tiny_patch16_224"
    assert (card["resize"], card["crop"]) == (18, 16)
    assert card["mean"] == card["std"] == [0.5, 0.5, 0.5]  # what augreg's weights expect
    assert card["weights"] == "none: trained from scratch"
    assert (card["stage"], card["epoch"]) == ("source", 3)
    assert card["versions"] == {name: version(name) for name in ("torch", "timm")}


def test_the_card_follows_the_backbone_and_its_weights() -> None:
    config = make_config(TINY, {"backbone": "deit_tiny_patch16_224", "weights": "/somewhere/deit.pth"})
    card = make_card(config, CLASSES, stage="source", epoch=1)
    assert card.mean == pytest.approx((0.485, 0.456, 0.406))
    assert card.std == pytest.approx((0.229, 0.224, 0.225))
    assert card.weights == "/somewhere/deit.pth"
    assert make_card(make_config(TINY, {"precision": "bf16"}), CLASSES, stage="source", epoch=1).precision == "bf16"
    pretrained = make_card(make_config(TINY, {"pretrained": True}), CLASSES, stage="source", epoch=1)
    assert pretrained.weights == "vit_tiny_patch16_224"


@pytest.mark.parametrize("change", [{"neck": "none"}, {"crop": 16}, {"temperature": 2.5}])
def test_the_switches_travel(tmp_path: Path, card: Card, change: dict) -> None:
    other = replace(card, **change)
    save_model(tmp_path / "adapted", build_model(other), other)
    model, its_card = load_model(tmp_path / "adapted")
    assert its_card == other
    assert (model.head.classifier.bias is not None) == (other.neck == "none")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-30, 10**400, True, "2", None, [1.0]])
def test_a_temperature_that_is_none_is_refused(saved: Path, value: Any) -> None:
    before = (saved / CARD).read_bytes()
    with raises("temperature"):
        set_temperature(saved, value)
    assert (saved / CARD).read_bytes() == before
    (saved / CARD).write_text(json.dumps(json.loads(before) | {"temperature": value}))
    with raises("run-damaged"):
        load_model(saved)


def test_the_temperature_changes_and_nothing_else(saved: Path, card: Card) -> None:
    untouched = (saved / WEIGHTS).stat()
    set_temperature(saved, 2)
    assert load_model(saved)[1] == replace(card, temperature=2.0)
    assert (saved / WEIGHTS).stat() == untouched


def test_a_newer_model_replaces_an_older_whole(saved: Path, model: Network, card: Card) -> None:
    (saved / "left-over.txt").write_text("of the older one")
    model.head.classifier.weight.data.fill_(7)
    save_model(saved, model, replace(card, epoch=9))
    again, its_card = load_model(saved)
    assert its_card.epoch == 9
    assert (again.head.classifier.weight == 7).all()
    assert {p.name for p in saved.iterdir()} == {WEIGHTS, CARD}


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
def test_a_full_disk_leaves_the_older_model_whole(
    saved: Path, model: Network, card: Card, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    fsync, written = os.fsync, []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == [WEIGHTS, CARD].index(name) + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    model.head.classifier.weight.data.fill_(7)
    with pytest.raises(CdtransError, match="disk is full"):
        save_model(saved, model, replace(card, epoch=9))
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_a_kill_never_leaves_one_model_s_weights_beside_the_other_s_card(
    saved: Path, model: Network, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    replace_folder = record_model.replace_folder

    def die(draft: Path, final: Path) -> None:
        assert {p.name for p in draft.iterdir()} == {WEIGHTS, CARD}  # whole before it takes the place
        raise Killed

    monkeypatch.setattr(record_model, "replace_folder", die)
    with pytest.raises(Killed):
        save_model(saved, model, replace(card, epoch=9))
    assert load_model(saved)[1].epoch == 3
    monkeypatch.setattr(record_model, "replace_folder", replace_folder)
    save_model(saved, model, replace(card, epoch=9))  # the draft that the kill left is in nobody's way
    assert load_model(saved)[1].epoch == 9
    assert [p.name for p in saved.parent.iterdir() if p.name != "cache"] == ["source"]


def test_a_folder_without_a_card_is_no_finished_model(saved: Path) -> None:
    (saved / CARD).unlink()
    with pytest.raises(CdtransError, match="holds no finished model"):
        load_model(saved)


def test_a_finished_model_that_has_lost_its_weights_is_not_called_unfinished(saved: Path) -> None:
    """The advice to run 'adapt' to its end would come from that very command, for ever."""
    (saved / WEIGHTS).unlink()
    with error_says(str(saved), "lost its weights", "another --out"):
        load_model(saved)


def test_a_file_that_may_not_be_read_is_not_called_missing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise FileNotFoundError(2, "Permission denied")  # as safetensors says it

    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    with error_says(WEIGHTS, "cannot be read", "Permission denied"):
        load_model(saved)


def test_weights_that_are_not_finite_are_damaged(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors["backbone.norm.weight"][3] = torch.nan
    save_file(tensors, saved / WEIGHTS)
    with error_says(WEIGHTS, "damaged", "not finite"):
        load_model(saved)


def test_no_folder_is_no_finished_model(tmp_path: Path) -> None:
    with pytest.raises(CdtransError, match="no finished model"):
        load_model(tmp_path / "nothing")


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_file_is_an_error_that_names_the_folder(saved: Path, name: str, damage: str) -> None:
    content = (saved / name).read_bytes()
    bad = {"cut": content[: len(content) // 2], "empty": b"", "noise": b"\xff\xfe" * 50}[damage]
    (saved / name).write_bytes(bad)
    with pytest.raises(CdtransError, match="damaged") as error:
        load_model(saved)
    assert str(saved) in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("crop"),
        lambda values: values.pop("classes"),
        lambda values: values.update(surprise=1),
        lambda values: values.update(classes=["one", "two"]),  # the weights are for three
        lambda values: values.update(classes=None),
        lambda values: values.update(resize=-3),
        lambda values: values.update(resize=values["crop"] - 1),
        lambda values: values.update(resize=10**9),
        lambda values: values.update(crop=15.5),
        lambda values: values.update(std=[0, 1, 1]),
        lambda values: values.update(mean=[0.5]),
        lambda values: values.update(backbone_args={"img_size": "x"}),
        lambda values: values.update(classes=[1, 2, 3]),
        lambda values: values.update(precision="auto"),
        lambda values: values.update(epoch=float("nan")),
    ],
)
def test_a_card_that_does_not_fit_is_an_error(saved: Path, damage) -> None:
    values = json.loads((saved / CARD).read_text(encoding="utf-8"))
    damage(values)
    (saved / CARD).write_text(json.dumps(values))
    with pytest.raises(CdtransError, match="damaged"):
        load_model(saved)


def test_weights_that_lack_a_tensor_are_an_error(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors.pop("backbone.norm.weight")
    save_file(tensors, saved / WEIGHTS)
    with pytest.raises(CdtransError, match=r"damaged.*backbone\.norm\.weight"):
        load_model(saved)


def test_a_card_is_not_a_list(saved: Path) -> None:
    (saved / CARD).write_text("[]")
    with pytest.raises(CdtransError, match="damaged"):
        load_model(saved)


def test_a_moved_model_still_loads(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved, tmp_path / "elsewhere")
    assert load_model(tmp_path / "elsewhere")[1].classes == CLASSES
