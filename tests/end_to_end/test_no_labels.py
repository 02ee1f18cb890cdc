"""The promise of most weight: a label of the target changes nothing. That training cannot read one is a contract in
pyproject.toml, which `make lint` checks."""

import csv
import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from commands import warm
from tiny_task import CLASSES, Task, make_task, tree

pytestmark = pytest.mark.slow


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
