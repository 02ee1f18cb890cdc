"""Fig. 2a on the tiny task: which pairs are called false, and what the picture is made of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from ablation_task import make_labels, true_classes
from cdtrans.errors import CdtransError
from cdtrans.paper.pair_labels import UNKNOWN
from cdtrans.record.record import RunRecord
from commands import warm
from research.figures.attention import draw_attention, false_pairs
from support import raises
from tiny_task import CLASSES, Task, make_task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), source_epochs=2, epochs=2, rebuild_every=1, center_aware=False)


@pytest.fixture(scope="module")
def run(task: Task) -> Path:
    """Without the filter: there are false pairs among those that were trained on."""
    ended = warm().run(task.adapt(task.folder / "run"), task.folder / "logs")
    assert ended.code == 0, ended.err
    return task.folder / "run"


@pytest.fixture(scope="module")
def labels(task: Task) -> Path:
    return make_labels(task)


def test_the_false_pairs_are_all_those_kept_whose_target_is_of_another_class(run: Path) -> None:
    record, true = RunRecord(run), true_classes(run)
    expected = set()
    for r in record.rounds.values():
        expected |= {
            (s, t)
            for s, t, label, kept in zip(r.source.tolist(), r.target.tolist(), r.source_labels, r.kept, strict=True)
            if kept and true[t] != label
        }
    found = list(false_pairs(record, true))
    assert len(found) == len(expected) > 3
    assert {(pair.source, pair.target) for pair in found} == expected
    for pair in found:
        assert pair.source_class == Path(pair.source_path).parent.name != pair.true_class
        assert pair.true_class == CLASSES[int(Path(pair.target_path).stem) % 3]
    rounds = [pair.round for pair in found]
    assert rounds == sorted(rounds, reverse=True), "the last round's come first"
    last = [pair.source_class for pair in found if pair.round == rounds[0]]
    assert len(set(last[: len(set(last))])) == len(set(last)), "the classes in turn"


def test_rejected_pairs_and_images_that_the_key_does_not_name_are_not_false(run: Path) -> None:
    record = RunRecord(run)
    for r in record.rounds.values():
        r.kept[:] = r.source_labels == true_classes(run)[r.target]
    assert list(false_pairs(record, true_classes(run))) == []
    assert list(false_pairs(RunRecord(run), np.full(21, UNKNOWN))) == []


def test_the_figure_has_a_row_for_each_pair(run: Path, labels: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures" / "3.png"
    flags = ["--labels", str(labels), "--out", str(out), "--pairs", "3", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "research.figures.attention", str(run), *flags]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["out"], len(summary["pairs"])) == (str(out), 3)
    assert all(pair["source_class"] != pair["true_class"] for pair in summary["pairs"])
    draw_attention(run, labels=labels, out=tmp_path / "1.png", pairs=1, device="cpu")
    with Image.open(out) as three, Image.open(tmp_path / "1.png") as one:
        assert three.format == "PNG"
        assert len(np.unique(np.asarray(three.convert("RGB")).reshape(-1, 3), axis=0)) > 100, "it is not empty"
        assert three.height == 3 * one.height


def test_the_pictures_are_the_pairs_own_and_attention_is_a_share(
    run: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdtrans.reporting.attention.PAIRS_AT_ONCE", 3)
    shown = draw_attention(run, labels=labels, out=tmp_path / "a.png", pairs=100, device="cpu")
    assert len(shown.images) == len(shown.pairs) > 3, "more than one batch"
    target = RunRecord(run).root("target")
    for pair, (source, picture, weights) in zip(shown.pairs, shown.images, strict=True):
        assert source.shape == picture.shape == (16, 16, 3)
        assert weights.shape == (2, 2)
        assert 0 < weights.sum() <= 1
        with Image.open(target / pair.target_path) as file:
            assert abs(np.asarray(file).mean() - picture.mean()) < 10


def test_chosen_pairs_need_no_labels(run: Path, tmp_path: Path) -> None:
    paths = RunRecord(run).images.paths
    source, target = paths["source"], paths["target"]
    words = [f"{source[5]},{target[2]}", f"{source[0]}, {target[20]}"]
    shown = draw_attention(run, out=tmp_path / "a.png", pair=words, device="cpu")
    assert [(pair.source, pair.target) for pair in shown.pairs] == [(5, 2), (0, 20)]
    assert [pair.source_class for pair in shown.pairs] == [Path(source[i]).parent.name for i in (5, 0)]
    assert (tmp_path / "a.png").is_file()
    with raises("pair-unknown"):
        draw_attention(run, out=tmp_path / "b.png", pair=[source[0]], device="cpu")


def test_a_run_without_pairs_or_without_an_adapted_model_says_so(run: Path, labels: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"method": "rpll", "method_args": {}}))
    with raises("no-pairs"):
        draw_attention(copy, labels=labels, out=tmp_path / "a.png", pairs=1, device="cpu")
    shutil.rmtree(copy / "adapted")
    with raises("model-missing"):
        draw_attention(copy, labels=labels, out=tmp_path / "a.png", pairs=1, device="cpu")


def test_no_image_of_the_run_is_replaced(run: Path, labels: Path, task: Task) -> None:
    image = next(task.target.glob("*.png"))
    before = image.read_bytes()
    with pytest.raises(CdtransError, match="choose another --out"):
        draw_attention(run, labels=labels, out=image, pairs=1)
    assert image.read_bytes() == before


def test_bad_input_is_refused(run: Path, labels: Path, task: Task, tmp_path: Path) -> None:
    others = tmp_path / "key.txt"
    others.write_text(f"{task.source}/red/00.png red\n")
    cases: list[tuple[str | None, Any]] = [
        ("labels-not-of-target", (run, others, tmp_path / "a.png")),
        ("no-labels", (run, None, tmp_path / "a.png")),
        ("figure-not-png", (run, labels, tmp_path)),
        ("figure-not-png", (run, labels, tmp_path / "a.pdf")),
        ("no-run", (tmp_path / "none", labels, tmp_path / "a.png")),
        (None, (run, tmp_path / "none.txt", tmp_path / "a.png")),
    ]
    for code, (where, given, out) in cases:
        with raises(code) if code else pytest.raises(CdtransError):
            draw_attention(where, labels=given, out=out, pairs=2, device="cpu")
    assert not (tmp_path / "a.png").exists()
