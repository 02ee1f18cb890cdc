"""A finished run as a classifier."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import cdtrans
from cdtrans.inputs.stream import cut
from cdtrans.record.layout import RESULT
from cdtrans.record.record import RunRecord
from cdtrans.serving.classifier import Classifier, Prediction, Unreadable, load
from run_folders import refused
from support import devices, raises, small_gpu
from tiny_task import CLASSES, draw


@pytest.fixture(scope="module")
def classifier(finished) -> Classifier:
    return load(finished.run, device="cpu")


@pytest.fixture(scope="module")
def files(finished) -> list[Path]:
    return sorted(finished.task.target.iterdir())


def test_the_public_name(finished, files: list[Path]) -> None:
    first = cdtrans.load(str(finished.run)).predict(files)[0]
    assert isinstance(first, cdtrans.Prediction)
    assert first.path == files[0]
    assert first.label in CLASSES
    assert 1 / 3 < first.probability <= 1
    assert first.top == ((first.label, first.probability),)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cdtrans.nothing


def test_the_labels_are_the_run_s_own_predictions(finished, classifier: Classifier) -> None:
    with open(finished.run / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    predictions = classifier.predict(finished.task.target)
    assert len(rows) == len(predictions) == 21
    assert len({row["label"] for row in rows}) == 3
    for row, prediction in zip(rows, predictions, strict=True):
        assert prediction.path == finished.task.target / row["path"]
        assert prediction.label == row["label"]
        assert prediction.probability == pytest.approx(float(row["probability"]), abs=2e-6)


def test_whatever_the_images_come_in(finished, classifier: Classifier, files: list[Path], tmp_path: Path) -> None:
    expected = classifier.predict(finished.task.target)
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{file}\n" for file in files))
    opened = [Image.open(file) for file in files]
    for images in (str(finished.task.target), files, tuple(map(str, files)), iter(files), listed):
        assert classifier.predict(images) == expected
    assert classifier.predict(files[3])[0].label == expected[3].label
    assert len(classifier.predict(files[3])) == len(classifier.predict(opened[3])) == 1
    from_pil = classifier.predict(opened)
    assert [p.path for p in from_pil] == [None] * 21
    assert [(p.label, p.probability) for p in from_pil] == [(p.label, p.probability) for p in expected]
    assert classifier.predict([opened[0], files[1]])[1].path == files[1]
    assert classifier.predict([]) == []


@pytest.mark.parametrize("batch", [1, 4, 20])
def test_neither_the_order_nor_the_batch_size_changes_a_label(
    classifier: Classifier, files: list[Path], batch: int
) -> None:
    expected = classifier.predict(files)[::-1]
    for one, other in zip(classifier.stream_batches(cut(files[::-1], batch)), expected, strict=True):
        assert isinstance(one, Prediction)
        assert (one.path, one.label) == (other.path, other.label)
        assert one.probability == pytest.approx(other.probability, abs=1e-5)


def test_with_too_little_memory_it_classifies_fewer_at_once(
    finished, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = load(finished.run, device="cpu")
    whole = classifier.predict(files)
    calls = small_gpu(monkeypatch, 6)
    for again in (False, True):
        calls.clear()
        assert [p.label for p in classifier.predict(files)] == [p.label for p in whole]
        assert (max(calls) > 6) != again, "it tries once, and remembers what fitted"
    small_gpu(monkeypatch, 0)
    with raises("gpu-memory"):
        classifier.predict(files)


def test_the_best_classes(classifier: Classifier, files: list[Path]) -> None:
    for prediction in classifier.predict(files, top=3):
        names, values = zip(*prediction.top, strict=True)
        assert set(names) == set(CLASSES)
        assert list(values) == sorted(values, reverse=True)
        assert sum(values) == pytest.approx(1, abs=1e-5)
        assert prediction.top[0] == (prediction.label, prediction.probability)
    assert [len(p.top) for p in classifier.predict(files[:2], top=2)] == [2, 2]
    assert [len(p.top) for p in classifier.predict(files[:2], top=100)] == [3, 3]
    with raises("top-below-1"):
        classifier.predict(files, top=0)


def test_which_model(finished, classifier: Classifier, files: list[Path]) -> None:
    chosen = classifier.predict(files)
    assert load(finished.run, model="adapted", device="cpu").predict(files) == chosen
    source = load(finished.run, model="source", device="cpu")
    assert (source.card.stage, source.card.epoch) == ("source", 3)
    epoch = RunRecord(finished.run).outcome.choice.epoch
    assert (classifier.card.stage, classifier.card.epoch) == ("adaptation", epoch)
    assert [p.label for p in source.predict(files)] != [p.label for p in chosen]
    with raises("argument-choice"):
        load(finished.run, model="adaptd")


def test_the_chosen_model_is_the_one_that_the_run_uses(finished, tmp_path: Path) -> None:
    run = refused(shutil.copytree(finished.run, tmp_path / "run"))
    assert load(run, device="cpu").card.stage == "source"
    (run / RESULT.name).unlink()
    with raises("run-unfinished"):
        load(run)
    with raises("no-run"):
        load(tmp_path / "nowhere")


def test_an_unreadable_image_is_an_error_that_names_it(
    classifier: Classifier, files: list[Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    for images in ([files[0], bad], [tmp_path / "nowhere.png"]):
        with raises("image-unreadable"):
            classifier.predict(images)


def test_a_pil_image_whose_file_is_truncated_is_an_error_too(classifier: Classifier, tmp_path: Path) -> None:
    """PIL reads the pixels only when they are asked for."""
    cut = tmp_path / "cut.png"
    cut.write_bytes(draw(tmp_path / "whole.png", 0, 0).read_bytes()[:200])
    with Image.open(cut) as image, raises("image-unreadable"):
        classifier.predict(image)
    with Image.open(cut) as image:
        (result,) = classifier.stream([image])
    assert isinstance(result, Unreadable)
    assert result.path is None


def test_a_stream_goes_on_after_an_unreadable_image(classifier: Classifier, files: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    results = list(classifier.stream_batches(cut([bad, files[0], bad, files[1], bad], 2)))
    assert [type(r) for r in results] == [Unreadable, Prediction, Unreadable, Prediction, Unreadable]
    assert results[0] == Unreadable(bad, "empty file")
    alone = classifier.predict(files[:2])
    assert [r.label for r in (results[1], results[3])] == [p.label for p in alone]


@pytest.mark.parametrize("device", devices())
def test_the_same_labels_on_every_device(finished, classifier: Classifier, files: list[Path], device: str) -> None:
    here = load(finished.run, device=device).predict(files)
    for one, other in zip(here, classifier.predict(files), strict=True):
        assert one.label == other.label
        assert one.probability == pytest.approx(other.probability, abs=1e-3)


def test_a_batch_is_launched_before_the_results_of_the_last_are_fetched(
    finished, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU has work while Python makes predictions of its results."""
    classifier, launched = load(finished.run, device="cpu"), []
    logits = classifier.device_logits
    monkeypatch.setattr(classifier, "device_logits", lambda pixels: launched.append(len(pixels)) or logits(pixels))
    results = classifier.stream_batches(cut(files[:10], 4))
    launches = [(next(results).path, len(launched)) for _ in range(10)]
    assert launches == [(path, 2 if n < 4 else 3) for n, path in enumerate(files[:10])]
    assert launched == [4, 4, 2]


def test_the_digest_is_of_the_weights_and_the_card(finished) -> None:
    one, again, source = (load(finished.run, model=m, device="cpu") for m in ("chosen", "adapted", "source"))
    warm = Classifier(source.model, replace(source.card, temperature=2.0), source.device)
    scored = load(finished.run, device="cpu", unknown=True)
    assert one.digest() == again.digest()
    digests = {one.digest(), source.digest(), warm.digest(), scored.digest()}
    with torch.no_grad():
        next(again.model.parameters()).view(-1)[0] += 1e-3
    assert len(digests | {again.digest()}) == 5
