"""The promise of most weight: a label of the target changes nothing, because nothing can read it."""

import ast
import csv
import dataclasses
import inspect
import random
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import cdtrans
from cdtrans.config import FIELDS
from cdtrans.data.domains import LabelledDomain, UnlabelledDomain
from cdtrans.run import finish as conclusion
from cdtrans.run import pipeline, session
from cdtrans.run import prepare as inputs
from cdtrans.training.adaptation import adapt_to_target
from tiny_task import CLASSES, Task, make_task, tree, warm

SOURCE_CODE = Path(cdtrans.__file__).parent


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), source_epochs=2, epochs=2, rebuild_every=1)


def run(task: Task, out: str, target: Path) -> dict[str, str]:
    folder = task.folder / out
    arguments = dataclasses.replace(task, target=target).adapt(folder)
    ended = warm().run(arguments, task.folder / "logs")
    assert ended.code == 0, ended.err
    return tree(folder)


def write_list(task: Task, labels: list[str] | None) -> Path:
    """Always the same file, so that its name cannot be what differs."""
    lines = [f"target/{n:02}.png" for n in range(21)]
    if labels is not None:
        lines = [f"{line} {label}" for line, label in zip(lines, labels, strict=True)]
    file = task.folder / "target.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_true_shuffled_and_deleted_labels_of_the_target_give_the_same_bytes(task: Task) -> None:
    true = [str(n % 3) for n in range(21)]
    shuffled = true.copy()
    random.Random(0).shuffle(shuffled)
    names = [CLASSES[int(label)] for label in true]
    kinds = {"true": true, "shuffled": shuffled, "names": names, "one": ["0"] * 21, "none": None}
    assert shuffled != true
    trees = {out: run(task, out, write_list(task, labels)) for out, labels in kinds.items()}
    assert "adapted/model.safetensors" in trees["true"]
    for out in kinds:
        assert trees[out] == trees["true"], out


def test_a_label_of_the_source_does_change_the_bytes(task: Task) -> None:
    """So that the test above is known to be able to fail."""

    def with_source(out: str, first: str) -> dict[str, str]:
        lines = [f"source/{name}/{n:02}.png {name}" for name in CLASSES for n in range(8)]
        lines[0] = f"source/blue/00.png {first}"
        file = task.folder / "source.txt"
        file.write_text("\n".join(lines) + "\n")
        ended = warm().run(dataclasses.replace(task, source=file).adapt(task.folder / out), task.folder / "logs")
        assert ended.code == 0, ended.err
        return tree(task.folder / out)

    one, other = with_source("blue", "blue"), with_source("red", "red")
    assert one["adapted/model.safetensors"] != other["adapted/model.safetensors"]


NAMES_PATHS = {"images.csv", "predictions.csv", "data.json", "config.yaml"}


def arrangements() -> dict[str, list[str]]:
    """The same 21 target pictures, and ever other places for them."""
    order = list(range(21))
    random.Random(1).shuffle(order)
    return {
        "right classes": [f"{CLASSES[n % 3]}/{n:02}.png" for n in range(21)],
        "wrong classes": [f"{CLASSES[(n + 1) % 3]}/{n:02}.png" for n in range(21)],
        "mixed classes": [f"{CLASSES[order[n] % 3]}/{order[n]:02}.png" for n in range(21)],
        "other folders": [f"{('zebra', 'x/1', 'x/2')[n % 3]}/{20 - n:02}.png" for n in range(21)],
        "flat": [f"{order[n]:02}.png" for n in range(21)],
    }


def test_names_and_class_folders_of_the_target_decide_nothing(task: Task) -> None:
    trees, labels = {}, {}
    place = task.folder / "arranged"
    for kind, paths in arrangements().items():
        shutil.rmtree(place, ignore_errors=True)
        for n, path in enumerate(paths):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(task.target / f"{n:02}.png", place / path)
        out = kind.replace(" ", "-")
        trees[kind] = run(task, out, place)
        with open(task.folder / out / "predictions.csv", newline="") as file:
            rows = {row["path"]: (row["label"], row["probability"]) for row in csv.DictReader(file)}
        assert list(rows) == sorted(paths)
        labels[kind] = [rows[path] for path in paths]
    compared = {kind: {k: v for k, v in found.items() if k not in NAMES_PATHS} for kind, found in trees.items()}
    assert compared["flat"].keys() >= {
        *(f"{stage}/model.safetensors" for stage in ("source", "adapted")),
        *(f"pairs/round-{n:02}.npz" for n in (1, 2)),
        *(f"predictions/epoch-{n:03}.npz" for n in (0, 1, 2)),
        "log.jsonl",
    }
    for kind in trees:
        assert compared[kind] == compared["right classes"], kind
        assert labels[kind] == labels["right classes"], kind
    assert len({label for label, _ in labels["flat"]}) > 1
    assert len({found["images.csv"] for found in trees.values()}) == len(trees)  # the order is that of the pictures


def test_the_type_of_the_target_has_no_room_for_a_label() -> None:
    assert [field.name for field in dataclasses.fields(UnlabelledDomain)] == ["root", "paths", "ignored"]
    assert not issubclass(UnlabelledDomain, LabelledDomain)
    assert not issubclass(LabelledDomain, UnlabelledDomain)
    assert not any("label" in name or "class" in name for name in vars(UnlabelledDomain) if not name.startswith("__"))


def test_the_pipeline_takes_the_target_in_that_type_alone() -> None:
    assert get_args(get_type_hints(inputs.scan_domains)["return"]) == (LabelledDomain, UnlabelledDomain)
    for function in (session.run_session, session.describe, conclusion.conclude, conclusion.write_predictions):
        assert get_type_hints(function)["target"] is UnlabelledDomain
    assert get_type_hints(adapt_to_target)["labels"] is get_type_hints(session.train_source)["labels"]


@pytest.mark.parametrize("room", ["training", "pairing", "model", "trust"])
def test_no_room_that_trains_pairs_or_selects_can_open_an_answer_key(room: str) -> None:
    forbidden = ("cdtrans.evaluation", "cdtrans.data.domains", "cdtrans.data.lists", "cdtrans.data.folders")
    for file in sorted((SOURCE_CODE / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not [name for name in names if name.startswith(forbidden)], f"{file.name} imports {names}"


def test_the_pipeline_reads_labels_of_the_source_only() -> None:
    """`scan_labelled` is called once in it and its inputs, on the source; evaluation is not imported at all."""
    text = "".join(map(inspect.getsource, (inputs, pipeline, session)))
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "scan_labelled"
    ]
    assert len(calls) == 1
    assert "config.source" in calls[0]
    assert "cdtrans.evaluation" not in text


def test_no_setting_is_about_labels_of_the_target() -> None:
    about: list[Any] = [name for name in FIELDS if "label" in name]
    assert about == ["label_smoothing"]
