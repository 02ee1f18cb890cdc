import csv
import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cdtrans
from cdtrans.errors import DataError
from cdtrans.measure.ask import ask, choose_images
from cdtrans.measure.intervals import accuracy_interval
from cdtrans.measure.matching import RunTarget, read_target as target_of
from cdtrans.record.outcome import StoredLabel
from cdtrans.record.record import RunRecord
from labelled_runs import IMAGES, fill, train_with
from run_folders import make_card
from support import raises
from tiny_task import CLASSES, tree


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def read_target(run: Path) -> RunTarget:
    return target_of(RunRecord(run))


def test_the_parts_are_apart_and_as_large_as_promised(run: Path) -> None:
    asked = ask(run, budget=20)
    assert (asked.count("random"), asked.count("informative")) == (12, 8)
    assert len(asked.parts) == 20
    listed = rows(run / "ask" / "labels.csv")
    target = read_target(run)
    assert [(r["path"], r["label"], r["part"]) for r in listed] == [
        (target.paths[image], "", part) for image, part in asked.parts.items()
    ]
    assert {"random", "informative"} == set([*asked.parts.values()][:10]), "mixed, so that a half-filled file has both"


def test_the_random_part_is_spread_over_the_confidence_and_the_other_is_uncertain(run: Path) -> None:
    target, asked = read_target(run), ask(run, budget=30)
    place = np.argsort(np.argsort(target.confidence)) / IMAGES
    random, informative = ([place[i] for i, p in asked.parts.items() if p == q] for q in ("random", "informative"))
    assert 0.35 < np.mean(random) < 0.65
    assert np.mean(informative) < 0.5 < max(random)
    predicted = target.predicted["adapted"]
    classes = Counter(int(predicted[i]) for i, part in asked.parts.items() if part == "informative")
    assert max(classes.values()) - min(classes.values()) <= 1
    assert len(classes) == 3


def test_the_same_seed_asks_the_same_and_another_seed_does_not(run: Path, tmp_path: Path) -> None:
    ask(run, budget=20)
    before = tree(run)
    ask(run, budget=20)
    assert tree(run) == before
    elsewhere = ask(run, budget=20, seed=1, out=tmp_path / "other")
    assert {p.name for p in (tmp_path / "other").iterdir()} == {
        *("ask.html", "labels.csv", "label-studio.json", "label-studio.xml")
    }
    assert elsewhere.summary()["page"] == str(tmp_path / "other" / "ask.html")
    assert rows(tmp_path / "other" / "labels.csv") != rows(run / "ask" / "labels.csv")
    questions, target = RunRecord(run).questions, read_target(run)
    assert all(target.find(q.path) == target.find("", q.digest) is not None for q in questions.images)


def test_the_labeller_sees_no_prediction(run: Path) -> None:
    asked = ask(run, budget=20)
    page = (run / "ask" / "ask.html").read_text()
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    tasks = json.loads((run / "ask" / "label-studio.json").read_text())
    assert data.keys() == {"store", "classes", "others", "images"}
    assert [task["data"] for task in tasks] == data["images"]
    assert len(data["images"]) == len(asked.parts)
    assert all(image.keys() == {"path", "digest", "part", "image"} for image in data["images"])
    assert "informative" not in page.replace('"part": "informative"', ""), (
        "the page saves the part and does not show it"
    )
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched"


def test_the_label_studio_files_fit_together(run: Path) -> None:
    ask(run, budget=5)
    tasks = json.loads((run / "ask" / "label-studio.json").read_text())
    assert len(tasks) == 5
    assert all(task["data"]["image"].startswith("data:image/jpeg;base64,") for task in tasks)
    view = ET.parse(run / "ask" / "label-studio.xml").getroot()
    assert view.find("Image").get("value") == "$image"
    choices = [choice.get("value") for choice in view.iter("Choice")]
    assert choices == [*CLASSES, "unsure", "none of these classes"]


def test_labels_that_were_not_read_are_not_overwritten(run: Path) -> None:
    ask(run, budget=10)
    file = run / "ask" / "labels.csv"
    fill(file, file)
    before = tree(run)
    with raises("labels-lost"):
        ask(run, budget=10)
    assert tree(run) == before
    ask(run, budget=10, force=True)
    assert {row["label"] for row in rows(file)} == {""}
    file.write_text("path,label,part\nstrange.png,red,random\n")
    with raises("labels-lost"):
        ask(run, budget=10)


def test_labels_that_the_run_was_trained_with_are_not_lost(run: Path) -> None:
    ask(run, budget=10)
    file = run / "ask" / "labels.csv"
    fill(file, file)
    listed = {row["path"]: row for row in rows(file)}
    train_with(run, *(path for path, row in listed.items() if row["part"] == "informative"))
    with raises("labels-lost"):
        ask(run, budget=10)
    cdtrans.answer(run, file)
    kept = file.read_text()
    for part in ("random", "informative"):
        path = next(path for path, row in listed.items() if row["part"] == part)
        label = listed[path]["label"]
        file.write_text(kept.replace(f"{path},{label}", f"{path},{'red' if label != 'red' else 'blue'}"))
        with pytest.raises(DataError, match=r"holds 1 label that would be lost.*cdtrans answer.*--out.*--force"):
            ask(run, budget=10)
    file.write_text(kept)
    assert len(ask(run, budget=10).parts) == 10


def test_what_has_been_answered_is_not_asked_again(run: Path) -> None:
    first = ask(run, budget=30)
    file = run / "ask" / "labels.csv"
    cdtrans.answer(run, fill(file, file))
    second = ask(run, budget=10)
    assert not first.parts.keys() & second.parts.keys()
    third = ask(run, budget=1000)
    assert len(third.parts) == IMAGES - 30, "all that are left"
    cdtrans.answer(run, fill(file, file))
    with raises("nothing-to-ask"):
        ask(run)


def test_an_answered_image_that_is_drawn_at_random_later_counts_as_random(run: Path) -> None:
    file = run / "ask" / "labels.csv"
    ask(run, budget=30)
    cdtrans.answer(run, fill(file, file))
    ask(run, budget=29)
    fresh = {row["path"] for row in rows(file)}
    again = [q for q in RunRecord(run).questions.images if q.path not in fresh and q.part == "random"]
    assert len(again) > 18, "some of the twelve informative images were drawn for the random part"
    assert cdtrans.answer(run, fill(file, file)).measured.images == 18 + round(0.6 * 29)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["answered first", "asked first"])
def test_two_runs_random_parts_cover_the_truth_together(run: Path, known: bool) -> None:
    """The second run is trained with the informative part of the first, which is then not measured. It draws a random
    part of its own, knowing the first one's answers or not."""
    made, rng = read_target(run), np.random.default_rng(0)
    images = np.arange(150)
    first = replace(
        made,
        paths=tuple(map(str, images)),
        predicted={"source": images % 7, "adapted": images % 7},
        rows=images,
        confidence=rng.random(150),
    )
    views = replace(made.record.views, sampled_target=images, after_target=rng.normal(size=(150, 8)))
    first.record.__dict__["views"] = views
    confidence = 0.7 * first.confidence + 0.3 * rng.random(150)
    correct = rng.random(150) < 1 / (1 + np.exp(-4 * (first.confidence + confidence - 0.4)))
    errors, covered = [], 0
    for seed in range(200):
        asked = choose_images(first, {}, 50, seed)
        left = np.array([i for i in images if asked.get(i) != "informative"])
        second = replace(
            first,
            predicted={"adapted": left % 7},
            rows=left,
            paths=tuple(map(str, left)),
            confidence=confidence[left],
        )
        drawn = {n for n, i in enumerate(left.tolist()) if asked.get(i) == "random"}
        answers = {n: StoredLabel("", "", "red", "random") for n in drawn if known}
        drawn |= {i for i, part in choose_images(second, answers, 50, 1000 + seed).items() if part == "random"}
        labelled, true = np.array(sorted(drawn)), correct[left]
        estimate, interval = accuracy_interval(second.confidence, labelled, true[labelled])
        errors.append(estimate - true.mean())
        covered += interval.low <= true.mean() <= interval.high
    assert covered / 200 >= 0.92
    assert abs(np.mean(errors)) < 0.01


@pytest.mark.parametrize("name", ["unsure", "none of these classes"])
def test_a_class_with_the_name_of_another_answer_is_refused(run: Path, name: str) -> None:
    """Its labels would be taken for images to leave out, or for images of no class."""
    for model in ("source", "adapted"):
        make_card(run / model, (*CLASSES[1:], name))
    with raises("class-unclear"):
        ask(run)
    assert not (run / "ask").exists()


def test_a_budget_of_nothing_and_a_target_that_has_gone(run: Path, tmp_path: Path) -> None:
    with raises("argument-range"):
        ask(run, budget=0)
    config = (run / "config.yaml").read_text().replace("target", "gone", 1).replace("/target", "/gone")
    (run / "config.yaml").write_text(config.replace("gone:", "target:"))
    with raises("no-readable-image"):
        ask(run, budget=10)
    assert not (run / "ask").exists()
    with raises("output-refused"):
        ask(run, out=run / "result.json" / "inside")
