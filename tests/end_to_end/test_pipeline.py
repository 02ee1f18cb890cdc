"""From two folders to a run, through the command line: what is in the way, and what each switch does."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cdtrans
from cdtrans.errors import CdtransError
from cdtrans.inputs.images import decode, pixel_digest, resized
from commands import Ended, warm
from support import raises
from tiny_task import CLASSES, QUICK, Task, draw, log_lines, make_task, tree

pytestmark = pytest.mark.slow


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task", **QUICK)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def adapt(task: Task, out: Path, *flags: str) -> Ended:
    return warm().run(task.adapt(out, *flags), task.folder / "logs")


def predicted(run: Path) -> list[dict[str, str]]:
    with open(run / "predictions.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task that its tests only read, with the plain run in `plain`."""
    task = make_task(tmp_path_factory.mktemp("shared"), **QUICK)
    assert adapt(task, task.folder / "plain").code == 0
    return task


# Input that is wrong


def refused(task: Task, out: Path, code: str, source: str = "source", target: str = "target") -> None:
    """The error has this code, and nothing is written: no run folder, and not even the cache."""
    before = tree(task.folder)
    with raises(code):
        cdtrans.adapt(task.folder / source, task.folder / target, out=out, config=task.config, quiet=True)
    assert tree(task.folder) == before
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "target", "code"),
    [("source", "empty", "no-image"), ("source", "source", "same-domain"), ("source", "link", "same-domain")],
)
def test_places_that_are_wrong_are_refused(task: Task, out: Path, source: str, target: str, code: str) -> None:
    (task.folder / "empty").mkdir()
    (task.folder / "link").symlink_to(task.source)
    refused(task, out, code, source, target)


@pytest.mark.parametrize("place", ["source", "target"])
def test_a_run_folder_in_the_images_is_refused(task: Task, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(task.folder / place)
    for out in (task.folder / place / "runs" / "a", tmp_path / "link" / "a"):
        refused(task, out, "run-inside-images")


# Files that cannot be read


def test_unreadable_files_are_skipped_named_and_counted_and_change_nothing_else(
    shared: Task, task: Task, out: Path
) -> None:
    (task.source / "red" / "99.png").write_bytes((task.source / "red" / "00.png").read_bytes()[:100])
    (task.target / "99.jpg").touch()
    ended = adapt(task, out)
    assert ended.code == 0, ended.err
    warnings = ended.err.splitlines()
    assert warnings[0].startswith("warning: 1 of 25 source files cannot be read (the first: 'red/99.png', ")
    assert (
        warnings[1] == "warning: 1 of 22 target files cannot be read (the first: '99.jpg', empty file); it is skipped."
    )
    assert [line for line in warnings if "The guard" not in line] == warnings[:2]
    skipped = [line for line in log_lines(out) if line["event"] == "skipped"]
    assert [(line["domain"], line["path"]) for line in skipped] == [("source", "red/99.png"), ("target", "99.jpg")]
    assert all(line["cause"] for line in skipped)
    assert len(predicted(out)) == 21
    plain = tree(shared.folder / "plain")
    for name in ("source/model.safetensors", "adapted/model.safetensors", "predictions.csv", "pairs/round-01.npz"):
        assert tree(out)[name] == plain[name], name


def test_the_skipped_files_stand_in_the_log_once_however_often_the_run_was_killed(task: Task, out: Path) -> None:
    (task.target / "99.jpg").touch()
    for name in ("data.json", "state.pt", "source", "round-01.npz"):
        crash = {"name": name, "when": "after"}
        assert warm().run(task.adapt(out), task.folder / "logs", crash=crash).code == -9
    assert adapt(task, out).code == 0
    assert [line["event"] for line in log_lines(out)] == ["skipped", "epoch", "scores", "pairs", "epoch", "scores"]


@pytest.mark.parametrize("domain", ["source", "target"])
def test_too_many_unreadable_files_are_refused_and_no_run_folder_is_made(task: Task, out: Path, domain: str) -> None:
    for n in (98, 99):
        folder = task.source / "red" if domain == "source" else task.target
        (folder / f"{n}.png").write_text("not an image")
    places: Any = {"source": task.source, "target": task.target, "out": out, "config": task.config, "quiet": True}
    with raises("too-many-unreadable"):
        cdtrans.adapt(**places)
    assert not out.parent.exists()
    assert cdtrans.adapt(**places, max_bad=0.1).run == out


def test_a_class_or_a_target_without_a_readable_image_is_refused(task: Task, out: Path) -> None:
    (task.source / "zebra").mkdir()
    (task.source / "zebra" / "0.png").touch()
    for code in ("class-unreadable", "no-readable-image"):
        with raises(code):
            cdtrans.adapt(task.source, task.target, out=out, config=task.config, quiet=True, max_bad=1)
        assert not out.parent.exists()
        shutil.rmtree(task.source / "zebra", ignore_errors=True)
        for file in task.target.iterdir():
            file.write_bytes(b"")


def test_a_class_whose_name_is_no_text_goes_the_whole_way(task: Task, out: Path) -> None:
    """Killed and taken up, given again, asked for labels, scored, and on the screen."""
    odd = os.fsdecode(b"caf\xe9")
    (task.source / "red").rename(task.source / odd)
    crash = {"name": "state.pt", "when": "after", "nth": 2}
    assert warm().run(task.adapt(out, "--save-every", "0"), task.folder / "logs", crash=crash).code == -9
    for said in ("Done: ", "already finished"):
        ended = adapt(task, out)
        assert ended.code == 0, ended.err
        assert said in ended.out
    for name in ("data.json", "adapted/model.json", "log.jsonl"):
        (out / name).read_bytes().decode("ascii")
    assert cdtrans.load(out).classes == ("blue", odd, "green")
    assert {row["label"] for row in predicted(out)} <= {"blue", odd, "green"}

    table = task.folder / "p.csv"
    for flags in (["--csv", str(table)], []):
        ended = warm().run(["predict", str(out), str(task.source), "--top", "3", *flags], task.folder / "logs")
        assert ended.code == 0, ended.err
    assert ended.out.encode("utf-8", "surrogateescape") in table.read_bytes().replace(b"\r\n", b"\n")
    assert b"/caf\xe9/00.png" in table.read_bytes()
    assert b",caf\xe9," in table.read_bytes()

    (task.source / odd / "99.png").touch()
    ended = warm().run(["eval", str(out), str(task.source), "--max-bad", "0.5", "--json"], task.folder / "logs")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["classes"] == ["blue", odd, "green"]
    assert "warning: skipped" in ended.err


def test_odd_file_names_come_through(task: Task, out: Path) -> None:
    shutil.rmtree(task.target)
    odd = ["ä ö.png", 'a,"b".png', "[red]x[/].png", "c:b:d.png", "new\nline.png", os.fsdecode(b"\xff\xfe.png")]
    for n, name in enumerate(odd):
        draw(task.target / name, n % 3, seed=50 + n)
    ended = adapt(task, out)
    assert ended.code == 0, ended.err
    assert {row["path"] for row in predicted(out)} == set(odd)


# What the run folder says


def test_images_csv_says_what_an_index_means(shared: Task) -> None:
    run = shared.folder / "plain"
    with open(run / "images.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {name: [row for row in rows if row["domain"] == name] for name in ("source", "target")}
    assert sum(map(len, found.values())) == len(rows)
    for images in found.values():
        assert [int(row["index"]) for row in images] == list(range(len(images)))
    source = [row["path"] for row in found["source"]]
    assert source == sorted(str(p.relative_to(shared.source)) for p in shared.source.rglob("*.png"))
    target = [row["path"] for row in found["target"]]
    assert sorted(target) == sorted(p.name for p in shared.target.iterdir()) != target
    digests = [pixel_digest(resized(decode(shared.target / path), QUICK["resize"])) for path in target]
    assert digests == sorted(digests)  # the pictures decide the order, and nothing else
    with np.load(run / "predictions" / "epoch-001.npz") as arrays:
        last = {path: CLASSES[k] for path, k in zip(target, arrays["predicted"], strict=True)}
    table = predicted(run)
    assert [row["path"] for row in table] == sorted(target)
    assert {row["path"]: row["label"] for row in table} == last


def test_the_timing_of_the_session_has_all_others_in_it(shared: Task) -> None:
    lines = [json.loads(line) for line in (shared.folder / "plain" / "timings.jsonl").read_text().splitlines()]
    stages = ["check", "source", "evidence", "scores", "adaptation", "scores", "verdict", "verdict", "session"]
    assert [line["stage"] for line in lines] == stages
    assert lines[-1]["seconds"] > sum(line["seconds"] for line in lines[:-1]) > 0


# Pairs


def test_fewer_pairs_than_a_batch_are_trained_on_all_the_same(task: Task, out: Path) -> None:
    assert adapt(task, out, "--batch-size", "64").code == 0
    pairs, epoch = log_lines(out)[-3:-1]
    assert 2 <= pairs["kept"] < 64
    assert epoch["pairs"] == pairs["kept"]
    before, after = (load_file(out / m / "model.safetensors") for m in ("source", "adapted"))
    assert not torch.equal(before["head.classifier.weight"], after["head.classifier.weight"])


# Data that makes a run pointless


def leak_source(task: Task) -> None:
    """Every target image is a source image."""
    shutil.rmtree(task.target)
    for name in CLASSES:
        for file in (task.source / name).iterdir():
            (task.target / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, task.target / name / file.name)


@pytest.mark.parametrize("pixels", ["store", "stream"])
def test_data_that_makes_a_run_pointless_is_refused(task: Task, out: Path, pixels: str) -> None:
    leak_source(task)
    with raises("data-refused"):
        cdtrans.adapt(task.source, task.target, out=out, config=task.config, quiet=True, pixels=pixels)
    assert not out.parent.exists()


def test_a_forced_run_goes_on_and_remembers_why_it_should_not(task: Task, out: Path) -> None:
    leak_source(task)
    for _ in range(2):
        result = cdtrans.adapt(task.source, task.target, out=out, config=task.config, force=True, quiet=True)
        assert result.run == out
    (logged,) = [line for line in log_lines(out) if line["event"] == "check"]
    assert (logged["state"], logged["subject"]) == ("stop", "copies across domains")


# Switches


@pytest.mark.parametrize(
    ("flag", "stage"),
    [
        ("--no-first-block-residual", 2),
        ("--detach-teacher", 2),
        ("--no-center-aware", 2),
        ("--lr=0.01", 2),
        ("--source-lr=0.01", 1),
        ("--drop-path=0.5", 1),
        ("--optimizer=adamw", 1),
    ],
)
def test_every_switch_changes_the_result_from_its_stage_on(shared: Task, flag: str, stage: int) -> None:
    out = shared.folder / flag.strip("-")
    assert adapt(shared, out, *flag.split("=")).code == 0
    plain, other = tree(shared.folder / "plain"), tree(out)
    assert plain["adapted/model.safetensors"] != other["adapted/model.safetensors"]
    assert (plain["source/model.safetensors"] == other["source/model.safetensors"]) == (stage == 2)


def test_the_curves_also_go_to_tensorboard_when_asked_for(shared: Task) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = shared.folder / "curves"
    ended = adapt(shared, out, "--tracker", "tensorboard")
    assert ended.code == 0, ended.err
    files = list((out / "tensorboard").rglob("events.out.tfevents.*"))
    found: dict[str, list[float]] = {}
    for file in files:
        events = accumulator.EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] = [event.value for event in events.Scalars(tag)]
        assert not events.Tags()["images"]
    source, adaptation = (line for line in log_lines(out) if line["event"] == "epoch")
    assert found["source/loss"] == pytest.approx([source["loss"]])
    for name in ("loss_source", "loss_target", "loss_distillation", "lr"):
        assert found[f"adaptation/{name}"] == pytest.approx([adaptation[name]])


# From Python


def test_python_does_the_same_as_the_command_line(shared: Task) -> None:
    out = shared.folder / "python"
    settings: dict[str, Any] = QUICK | {"cache": shared.folder / "cache"}
    result = cdtrans.adapt(source=shared.source, target=str(shared.target), out=out, quiet=True, **settings)
    assert (result.run, result.chosen_epoch) == (out, 1)
    assert tree(out) == tree(shared.folder / "plain")
    labels = [p.label for p in result.classifier().predict(sorted(shared.target.iterdir()))]
    assert labels == [row["label"] for row in predicted(out)]


# Where the pixels come from


def test_images_decoded_every_time_give_the_same_bytes(shared: Task) -> None:
    out = shared.folder / "streamed"
    ended = adapt(shared, out, "--pixels", "stream", "--cache", str(shared.folder / "unused"))
    assert ended.code == 0, ended.err
    assert not (shared.folder / "unused").exists()
    plain, streamed = tree(shared.folder / "plain"), tree(out)
    assert plain.pop("config.yaml") != streamed.pop("config.yaml")
    assert plain == streamed


def test_a_disk_without_room_is_worked_around_unless_the_store_was_asked_for(
    shared: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = shutil._ntuple_diskusage(1, 1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    places = {"source": shared.source, "target": shared.target, "config": shared.config}
    with pytest.raises(CdtransError, match=r"too full.*--pixels stream"):
        cdtrans.adapt(**places, out=tmp_path / "a", pixels="store", cache=str(tmp_path / "c"), quiet=True)
    assert not (tmp_path / "a").exists()
    cdtrans.adapt(**places, out=tmp_path / "b", cache=str(tmp_path / "c"))
    assert "decoded every time" in capsys.readouterr().out
    assert (tmp_path / "b" / "result.json").exists()
