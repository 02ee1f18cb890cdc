import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cdtrans.config import RESUME_MAY_CHANGE, Config, make_config
from cdtrans.record.layout import DATA as DATA_FILE, ROUND
from cdtrans.record.record import RunRecord
from cdtrans.record.run import RunWriter, require_resumable
from run_folders import DATA
from support import error_says, raises

OTHER = replace(DATA, target=replace(DATA.target, images=1))


def config(**values: Any) -> Config:
    return make_config({"source": "/s", "target": "/t", "device": "cpu"} | values)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


# The folder


def test_a_new_folder_holds_the_resolved_settings_and_the_environment(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    run = RunWriter.open(folder, config(source="/ä"), DATA)
    run.close()
    assert make_config(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))) == config(source="/ä")
    record = RunRecord(folder)
    assert record.environment.device.startswith("cpu")
    assert record.data == DATA


def test_the_settings_are_written_first_for_they_make_the_folder_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(RunWriter, "write", lambda self, file, content: written.append(file.name))
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    assert written[0] == "config.yaml"


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    before = names(tmp_path)
    with error_says("neck: batchnorm there, none now", "lr: 0.008 there, 0.003 now", "--out"):
        RunWriter.open(tmp_path / "a", config(lr=0.003, neck="none"), DATA)
    assert names(tmp_path) == before


def test_what_does_not_change_the_result_may_change(tmp_path: Path) -> None:
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    changed = {"encode_batch": 7, "save_every": 1.5, "tracker": "tensorboard", "cache": "/elsewhere"}
    assert set(changed) <= set(RESUME_MAY_CHANGE)
    RunWriter.open(tmp_path / "a", config(**changed), DATA).close()
    assert make_config(yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())).encode_batch == 7


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    (tmp_path / "a" / "result.json").write_text("{}")
    (tmp_path / "a" / "environment.json").write_text("{}")
    run = RunWriter.open(tmp_path / "a", config(), OTHER)
    run.close()
    assert run.record.finished
    assert RunRecord(tmp_path / "a").data == DATA
    assert (tmp_path / "a" / "environment.json").read_text() == "{}"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"source": 1}', "[" * 5000])
def test_a_damaged_record_of_the_images_is_named(tmp_path: Path, content: str) -> None:
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    (tmp_path / "a" / "data.json").write_text(content)
    with raises("run-damaged"):
        RunWriter.open(tmp_path / "a", config(), DATA)


def test_other_images_are_refused(tmp_path: Path) -> None:
    RunWriter.open(tmp_path / "a", config(), DATA).close()
    with raises("data-changed"):
        RunWriter.open(tmp_path / "a", config(), OTHER)
    RunWriter.open(tmp_path / "a", config(), DATA).close()  # the refusal has changed nothing


@pytest.mark.parametrize("name", ["photo.jpg", "log.jsonl", "sub"])
def test_a_folder_that_is_not_a_run_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).mkdir() if name == "sub" else (folder / name).touch()
    with raises("not-a-run"):
        RunWriter.open(folder, config(), DATA)
    assert names(folder) == {name}


def test_a_folder_that_becomes_a_run_while_it_is_looked_at_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another rank may see it."""
    folder, look = tmp_path / "a", Path.iterdir
    folder.mkdir()

    def begun_meanwhile(place: Path) -> Any:
        monkeypatch.undo()
        RunWriter.open(folder, config(), DATA).close()
        return look(place)

    monkeypatch.setattr(Path, "iterdir", begun_meanwhile)
    require_resumable(folder, config())


def test_a_file_is_not_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("not-a-run"):
        require_resumable(tmp_path / "file", config())


def test_an_empty_folder_may_become_a_run_and_so_may_what_a_kill_in_the_first_moment_leaves(tmp_path: Path) -> None:
    for leftovers in ([], [".lock"], [".lock", ".config.yaml.draft"]):
        folder = tmp_path / str(len(leftovers))
        folder.mkdir()
        for name in leftovers:
            (folder / name).touch()
        RunWriter.open(folder, config(), DATA).close()
        assert ".config.yaml.draft" not in names(folder)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("run-unwritable"):
        RunWriter.open(tmp_path / "file" / "run", config(), DATA)


def test_a_folder_is_held_while_a_run_is_open(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path / "a", config(), DATA), raises("run-locked"):
        RunWriter.open(tmp_path / "a", config(), DATA)
    RunWriter.open(tmp_path / "a", config(), DATA).close()


# The log


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = RunWriter.open(tmp_path / "run", config(), DATA)
    yield run
    run.close()


def test_the_log_is_a_line_for_each_event_and_can_be_cut(run: RunWriter) -> None:
    assert run.log_size() == 0
    run.log("epoch", epoch=1, path="ä\udcff.png")
    size = run.log_size()
    run.log("epoch", epoch=2)
    with open(run.folder / "log.jsonl", "ab") as file:
        file.write(b'{"event": "torn')
    run.cut_log(size)
    run.log("epoch", epoch=3)
    text = (run.folder / "log.jsonl").read_bytes().decode("ascii")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"event": "epoch", "epoch": 1, "path": "ä\udcff.png"},
        {"event": "epoch", "epoch": 3},
    ]


def test_timings_stay_out_of_the_log(run: RunWriter) -> None:
    run.log_timing(seconds=1.5)
    assert run.log_size() == 0
    assert run.record.timings[0]["seconds"] == 1.5


def test_a_torn_line_of_the_timings_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        with RunWriter.open(tmp_path / "run", config(), DATA) as run:
            run.log_timing(stage="probe")
            with open(run.folder / "timings.jsonl", "ab") as file:
                file.write(b'{"stage": "torn')
    with RunWriter.open(tmp_path / "run", config(), DATA) as run:
        assert [line["stage"] for line in run.record.timings] == ["probe", "probe"]


def test_a_disk_that_is_full_for_the_log_is_named(run: RunWriter) -> None:
    (run.folder / "log.jsonl").symlink_to("/dev/full")
    with raises("disk-full"):
        run.log("epoch")


def test_arrays_are_written_to_the_same_bytes_every_time(run: RunWriter) -> None:
    for number in (1, 2):
        run.write(ROUND.numbered(number), {"x": np.arange(5)})
    first, second = sorted((run.folder / "pairs").iterdir())
    assert first.read_bytes() == second.read_bytes()


def test_json_is_ascii_whatever_bytes_a_name_holds(run: RunWriter) -> None:
    data = replace(DATA, source=replace(DATA.source, classes={"ä\udcff": 2}))
    run.write(DATA_FILE, data)
    (run.folder / "data.json").read_bytes().decode("ascii")
    assert run.record.data == data


# What tells one set of images from another
