"""Export: the chosen model for other programs, as the guide says it is used, and nothing that differs from it."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

import cdtrans
from cdtrans.serving import export as module
from cdtrans.serving import portable
from cdtrans.storage.card_file import read_card, write_card
from support import error_says

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, module.ONNX_PACKAGES)), reason="onnx, onnxscript and onnxruntime are not all installed"
)


def block(beginning: str) -> str:
    """The guide's example that uses this file."""
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if beginning in code]
    return found


def turned(file: Path, folder: Path) -> Path:
    """The same picture as a phone stores it: lying on its side, with a note that says so."""
    image, exif = Image.open(file).convert("RGB"), Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    image.transpose(Image.Transpose.ROTATE_90).save(folder / file.name, exif=exif)
    return folder / file.name


@needs_onnx
def test_the_guides_example_says_what_predict_says(finished, tmp_path: Path) -> None:
    exported = cdtrans.export(finished.run, tmp_path / "flowers.onnx")
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
    said = [line.split() for line in done.stdout.splitlines()]
    assert [label for label, _ in said] == [row["label"] for row in rows]
    for (_, probability), row in zip(said, rows, strict=True):
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_the_guides_example_loads_the_weights_into_timm(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = cdtrans.export(finished.run, tmp_path / "flowers.safetensors")
    assert (exported.format, exported.classes) == ("timm", 3)
    assert exported.difference < 1e-5
    monkeypatch.chdir(tmp_path)
    exec(block("flowers.safetensors") + "print(json.loads(metadata['classes']), model.head.weight.shape[0])", {})
    assert capsys.readouterr().out == "['blue', 'green', 'red'] 3\n"


def test_the_model_asked_for_is_the_one_exported(finished, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.safetensors" for name in ("chosen", "adapted", "source")}
    told = {name: cdtrans.export(finished.run, file, model=name).model for name, file in files.items()}
    assert told["source"] == "source-only"
    assert told["chosen"] == told["adapted"] != "source-only"
    heads = {name: load_file(file)["head.weight"] for name, file in files.items()}
    assert heads["chosen"].equal(heads["adapted"])
    assert not heads["chosen"].equal(heads["source"])
    assert portable.metadata(files["source"].read_bytes())["model"] == "source-only"
    assert portable.metadata(files["adapted"].read_bytes())["model"] == told["adapted"]


def test_a_model_of_the_run_is_not_overwritten(finished) -> None:
    before = (finished.run / "source" / "model.safetensors").read_bytes()
    with error_says(f"'{finished.run / 'source'}'", "folder of a model", "--out"):
        cdtrans.export(finished.run, finished.run / "source" / "model.safetensors")
    assert (finished.run / "source" / "model.safetensors").read_bytes() == before


def test_the_weights_that_a_run_started_from_are_not_overwritten(finished, tmp_path: Path) -> None:
    run, weights = tmp_path / "run", tmp_path / "start.safetensors"
    shutil.copytree(finished.run, run)
    write_card(run / "source", read_card(run / "source") | {"weights": str(weights)})
    weights.write_bytes(b"precious")
    with error_says("start.safetensors", "choose another --out"):
        cdtrans.export(run, weights)
    assert weights.read_bytes() == b"precious"


def test_a_model_too_large_for_onnx_is_told(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "LARGEST_ONNX", 1000)
    with error_says("too large", "ONNX", ".safetensors"):
        cdtrans.export(finished.run, tmp_path / "model.onnx")


def test_by_default_another_model_does_not_replace_the_chosen_one(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights in place of a graph, which takes seconds to write."""
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(portable, "onnx_file", portable.timm_file)
    monkeypatch.setattr(portable, "read_onnx", portable.read_timm)
    run = tmp_path / "run"
    shutil.copytree(finished.run, run)
    assert [cdtrans.export(run).file, cdtrans.export(run, model="source").file] == [
        run / "model.onnx",
        run / "source.onnx",
    ]


def test_a_file_that_differs_is_not_handed_over(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = portable.folded

    def wrong(head):
        weight, bias = real(head)
        return 1.01 * weight, bias

    monkeypatch.setattr(portable, "folded", wrong)
    file = tmp_path / "model.safetensors"
    file.write_text("of before")
    with error_says("differs from the model", "not written"):
        cdtrans.export(finished.run, file)
    assert file.read_text() == "of before"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_without_onnx_it_says_what_to_install(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else object())
    with error_says("onnxscript", "pip install cdtrans[onnx]"):
        cdtrans.export(finished.run, tmp_path / "model.onnx")
    assert cdtrans.export(finished.run, tmp_path / "model.safetensors").format == "timm"


def test_the_promised_json(finished, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "model.safetensors"
    command = [sys.executable, "-m", "cdtrans", "export", str(finished.run), "--out", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {"file", "format", "model", "classes", "bytes", "checked", "difference"}
    assert (told["file"], told["bytes"]) == (str(file), file.stat().st_size)
