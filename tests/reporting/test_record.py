"""A run folder read back, whatever is left of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cdtrans.reporting.record import read_lines, read_record
from support import error_says
from tiny_task import CLASSES


def test_a_complete_run(full: Path, finished) -> None:
    record = read_record(full)
    assert record.classes == CLASSES
    assert (len(record.source), len(record.target)) == (24, 21)
    assert (record.root("source") / record.source[0]).is_file()
    assert (record.root("target") / record.target[0]).is_file()
    assert [r.number for r in record.rounds] == [1, 2]
    assert all(r.complete and not r.kept.all() for r in record.rounds)
    assert record.rounds[1].facts["epoch"] == 3
    assert [line["epoch"] for line in record.events("scores")] == [0, 1, 2, 3, 4]
    assert record.shown_epoch == json.loads((full / "result.json").read_text())["chosen_epoch"] > 0
    assert not record.used_source
    assert len(record.predicted(0)) == 21


@pytest.mark.parametrize("damage", [b"", b"PK\3\4 cut short", b"\xff\xfe"])
def test_damaged_files_count_as_missing(run: Path, damage: bytes) -> None:
    for name in (
        "views.npz",
        "evaluation.json",
        "environment.json",
        "data.json",
        "images.csv",
        "predictions/epoch-000.npz",
    ):
        (run / name).write_bytes(damage)
    (run / "pairs" / "round-01.npz").write_bytes(damage)
    record = read_record(run)
    assert record.views is record.evaluation is record.environment is record.data is None
    assert record.source == record.target == ()
    assert [r.number for r in record.rounds] == [2]
    assert record.predicted(0) is None


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "a"}\n3\n{"event": "b"}\n{"eve')
    assert read_lines(tmp_path / "log.jsonl") == [{"event": "a"}, {"event": "b"}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_an_unfinished_run_is_an_error(run: Path) -> None:
    (run / "result.json").unlink()
    with error_says(f"'{run}'", "no finished run"):
        read_record(run)


def test_without_an_adapted_model_the_classes_are_the_source_model_s(run: Path) -> None:
    shutil.rmtree(run / "adapted")
    assert read_record(run).classes == CLASSES
    shutil.rmtree(run / "source")
    assert read_record(run).classes == ()


def test_a_run_that_went_back_shows_the_epoch_that_was_refused(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result.pop("judged_epoch") == result["chosen_epoch"]
    refused = result | {"chosen_model": "source", "chosen_epoch": 0}
    (run / "result.json").write_text(json.dumps(refused | {"judged_epoch": 3}))
    assert read_record(run).shown_epoch == 3
    (run / "result.json").write_text(json.dumps(refused))  # as runs of the first version did
    record = read_record(run)
    assert record.used_source
    assert record.shown_epoch == 4
    (run / "log.jsonl").unlink()
    assert read_record(run).shown_epoch == 0


def test_arrays_of_views_come_together_or_not_at_all(run: Path) -> None:
    with np.load(run / "views.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "changed"}
    np.savez(run / "views.npz", **kept)
    record = read_record(run)
    assert record.view_arrays("target_after", "changed") is None
    (predicted,) = record.view_arrays("target_after")
    assert np.array_equal(predicted, kept["target_after"])


@pytest.mark.parametrize("own", [True, False])
def test_the_paths_of_a_list_start_at_its_folder_or_at_the_root(run: Path, tmp_path: Path, own: bool) -> None:
    listed = tmp_path / "lists" / "target.txt"
    listed.parent.mkdir()
    listed.write_text("a.png\n")
    root = "null" if own else str(tmp_path / "images")
    (run / "config.yaml").write_text(f"target: {listed}\nsource: {tmp_path}\nroot: {root}\n")
    record = read_record(run)
    assert record.root("target") == (listed.parent if own else tmp_path / "images")
    assert record.root("source") == tmp_path
