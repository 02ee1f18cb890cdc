"""Predictions as a CSV: what is in it, what is left out, what is left behind, and how much memory it takes."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdtrans
from cdtrans.errors import CdtransError
from cdtrans.record.layout import RESERVED
from cdtrans.record.record import RunRecord
from cdtrans.serving.classifier import Classifier, load
from cdtrans.serving.predict import Predicted
from support import Notes, error_says, raises, says
from tiny_task import draw

Write = Callable[..., Predicted]


@pytest.fixture
def screen() -> Notes:
    return Notes()


@pytest.fixture
def classifier(finished) -> Classifier:
    return load(finished.run, device="cpu")


@pytest.fixture
def write(finished, screen: Notes) -> Write:
    """Predict with the finished run, to a file or to standard output."""

    def write(images: Path, file: Any, **options: Any) -> Predicted:
        return cdtrans.predict(finished.run, images, csv=file, device="cpu", screen=screen, **options)

    return write


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8", errors="surrogateescape") as text:
        return list(csv.DictReader(text))


def test_neither_the_input_nor_a_run_is_replaced(finished, write: Write, tmp_path: Path) -> None:
    image = draw(tmp_path / "photo.png", 0, seed=1)
    listed = tmp_path / "list.txt"
    listed.write_text("photo.png\n")
    (tmp_path / "link.csv").symlink_to(listed)
    part = finished.run / "pairs" / "p.csv"
    taken = [(image, image), (listed, listed), (listed, tmp_path / "link.csv"), (listed, image), (tmp_path, image)]
    taken += [(image, finished.run / name) for name in ("result.json", "answers.json", "predictions.csv")]
    before = {file: file.read_bytes() for _, file in taken if file.exists()}
    for images, file in [*taken, (image, part)]:
        with error_says(file.name, "choose another --csv"):
            write(images, file)
    assert all(file.read_bytes() == content for file, content in before.items())
    assert not part.exists()
    assert {file.name for file in finished.run.iterdir()} <= RESERVED
    for _ in range(2):  # predictions may be replaced, wherever they are
        assert write(tmp_path, tmp_path / "predictions.csv").images == 1


def test_the_columns_of_a_table(finished, classifier: Classifier, write: Write, screen: Notes, tmp_path: Path) -> None:
    counts = write(finished.task.target, tmp_path / "new" / "p.csv")
    predictions = classifier.predict(finished.task.target)
    assert counts.summary() == {
        "csv": str(tmp_path / "new" / "p.csv"),
        "parquet": None,
        "images": 21,
        "kept": 21,
        "abstained": 0,
        "no_class": 0,
        "skipped": 0,
        "threshold": 0.0,
        "expected_accuracy": pytest.approx(sum(p.probability for p in predictions) / 21),
    }
    table = rows(tmp_path / "new" / "p.csv")
    assert list(table[0]) == ["path", "label", "probability"]
    for row, prediction in zip(table, predictions, strict=True):
        assert (row["path"], row["label"]) == (str(prediction.path), prediction.label)
        assert float(row["probability"]) == pytest.approx(prediction.probability, abs=1e-6)
    assert screen.results == [f"Wrote {tmp_path / 'new' / 'p.csv'}: 21 images."]


def test_the_score_for_no_class(finished, write: Write, tmp_path: Path) -> None:
    """The score of an image's nearest target images in the run, and a fifth of the source-only model's own doubt,
    whichever model predicts."""
    record = RunRecord(finished.run)
    views, doubt = record.views, 1 - record.confidences("source")
    x = views.before_target.astype(np.float64)  # all of the target's few images
    x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosine, score = x @ x.T, views.no_class[views.sampled_target]
    nearest = np.argsort(-cosine, axis=1)[:, :7]
    weight = np.exp(10 * np.take_along_axis(cosine, nearest, axis=1))
    of_nearest = (weight * score[nearest]).sum(axis=1) / weight.sum(axis=1)
    expected = 1 / (1 + np.exp(-(0.8 * of_nearest + 0.2 * (doubt - doubt.mean()) / doubt.std())))
    paths = record.images.paths["target"]
    for model in ("chosen", "source"):
        write(finished.task.target, tmp_path / "p.csv", top=2, model=model, unknown=1)
        table = rows(tmp_path / "p.csv")
        assert list(table[0])[:5] == ["path", "label", "probability", "no_class", "label_1"]
        for row in table:
            n = paths.index(Path(row["path"]).name)
            assert float(row["no_class"]) == pytest.approx(expected[n], abs=5e-3)


@pytest.mark.parametrize(("top", "columns"), [(2, 2), (50, 3)])
def test_the_best_classes(
    finished, classifier: Classifier, write: Write, tmp_path: Path, top: int, columns: int
) -> None:
    """They are listed whether the label is kept or left out."""
    write(finished.task.target, tmp_path / "p.csv", top=top)
    write(finished.task.target, tmp_path / "none.csv", top=top, abstain=1.0)
    others = [f"{what}_{k}" for k in range(1, columns + 1) for what in ("label", "probability")]
    table, none = rows(tmp_path / "p.csv"), rows(tmp_path / "none.csv")
    assert list(table[0]) == ["path", "label", "probability", *others]
    for row, without, prediction in zip(table, none, classifier.predict(finished.task.target, top=top), strict=True):
        assert (row["label"], row["probability"]) == (row["label_1"], row["probability_1"])
        assert without == row | {"label": ""}
        for k in range(1, columns + 1):
            assert row[f"label_{k}"] == prediction.top[k - 1][0]
            assert float(row[f"probability_{k}"]) == pytest.approx(prediction.top[k - 1][1], abs=1e-6)


def test_below_the_threshold_there_is_no_label(
    finished, classifier: Classifier, write: Write, screen: Notes, tmp_path: Path
) -> None:
    predictions = classifier.predict(finished.task.target)
    threshold = sorted(p.probability for p in predictions)[10]  # ten are less sure
    counts = write(finished.task.target, tmp_path / "p.csv", abstain=threshold)
    assert (counts.images, counts.kept, counts.abstained) == (21, 11, 10)
    sure = [p.probability for p in predictions if p.probability >= threshold]
    assert counts.expected_accuracy == pytest.approx(sum(sure) / 11)
    for row, prediction in zip(rows(tmp_path / "p.csv"), predictions, strict=True):
        assert row["label"] == ("" if prediction.probability < threshold else prediction.label)
        assert float(row["probability"]) > 0, "how unsure it was stays visible"
    assert says(screen.results[-1], "21 images", "10 of them", "without a label")


def test_a_single_image_and_a_list(finished, write: Write, tmp_path: Path) -> None:
    one = finished.task.target / "04.png"
    write(one, tmp_path / "one.csv")
    assert [row["path"] for row in rows(tmp_path / "one.csv")] == [str(one)]
    (tmp_path / "list.txt").write_text("04.png\n00.png 7\n")
    write(tmp_path / "list.txt", tmp_path / "list.csv", root=finished.task.target)
    assert [Path(row["path"]).name for row in rows(tmp_path / "list.csv")] == ["04.png", "00.png"]


def test_odd_names_survive_in_a_file_and_on_standard_output(
    write: Write, screen: Notes, tmp_path: Path, capfdbinary
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    names = sorted([b"a,b.png", b'quo"te.png', b"new\nline.png", "größe 日本.png".encode(), b"\xff\xfe.png"])
    plain = draw(tmp_path / "plain.png", 0, 0).read_bytes()
    for name in names:
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(plain)
    write(folder, tmp_path / "p.csv")
    assert sorted(os.path.basename(os.fsencode(row["path"])) for row in rows(tmp_path / "p.csv")) == names
    write(folder, sys.stdout.buffer)
    assert capfdbinary.readouterr().out == (tmp_path / "p.csv").read_bytes()
    assert screen.warnings == []


class TestBadFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Twenty images and one empty file."""
        for n in range(20):
            draw(tmp_path / "images" / f"{n:02}.png", n % 3, seed=n)
        (tmp_path / "images" / "07b.png").write_bytes(b"")
        return tmp_path / "images"

    def test_a_few_are_skipped_named_and_counted(
        self, write: Write, screen: Notes, folder: Path, tmp_path: Path
    ) -> None:
        counts = write(folder, tmp_path / "p.csv")
        assert (counts.images, counts.abstained, counts.skipped) == (20, 0, 1)
        assert "07b.png" not in (tmp_path / "p.csv").read_text()
        assert says(screen.warnings[0], "skipped", f"'{folder / '07b.png'}'", "empty")
        assert says(screen.warnings[1], "1 of 21 files", "cannot be read", "listed in", "p.csv.skipped.csv'")
        assert rows(tmp_path / "p.csv.skipped.csv") == [{"path": str(folder / "07b.png"), "cause": "empty file"}]
        (folder / "07b.png").unlink()
        write(folder, tmp_path / "p.csv")
        assert {p.name for p in tmp_path.iterdir()} == {"images", "p.csv"}, "the old list must not remain"

    def test_many_are_an_error_and_only_their_list_is_left(
        self, write: Write, screen: Notes, folder: Path, tmp_path: Path
    ) -> None:
        for n in range(8):
            (folder / f"{n}c.png").write_bytes(b"")
        (tmp_path / "p.csv").write_text("older")
        with raises("too-many-unreadable"):
            write(folder, tmp_path / "p.csv")
        assert (tmp_path / "p.csv").read_text() == "older"
        assert {p.name for p in tmp_path.iterdir()} == {"images", "p.csv", "p.csv.skipped.csv"}
        assert len({text for text in screen.lines if text.startswith("skipped")}) == 9
        assert write(folder, tmp_path / "p.csv", max_bad=0.5).skipped == 9

    def test_missing_files_of_a_list_count(self, write: Write, folder: Path, tmp_path: Path) -> None:
        (folder / "list.txt").write_text("gone.png 1\n" + "".join(f"{n:02}.png\n" for n in range(20)))
        result = write(folder / "list.txt", tmp_path / "p.csv")
        assert (result.images, result.skipped) == (20, 1)
        missing = {"path": str(folder / "gone.png"), "cause": "missing, or a broken link"}
        assert rows(tmp_path / "p.csv.skipped.csv") == [missing]
        with raises("too-many-unreadable"):
            write(folder / "list.txt", tmp_path / "p.csv", max_bad=0.01)


def test_files_of_other_kinds_are_named(write: Write, screen: Notes, tmp_path: Path) -> None:
    draw(tmp_path / "images" / "a.png", 0, seed=1)
    (tmp_path / "images" / "b.heic").write_bytes(b"ftypheic")
    (tmp_path / "images" / "notes.txt").write_text("nothing to see")
    assert write(tmp_path / "images", tmp_path / "p.csv").images == 1
    (warning,) = [text for text in screen.lines if "Ignored" in text]
    assert says(warning, "1 file", "1 '.heic'", "'b.heic'")
    screen.lines.clear()
    assert write(tmp_path / "images" / "a.png", tmp_path / "p.csv").images == 1
    assert not [text for text in screen.lines if "Ignored" in text]


def test_bad_places_are_refused_before_anything_is_written(finished, write: Write, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")  # stands for /dev/null, which must not become a table
    before = set(tmp_path.rglob("*"))
    for images, file in (
        (tmp_path / "nowhere", tmp_path / "new" / "p.csv"),
        (tmp_path / "empty", tmp_path / "new" / "p.csv"),
        (finished.task.target, tmp_path),
        (finished.task.target, tmp_path / "pipe"),
        (finished.task.target, tmp_path / "file" / "deep" / "p.csv"),
    ):
        with pytest.raises(CdtransError):
            write(images, file)
    assert set(tmp_path.rglob("*")) == before
    assert (tmp_path / "pipe").is_fifo()


def test_several_processes_are_refused(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises("predict-under-torchrun"):
        write(draw(tmp_path / "a.png", 0, seed=1), tmp_path / "p.csv")


MEMORY = r"""
import json, re, sys
from pathlib import Path
from cdtrans.serving import parts
from cdtrans.serving.classifier import Classifier, load
from cdtrans.serving.predict import PredictionJob
from cdtrans.runtime.screen import Screen
from dataclasses import replace

run, few, many = map(Path, sys.argv[1:])
parts.PART = 256  # so that there are parts
classifier = load(run, device="cpu")
classifier.card = replace(classifier.card, resize=160)  # 77 kB an image, so that keeping them would show
peaks, counts = [], []
for folder in (few, many):
    job = PredictionJob(classifier, folder, None, "csv", 2, 0.5, 0.0, Screen(quiet=True, machine=True))
    counts.append(job.run(folder.with_suffix(".csv")).images)
    # not getrusage: its peak starts at that of the process that started this one
    peaks.append(int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024)
print(json.dumps({"peaks": peaks, "counts": counts}))
"""


def test_many_images_need_no_more_memory_than_few(finished, tmp_path: Path) -> None:
    """Keeping the pixels of 1,500 more images would take 115 MB."""
    image = draw(tmp_path / "one.png", 0, 0)
    for name, count in (("few", 300), ("many", 1800)):
        (tmp_path / name).mkdir()
        for n in range(count):
            os.link(image, tmp_path / name / f"{n:05}.png")
    command = [sys.executable, "-c", MEMORY, finished.run, tmp_path / "few", tmp_path / "many"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["counts"] == [300, 1800]
    few, many = result["peaks"]
    assert many - few < 30, f"peak memory grew from {few:.0f} to {many:.0f} MB"
    assert len(rows(tmp_path / "many.csv")) == 1800
