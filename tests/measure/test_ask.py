import csv
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdtrans
from cdtrans.errors import DataError
from cdtrans.inputs.images import decode
from cdtrans.measure.ask import choose_images, draw_informative, labelling_config
from cdtrans.measure.intervals import accuracy_interval
from cdtrans.measure.matching import RunTarget, read_target as target_of
from cdtrans.record.outcome import ClassSet, NoClassCurve, StoredLabel
from cdtrans.record.record import RunRecord
from cdtrans.reporting.images import jpeg
from cdtrans.run.ask import ask
from cdtrans.runtime.screen import Screen
from labelled_runs import IMAGES, fill, train_with, write_outcome
from run_folders import change_views, make_card
from support import raises, says
from tiny_task import CLASSES, draw, tree


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def read_target(run: Path) -> RunTarget:
    return target_of(RunRecord(run))


def page_data(run: Path) -> dict[str, Any]:
    page = (run / "ask" / "ask.html").read_text()
    data: dict[str, Any] = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    return data


def small_image(file: Path) -> str:
    image = decode(file)
    image.thumbnail((160, 160))
    return jpeg(image)


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
    page, data = (run / "ask" / "ask.html").read_text(), page_data(run)
    tasks = json.loads((run / "ask" / "label-studio.json").read_text())
    assert data.keys() == {"store", "classes", "others", "occurs", "belongs", "images"}
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
    odd = ("<a> & 'b' \"c\"", "a tab\t", "two\nlines", "\u200fright to left")
    view = ET.fromstring(labelling_config(odd))
    assert tuple(choice.get("value") for choice in view.iter("Choice")) == odd, "every answer names its class"


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
    file.write_text(f"path,label,part\n{read_target(run).paths[0]},heaps of sand,group\n")
    with raises("labels-lost"):
        ask(run, budget=10)
    cdtrans.answer(run, file)
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
            first, predicted={"adapted": left % 7}, rows=left, paths=tuple(map(str, left)), confidence=confidence[left]
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


class TestClassesAndBelonging:
    """Pages 1 and 2."""

    def test_the_most_doubtful_class_comes_first_and_sure_ones_may_be_skipped(self, doubtful: Path) -> None:
        asked = ask(doubtful, budget=5)
        page = page_data(doubtful)
        assert asked.classes == (2, 1, 0)
        assert [(sheet["name"], sheet["sure"]) for sheet in page["occurs"]] == [
            *(("red", False), ("green", False), ("blue", True))
        ]
        assert all(len(sheet["target"]) == 9 for sheet in page["occurs"])
        assert {name: asked.summary()[name] for name in ("classes", "belonging", "images")} == {
            **{"classes": 3, "belonging": 24, "images": 5}
        }

    def test_two_source_images_are_those_nearest_to_the_class_mean(self, doubtful: Path) -> None:
        source = [("red", n) for n in range(4)] + [("blue", n) for n in range(3)]
        for name, n in source:
            draw(doubtful / "source" / name / f"{n}.png", CLASSES.index(name), seed=n)
        config = doubtful / "config.yaml"
        config.write_text(config.read_text() + f"source: {doubtful / 'source'}\n")
        features = np.zeros((5, 8))
        features[:4, 0] = 0.0, 0.9, 9.0, 1.0  # red images 0, 1, 2 and 3: their mean is 2.7
        labels = np.array([CLASSES.index(name) for name, _ in source])
        change_views(
            doubtful,
            source_labels=labels,
            source_predicted=labels,
            source_confidence=np.ones(7),
            source_own=np.ones(7),
            sampled_source=np.array([0, 1, 2, 3, 4]),
            before_source=features,
            after_source=features,
        )
        with open(doubtful / "images.csv", "a") as file:
            file.writelines(f"source,{i},{name}/{n}.png,d{i}\n" for i, (name, n) in enumerate(source))
        ask(doubtful, budget=5)
        shown = {sheet["name"]: sheet["source"] for sheet in page_data(doubtful)["occurs"]}
        small = {name: [small_image(doubtful / "source" / name / f"{n}.png") for n in range(4)] for name in ("red",)}
        assert shown["red"] == [small["red"][3], small["red"][1]]
        assert shown["blue"] == [small_image(doubtful / "source" / "blue" / f"{n}.png") for n in (0, 1)], "one sample"
        assert shown["green"] == []

    def test_images_of_page_2_lie_at_equal_steps_of_the_score(self, doubtful: Path) -> None:
        asked, target = ask(doubtful, budget=5), read_target(doubtful)
        rank = np.argsort(np.argsort(target.no_class))
        steps = np.diff(sorted(rank[list(asked.belongs)]))
        assert (len(asked.belongs), min(steps), max(steps)) == (24, 2, 3)
        assert list(asked.belongs) != sorted(asked.belongs, key=lambda i: rank[i]), "in no order"
        listed = [row for row in rows(doubtful / "ask" / "labels.csv") if row["part"] == "belongs"]
        assert [row["path"] for row in listed] == [target.paths[i] for i in asked.belongs]

    @pytest.mark.parametrize(
        ("known", "pages"),
        [
            (ClassSet(by="told"), (0, 24)),
            (ClassSet(by="asked", others=True), (0, 24)),
            (ClassSet(by="noticed", absent=("red",)), (3, 24)),
            (ClassSet(others=False), (3, 0)),
            (ClassSet(others=True, curve=NoClassCurve(-1, 1.5, 1, 0.2)), (3, 0)),
        ],
    )
    def test_what_the_run_was_told_is_not_asked(self, run: Path, known: ClassSet, pages: tuple[int, int]) -> None:
        write_outcome(run, class_set=known)
        asked = ask(run, budget=5)
        assert (len(asked.classes), len(asked.belongs)) == pages

    def test_what_was_answered_is_not_asked_again_and_not_lost(self, doubtful: Path) -> None:
        ask(doubtful, budget=5)
        file = doubtful / "ask" / "labels.csv"
        fill(file, file)
        with pytest.raises(DataError, match="holds 32 labels that would be lost"):
            ask(doubtful, budget=5)
        cdtrans.answer(doubtful, file)
        again = ask(doubtful, budget=5)
        assert (again.classes, again.belongs, len(again.parts)) == ((), (), 5)

    def test_it_says_at_once_how_well_the_labels_will_measure(self, run: Path, capsys: Any) -> None:
        ask(run, budget=30, screen=Screen())
        assert says(capsys.readouterr().out, "18 of 30 images to label measure the accuracy", "about +/- 19 points")

    def test_settings_are_for_a_run_that_is_made(self, run: Path) -> None:
        with raises("settings-without-target"):
            ask(run, backbone="vit_tiny_patch16_224")


def test_informative_images_are_doubtful_and_typical(run: Path) -> None:
    """Twelve groups of five images: of every group one, and not the strange ones at its edge."""
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(12), 5)
    strange = np.where(np.arange(IMAGES) % 5 == 0, 0.3, 0.01)
    features = np.eye(16)[groups] + strange[:, None] * rng.normal(size=(IMAGES, 16))
    change_views(run, after_target=features)
    target = read_target(run)
    chosen = draw_informative(target, 12, set())
    assert sorted(groups[chosen].tolist()) == [*range(12)]
    assert all(i % 5 for i in chosen)
    assert draw_informative(target, 12, set()) == chosen
    sure = replace(target, confidence=np.where(groups < 6, 1.0, 0.1))
    assert np.mean(groups[draw_informative(sure, 4, set())] >= 6) >= 0.75, (
        "the doubtful half weighs twenty times as much"
    )
    closed = set(np.flatnonzero(groups < 10).tolist())
    assert {*groups[draw_informative(target, 100, closed)].tolist()} == {10, 11}
