"""docs/notebook.ipynb runs from top to bottom."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
FEWER_IMAGES = 800
SHORTER = {  # replaces the notebook's settings: a smaller network, trained just long enough to gain
    "source_epochs": 9,
    "epochs": 1,
    "batch_size": 32,
    "source_lr": 0.006,
    "drop_path": 0,
    "backbone_args": {
        "patch_size": 7,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "class_token": False,
        "global_pool": "avg",
    },
    "method_args": {"length": 0.3},
    "guard": False,
    "quiet": True,
}


def cells() -> list[dict[str, Any]]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_no_outputs_are_committed() -> None:
    for cell in cells():
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, *others = ("".join(cell["source"]) for cell in cells())
    exec(first, names)
    assert {"IMAGES", "SETTINGS"} <= names.keys(), "the values replaced here"
    names |= {"IMAGES": FEWER_IMAGES, "SETTINGS": SHORTER}
    for source in others:
        exec(source, names)

    assert names["check"].state == "ok"
    assert "_repr_html_" in dir(names["result"])
    assert len(names["predictions"]) == len(names["files"]) == len(names["features"]) == 1797
    np.testing.assert_allclose(names["probabilities"].sum(axis=1), 1, atol=1e-5)
    answered, scored = names["answered"], names["scored"]
    assert (answered.labelled, answered.measured.images) == (50, 30)
    assert answered.measured.scores.interval.low < scored.accuracy < answered.measured.scores.interval.high
    assert scored.accuracy > names["source_only"] + 0.03
    assert "<html" in names["page"].read_text(encoding="utf-8")
    again = names["cdtrans"].load("digits.safetensors").predict(names["files"][:20])
    assert [p.label for p in again] == [p.label for p in names["predictions"][:20]]
