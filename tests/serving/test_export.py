"""Export: the chosen model for other programs, as the guide says it is used, and nothing that differs from it."""

import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import cdtrans
from cdtrans.errors import CdtransError
from cdtrans.network.weights import build_model, load_model
from cdtrans.record import wording
from cdtrans.record.layout import ANSWERS, MEASURED
from cdtrans.record.model import read_card, save_model, write_card
from cdtrans.record.outcome import Answers
from cdtrans.record.record import RunRecord
from cdtrans.record.run import rewrite
from cdtrans.runtime.screen import Screen
from cdtrans.serving import classifier as classifier_module, export as module, parts, portable
from cdtrans.serving.hub import upload
from cdtrans.serving.portable import crop_share
from run_folders import change
from support import error_says, raises, says

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def block(beginning: str) -> str:
    """The guide's example that uses this file."""
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if beginning in code]
    return example


def turned(file: Path, folder: Path) -> Path:
    """The same picture as a phone stores it: lying on its side, with a note that says so."""
    image, exif = Image.open(file).convert("RGB"), Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    image.transpose(Image.Transpose.ROTATE_90).save(folder / file.name, exif=exif)
    return folder / file.name


@pytest.fixture(scope="module")
def flowers(finished, tmp_path_factory: pytest.TempPathFactory) -> cdtrans.Exported:
    """The finished run as an ONNX file, which takes seconds to write."""
    if not all(map(find_spec, module.ONNX_PACKAGES)):
        pytest.skip("onnx, onnxscript and onnxruntime are not all installed")
    return cdtrans.export(finished.run, tmp_path_factory.mktemp("onnx") / "flowers.onnx")


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports without ONNX, which takes seconds."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def tapped(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run with another model: its head reads two blocks, and it has a temperature."""
    run = tmp_path_factory.mktemp("tapped") / "run"
    shutil.copytree(finished.run, run)
    network, card = load_model(run / "adapted")
    card = dataclasses.replace(card, taps=2, temperature=1.7)
    torch.manual_seed(0)
    model = build_model(card)
    model.backbone.load_state_dict(network.backbone.state_dict())
    nn.init.normal_(model.head.classifier.weight, std=0.5)
    model.head.neck.running_mean.normal_()
    model.head.neck.running_var.uniform_(0.5, 2)
    save_model(run / "adapted", model, card)
    return run


def test_the_guides_example_says_what_predict_says(finished, flowers, tmp_path: Path) -> None:
    exported = dataclasses.replace(flowers, file=Path(shutil.copy(flowers.file, tmp_path)))
    assert exported.file.stat().st_size == exported.bytes
    assert (exported.format, exported.classes, exported.checked) == ("onnx", 3, 8)
    assert 0 <= exported.difference < 1e-5
    with open(finished.run / "predictions.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))[::3]
    example = block("flowers.onnx").replace('"new.jpg"', "path")
    one = "\n".join(f"    {line}" for line in example.splitlines())
    program = f"import sys\nfor path in sys.argv[1:]:\n{one}\n"
    files = [turned(finished.task.target / row["path"], tmp_path) for row in rows]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, files)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split() for line in done.stdout.splitlines()]
    assert [label for label, _ in answers] == [row["label"] for row in rows]
    for (_, probability), row in zip(answers, rows, strict=True):
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_weights_for_timm(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's example loads them; cdtrans reads them as it reads the run."""
    exported = cdtrans.export(finished.run, tmp_path / "flowers.safetensors")
    assert (exported.format, exported.classes) == ("timm", 3)
    assert exported.difference < 1e-5
    monkeypatch.chdir(tmp_path)
    exec(block("flowers.safetensors") + "print(json.loads(metadata['classes']), model.head.weight.shape[0])", {})
    assert capsys.readouterr().out == "['blue', 'green', 'red'] 3\n"
    loaded, classifier = cdtrans.load(exported.file), cdtrans.load(finished.run)
    probabilities = loaded.predict_proba(finished.task.target)
    np.testing.assert_allclose(probabilities, classifier.predict_proba(finished.task.target), atol=1e-5)
    assert repr(loaded) == repr(classifier)
    before = exported.file.read_bytes()
    with pytest.raises(CdtransError, match="input of this command"):
        cdtrans.predict(exported.file, finished.task.target, csv=exported.file)
    assert exported.file.read_bytes() == before


def test_the_model_asked_for_is_the_one_exported(finished, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.safetensors" for name in ("chosen", "adapted", "source")}
    names = {name: cdtrans.export(finished.run, file, model=name).model for name, file in files.items()}
    assert names["source"] == "source-only"
    assert names["chosen"] == names["adapted"] != "source-only"
    heads = {name: load_file(file)["head.weight"] for name, file in files.items()}
    assert heads["chosen"].equal(heads["adapted"])
    assert not heads["chosen"].equal(heads["source"])
    for name, file in files.items():
        assert portable.metadata(file)["model"] == names[name]


def test_neither_a_model_nor_the_weights_of_the_start_are_overwritten(finished, tmp_path: Path) -> None:
    run, weights = shutil.copytree(finished.run, tmp_path / "run"), tmp_path / "start.safetensors"
    write_card(run / "source", dataclasses.replace(read_card(run / "source"), weights=str(weights)))
    weights.write_bytes(b"precious")
    for file in (weights, run / "source" / "model.safetensors"):
        before = file.read_bytes()
        with pytest.raises(CdtransError, match=str(file.parent)):
            cdtrans.export(run, file)
        assert file.read_bytes() == before


def test_by_default_another_model_does_not_replace_the_chosen_one(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights in place of a graph, which takes seconds to write."""
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(portable, "onnx_file", portable.timm_file)
    monkeypatch.setattr(portable, "open_onnx", lambda file: (portable.read_timm(file), None))
    run = shutil.copytree(finished.run, tmp_path / "run")
    assert cdtrans.export(run).file == run / "model.onnx"
    assert cdtrans.export(run, model="source").file == run / "source.onnx"
    monkeypatch.setattr(module, "LARGEST_ONNX", 1000)
    with raises("onnx-too-large"):
        cdtrans.export(run)


def test_a_file_that_differs_is_not_handed_over(
    finished, tapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = portable.one_layer

    def wrong(head):
        weight, bias = real(head)
        return 1.01 * weight, bias

    monkeypatch.setattr(portable, "one_layer", wrong)
    file = tmp_path / "model.safetensors"
    file.write_text("of before")
    with raises("export-differs"):
        cdtrans.export(finished.run, file)
    with raises("export-differs"):
        cdtrans.export(tapped, tmp_path / "hub", to="hub-folder")
    assert file.read_text() == "of before"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_promised_json_without_onnx(finished, tmp_path: Path, no_graph: None) -> None:
    with raises("package-missing") as error:
        cdtrans.export(finished.run, tmp_path / "model.onnx")
    assert says(str(error.value), "pip install onnx", "hub folder")
    assert "cdtrans[" not in str(error.value), "which is on no index"
    file = tmp_path / "new folder" / "model.safetensors"
    values = cdtrans.export(finished.run, file).summary()
    assert values.keys() == {"file", "format", "model", "classes", "bytes", "checked", "difference"}
    assert (values["file"], values["format"], values["bytes"]) == (str(file), "timm", file.stat().st_size)


def test_an_onnx_file_is_read_as_the_run_is(finished, flowers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in parts."""
    monkeypatch.setattr(parts, "PART", 8)
    tables, kept = [], []
    for place in (finished.run, flowers.file):
        file = tmp_path / "p.csv"
        kept.append(cdtrans.predict(place, finished.task.target, csv=file, top=2, abstain=0.5, quiet=True).kept)
        with open(file, newline="") as lines:
            tables.append(list(csv.DictReader(lines)))
    assert kept[0] == kept[1]
    for row, other in zip(*tables, strict=True):
        assert row.keys() == other.keys()
        assert [row[k] for k in ("path", "label", "label_2")] == [other[k] for k in ("path", "label", "label_2")]
        assert float(row["probability"]) == pytest.approx(float(other["probability"]), abs=1e-5)
    loaded, classifier = cdtrans.load(flowers.file), cdtrans.load(finished.run)
    assert (loaded.classes, loaded.name) == (classifier.classes, classifier.name)
    probabilities = loaded.predict_proba(finished.task.target)
    np.testing.assert_allclose(probabilities, classifier.predict_proba(finished.task.target), atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"keep": 0.5}, {"accuracy": 0.9}, {"unknown": 0.5}, {"all_classes": True}, {"model": "source"}]
)
def test_what_needs_a_run_is_refused_for_a_file(tmp_path: Path, options: dict) -> None:
    with raises("needs-a-run"):
        cdtrans.predict(tmp_path / "flowers.onnx", tmp_path, **options)


def test_an_onnx_file_has_no_features_and_no_gpu(flowers, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("onnx-features"):
        cdtrans.load(flowers.file).embed([])
    with raises("onnx-device"):
        cdtrans.load(flowers.file, device="cuda")
    monkeypatch.setattr(classifier_module, "find_spec", lambda name: None)
    with raises("package-missing"):
        cdtrans.load(flowers.file)


def test_files_that_no_export_wrote_are_told(finished, flowers, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    with raises("no-exported-file"):
        cdtrans.load(tmp_path / "nowhere.onnx")
    for broken in (b"", b"no graph", flowers.file.read_bytes()[:-50]):
        (tmp_path / "broken.onnx").write_bytes(broken)
        with raises("run-damaged"):
            cdtrans.load(tmp_path / "broken.onnx")
    with raises("not-exported"):
        cdtrans.load(finished.run / "adapted" / "model.safetensors")
    graph = onnx.load(flowers.file)
    (card,) = [entry for entry in graph.metadata_props if entry.key == "card"]
    card.value = json.dumps(json.loads(card.value) | {"classes": ["one", "two"]})
    onnx.save(graph, tmp_path / "other.onnx")
    with raises("run-damaged"):
        cdtrans.load(tmp_path / "other.onnx")
    del graph.metadata_props[:]
    onnx.save(graph, tmp_path / "foreign.onnx")
    with raises("not-exported"):
        cdtrans.load(tmp_path / "foreign.onnx")


@pytest.fixture
def quick_onnx(flowers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that was written before, where another would be the same."""
    monkeypatch.setattr(portable, "onnx_file", lambda model, card: flowers.file.read_bytes())


def test_timm_loads_a_hub_folder_with_its_transform(finished, quick_onnx, tmp_path: Path) -> None:
    """A picture that is not square, too: it is squashed, as cdtrans does."""
    folder = tmp_path / "a new" / "folder"
    exported = cdtrans.export(finished.run, folder, to="hub-folder")
    assert sorted(os.listdir(folder)) == ["README.md", "config.json", "model.onnx", "model.safetensors"]
    assert os.listdir(folder.parent) == ["folder"]
    assert (exported.format, exported.classes) == ("hub-folder", 3)
    assert exported.bytes == sum(file.stat().st_size for file in folder.iterdir())
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert list(model.pretrained_cfg["label_names"]) == ["blue", "green", "red"]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = [Image.open(file).convert("RGB") for file in sorted(finished.task.target.iterdir())[:6]]
    images.append(images[0].resize((50, 23)))
    with torch.inference_mode():
        probabilities = model(torch.stack([transform(image) for image in images])).softmax(dim=1).numpy()
    expected = cdtrans.load(finished.run).predict_proba(images)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    np.testing.assert_allclose(cdtrans.load(folder).predict_proba(images), expected, atol=1e-5)
    (folder / "model.safetensors").unlink()
    np.testing.assert_allclose(cdtrans.load(folder).predict_proba(images), expected, atol=1e-5)


def test_a_hub_folder_of_several_taps_has_weights_and_the_code_to_run_them(
    finished, tapped: Path, tmp_path: Path, no_graph: None
) -> None:
    folder, target = tmp_path / "hub", finished.task.target
    for _ in range(2):  # also in the place of an earlier one
        assert cdtrans.export(tapped, folder, to="hub-folder").difference < 1e-5
    code = ("modeling_cdtrans.py", "tapped_vit.py")
    assert {*os.listdir(folder)} == {"README.md", "config.json", "model.safetensors", *code}
    loaded, classifier = cdtrans.load(folder), cdtrans.load(tapped)
    np.testing.assert_allclose(loaded.predict_proba(target), classifier.predict_proba(target), atol=1e-5)
    np.testing.assert_allclose(loaded.embed(target), classifier.embed(target), atol=1e-5)
    config = json.loads((folder / "config.json").read_text())
    assert (config["taps"], config["label_names"]) == (2, ["blue", "green", "red"])
    for place in config["auto_map"].values():
        file, _, name = place.partition(".")
        assert f"class {name}(" in (folder / f"{file}.py").read_text()
    with pytest.raises(RuntimeError, match=re.escape("size mismatch for head.weight")):
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    with raises("no-timm-model"):
        cdtrans.export(tapped, tmp_path / "model.safetensors")


@pytest.mark.parametrize("taps", [1, 2])
def test_transformers_loads_a_hub_folder(
    finished, tapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taps: int
) -> None:
    """The same labels and probabilities, also with a temperature and for a picture that is not square."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # no graph
    run, folder = tmp_path / "run", tmp_path / "hub"
    shutil.copytree(finished.run if taps == 1 else tapped, run)
    write_card(run / "adapted", dataclasses.replace(read_card(run / "adapted"), temperature=1.7))
    cdtrans.export(run, folder, to="hub-folder")
    images = [Image.open(file).convert("RGB") for file in sorted(finished.task.target.iterdir())[:6]]
    images.append(images[0].resize((50, 23)))
    ours = cdtrans.load(run)
    expected = ours.predict_proba(images)
    trust = {"trust_remote_code": True} if taps > 1 else {}
    pipeline = transformers.pipeline("image-classification", model=str(folder), device="cpu", **trust)
    for answers, row in zip(pipeline(images, top_k=3, batch_size=4), expected, strict=True):
        scores = {answer["label"]: answer["score"] for answer in answers}
        assert [scores[name] for name in ours.classes_] == pytest.approx(row.tolist(), abs=1e-5)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, **trust).eval()
    inputs = transformers.AutoImageProcessor.from_pretrained(folder, **trust)(images, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs, labels=torch.zeros(7, dtype=torch.long))
    np.testing.assert_allclose(output.logits.softmax(dim=1).numpy(), expected, atol=1e-5)
    assert output.loss.item() == pytest.approx(-np.log(expected[:, 0]).mean(), abs=1e-4)


def test_timm_resizes_to_the_size_of_the_run() -> None:
    for resize in range(20, 520):
        for crop in {16, 20, resize - 7, resize * 7 // 8, resize}:
            assert math.floor(crop / crop_share(crop, resize)) == resize


def test_the_model_card_says_what_matters_and_no_path(finished, tmp_path: Path, no_graph: None) -> None:
    run, folder = tmp_path / "run", tmp_path / "hub"
    shutil.copytree(finished.run, run)
    (run / MEASURED.name).unlink(missing_ok=True)  # an earlier test's would replace the estimate
    backbone = read_card(run / "adapted").backbone
    write_card(run / "adapted", dataclasses.replace(read_card(run / "adapted"), weights=backbone, temperature=1.25))
    outcome = RunRecord(run).outcome
    cdtrans.export(run, folder, to="hub-folder")
    card = (folder / "README.md").read_text()
    for words in (
        *("license: apache-2.0\n", "'source', 24 labelled images", "'target', 21 unlabelled images", "method cdtrans"),
        *(backbone, "licensed apache-2.0", wording.opening(outcome), wording.estimate(outcome, "adapted")),
        *("temperature 1.250", "calibrated to that estimate"),
        *("recipe authors", 'timm.create_model("local-dir:FOLDER"', "| green | 8 |"),
    ):
        assert words in card
    for file in folder.iterdir():
        assert str(finished.task.folder).encode() not in file.read_bytes()
        assert str(tmp_path).encode() not in file.read_bytes()
    cdtrans.export(run, folder, to="hub-folder", model="source")
    card = (folder / "README.md").read_text()
    assert "source-only (not adapted)" in card
    assert "The probabilities are not calibrated on the target" in card
    assert "license:" not in card, "it was trained from scratch"


def test_the_model_card_says_what_calibrates_and_what_labels_show(finished, tmp_path: Path, no_graph: None) -> None:
    run, folder = shutil.copytree(finished.run, tmp_path / "run"), tmp_path / "hub"
    change(run, estimates={"source": None, "adapted": None})
    cdtrans.export(run, folder, to="hub-folder")
    assert "The probabilities are not calibrated on the target" in (folder / "README.md").read_text()
    rewrite(run, ANSWERS, Answers("", True, None, ()))
    measured = cdtrans.evaluate(run, finished.answers, device="cpu", quiet=True)
    cdtrans.export(run, folder, to="hub-folder")
    card = (folder / "README.md").read_text()
    assert "calibrated with the labels of some target images" in card
    assert wording.accuracy(RunRecord(run).outcome, measured, run).headline in card
    assert wording.estimate(RunRecord(run).outcome, "adapted") not in card


def test_the_model_card_offers_only_what_can_load_the_model(
    finished, tapped: Path, tmp_path: Path, no_graph: None
) -> None:
    pipeline = 'transformers.pipeline("image-classification", model="FOLDER"'
    for run, library, words, absent in (
        (finished.run, "timm", ("timm.create_model(", f"{pipeline})"), ("trust_remote_code", "custom_code")),
        (tapped, "transformers", (f"{pipeline}, trust_remote_code=True)", "read them first"), ("timm.create_model(",)),
    ):
        cdtrans.export(run, tmp_path / library, to="hub-folder")
        card = (tmp_path / library / "README.md").read_text()
        assert f"library_name: {library}\n" in card
        assert f"cdtrans, {library}" in next(line for line in card.splitlines() if line.startswith("tags: "))
        assert all(word in card for word in ('cdtrans.load("FOLDER")', *words))
        assert not any(word in card for word in (*absent, "model.onnx"))


def test_a_model_that_timm_cannot_hold_has_a_graph_and_a_card(
    finished, quick_onnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(portable, "why_no_weights", lambda model, card: "It is odd")
    cdtrans.export(finished.run, tmp_path / "hub", to="hub-folder", screen=Screen(quiet=True))
    assert sorted(os.listdir(tmp_path / "hub")) == ["README.md", "model.onnx"]
    assert "does not include config.json and model.safetensors: It is odd." in capsys.readouterr().err
    assert "timm" not in (tmp_path / "hub" / "README.md").read_text()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with raises("nothing-to-export"):
        cdtrans.export(finished.run, tmp_path / "hub", to="hub-folder")
    assert sorted(os.listdir(tmp_path / "hub")) == ["README.md", "model.onnx"], "as it was"
    assert os.listdir(tmp_path) == ["hub"]


def test_a_hub_folder_replaces_no_other(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.txt").touch()
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "model.safetensors").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder in (tmp_path, tmp_path / "backbone", "."):
        with raises("folder-not-replaced"):
            cdtrans.export(finished.run, folder, to="hub-folder")
    with raises("argument-choice"):
        cdtrans.export(finished.run, tmp_path / "hub", to="hub-foldr")


@pytest.mark.parametrize("kept", [0, 1])
def test_a_hub_folder_whose_replacement_was_killed_can_be_written_again(
    finished, tmp_path: Path, no_graph: None, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Killed before the older folder is moved away, or after it."""
    folder, moved = tmp_path / "hub", []
    cdtrans.export(finished.run, folder, to="hub-folder")
    replace = os.replace

    def killed(draft: Path, final: Path) -> None:
        if "hub" in Path(final).parts[-3:] or "hub" in Path(draft).parts[-3:]:
            if len(moved) == kept:
                raise KeyboardInterrupt
            moved.append(draft)
        replace(draft, final)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            cdtrans.export(finished.run, folder, to="hub-folder")
    assert folder.exists() == (kept == 0)
    cdtrans.export(finished.run, folder, to="hub-folder")
    assert {*os.listdir(folder)} == {"README.md", "config.json", "model.safetensors"}
    assert os.listdir(tmp_path) == ["hub"]


def answer(status: int) -> Any:
    """A response of the hub, by whatever library huggingface_hub talks to it."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


class Hub:
    """Stands in for the Hugging Face hub: repositories are folders."""

    def __init__(self, place: Path) -> None:
        self.place, self.private = place, False

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.private = private
        (self.place / name).mkdir(parents=True)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        shutil.copytree(folder_path, self.place / repo_id, dirs_exist_ok=True)

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        if revision or not (self.place / name).exists():
            raise (RevisionNotFoundError if revision else RepositoryNotFoundError)("no", response=answer(404))
        return str(self.place / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_model_of_several_taps_that_is_pushed_can_be_loaded(finished, tapped: Path, hub: Hub, no_graph: None) -> None:
    cdtrans.push(tapped, "ada/flowers")
    readme = (hub.place / "ada" / "flowers" / "README.md").read_text()
    assert 'pipeline("image-classification", model="ada/flowers", trust_remote_code=True)' in readme
    predicted = cdtrans.predict("hf://ada/flowers", finished.task.target).predictions
    expected = cdtrans.load(tapped).predict(finished.task.target)
    assert [(p.path, p.label) for p in predicted] == [(p.path, p.label) for p in expected]


def test_what_is_pushed_can_be_loaded(finished, quick_onnx, hub: Hub) -> None:
    pushed = cdtrans.push(finished.run, "ada/flowers", private=True)
    assert pushed.summary().keys() == {"name", "address", "model", "bytes"}
    assert pushed.address == "https://huggingface.co/ada/flowers"
    assert hub.private
    readme = (hub.place / "ada" / "flowers" / "README.md").read_text()
    assert 'cdtrans.load("hf://ada/flowers")' in readme
    assert 'timm.create_model("hf-hub:ada/flowers"' in readme
    files, expected = finished.task.target, cdtrans.load(finished.run).predict_proba(finished.task.target)
    np.testing.assert_allclose(cdtrans.load("hf://ada/flowers").predict_proba(files), expected, atol=1e-5)
    assert cdtrans.predict("hf://ada/flowers", files).images == len(expected)


@pytest.mark.parametrize("name", ["flowers", "a/b/c", "a b/c", "/c", "../c", ""])
def test_a_wrong_name_is_told_before_any_work(finished, hub: Hub, name: str) -> None:
    with raises("hub-name"):
        cdtrans.push(finished.run, name)
    with raises("hub-name"):
        cdtrans.load(f"hf://{name}")
    assert not hub.place.exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("no route"), "connect to the network"),
        (LocalTokenNotFoundError("no token"), "hf auth login"),
        (HfHubHTTPError("no", response=answer(403)), "permitted"),
        (HfHubHTTPError("no", response=answer(500)), "500"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(tmp_path: Path, hub: Hub, error: Exception, words: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    hub.create_repo = refuse  # type: ignore[method-assign]
    with error_says("'ada/flowers' could not be uploaded", words):
        upload(tmp_path, "ada/flowers", private=False)


def test_what_the_hub_does_not_have_is_told(hub: Hub) -> None:
    with error_says("'ada/flowers' could not be downloaded", "no such repository"):
        cdtrans.load("hf://ada/flowers")
    with error_says("'ada/flowers' could not be downloaded", "no such revision"):
        cdtrans.load("hf://ada/flowers@old")
    (hub.place / "ada" / "empty").mkdir(parents=True)
    with raises("no-model"):
        cdtrans.load("hf://ada/empty")
