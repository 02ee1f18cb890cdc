"""A run whose target lacks a class of the source: no model of it predicts that class unless it is asked to."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cdtrans
from cdtrans.measure.labels import BELONGS, ONE_CLASS
from cdtrans.measure.measured import answer, evaluate
from cdtrans.record.layout import PREDICTIONS, RESULT
from cdtrans.record.outcome import NO_CLASS, NoClassCurve
from cdtrans.record.probabilities import no_class, no_class_cut
from cdtrans.record.record import RunRecord
from cdtrans.record.run import predictions_of, recalibrate, rewrite
from cdtrans.reporting.page import write_report
from cdtrans.run.choose import choose
from cdtrans.serving.classifier import load
from cdtrans.serving.export import export
from cdtrans.studies.results import read_result
from support import Notes, error_says, raises, says
from tiny_task import CLASSES, QUICK, draw, make_source, make_target

pytestmark = pytest.mark.slow
TOLD = ("blue", "red")
ABSENT = "green"


class Told(NamedTuple):
    """A run that was told that there is no green."""

    run: Path
    target: Path
    labelled: Path  # a list 'path label' of every target image; a third of them are green


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("told")
    source, target = make_source(folder / "source"), make_target(folder / "target")
    settings = QUICK | {"cache": str(folder / "cache"), "target_classes": "blue,red", "report": True}
    run = cdtrans.adapt(source, target, out=folder / "run", quiet=True, **settings).run
    labelled = folder / "labelled.txt"
    names = sorted(path.name for path in target.iterdir())
    labelled.write_text("".join(f"target/{name} {CLASSES[int(name[:2]) % 3]}\n" for name in names))
    return Told(run, target, labelled)


@pytest.fixture
def run(told: Told, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(told.run, tmp_path / "run")


def table(file: Path) -> dict[str, dict[str, str]]:
    with open(file, newline="") as lines:
        return {Path(row["path"]).name: row for row in csv.DictReader(lines)}


@pytest.mark.parametrize("model", ["chosen", "source", "adapted", "last"])
def test_no_model_predicts_an_absent_class(told: Told, model: str) -> None:
    classifier = load(told.run, model=model, device="cpu")
    assert classifier.classes == TOLD
    assert classifier.predict_proba(told.target).shape == (21, 2)
    found = cdtrans.predict(told.run, told.target, model=model, top=3, device="cpu", quiet=True)
    assert {name for p in found.predictions for name, _ in p.top} == {*TOLD}


def test_the_source_only_model_differs_only_in_the_missing_class(told: Told) -> None:
    some, every = (load(told.run, model="source", device="cpu", all_classes=x) for x in (False, True))
    assert every.classes == CLASSES
    p, q = some.predict_proba(told.target), every.predict_proba(told.target)[:, [0, 2]]
    np.testing.assert_allclose(p, q / q.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(some.embed(told.target), every.embed(told.target))
    assert some.digest() != every.digest()


def test_all_classes_are_the_source_only_models_where_it_sees_an_absent_one(told: Told) -> None:
    adapted = load(told.run, model="adapted", device="cpu")
    whole = load(told.run, model="adapted", device="cpu", all_classes=True)
    source = load(told.run, model="source", device="cpu", all_classes=True)
    images = sorted(told.target.iterdir()) + [
        draw(told.target.parent / f"new-{n}.png", 1, seed=300 + n) for n in range(9)
    ]
    p, q, s = (x.predict_proba(images) for x in (whole, adapted, source))
    absent = s.argmax(axis=1) == CLASSES.index(ABSENT)
    assert 0 < absent.sum() < len(images), "both kinds are here"
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(p[absent], s[absent], atol=1e-6)
    np.testing.assert_allclose(p[~absent][:, [0, 2]], q[~absent], atol=1e-6)
    assert (p[~absent][:, 1] == 0).all()
    assert whole.classes == CLASSES
    assert len({adapted.digest(), whole.digest(), source.digest()}) == 3


def test_all_classes_change_nothing_where_every_class_occurs(finished, told: Told) -> None:
    for model in ("adapted", "source"):
        one, other = (load(finished.run, model=model, device="cpu", all_classes=x) for x in (False, True))
        assert one.digest() == other.digest()


def test_predict_writes_every_class_only_if_it_is_asked_to(told: Told, tmp_path: Path) -> None:
    green = [draw(tmp_path / "images" / f"{n}.png", 1, seed=300 + n) for n in range(9)]
    for every in (False, True):
        counts = cdtrans.predict(
            told.run, green[0].parent, csv=tmp_path / "p.csv", all_classes=every, device="cpu", quiet=True
        )
        assert counts.kept == 9
        assert (ABSENT in {row["label"] for row in table(tmp_path / "p.csv").values()}) == every


def test_an_exported_file_has_the_classes_that_occur(told: Told, tmp_path: Path) -> None:
    for model in ("adapted", "source"):
        for name in ("m.safetensors", "m.onnx"):
            exported = export(told.run, tmp_path / name, model=model)
            assert exported.classes == 2
            assert load(tmp_path / name, device="cpu").classes == TOLD
            with error_says("--all-classes needs a run folder"):
                load(tmp_path / name, device="cpu", all_classes=True)
            with error_says("--all-classes needs a run folder"):
                cdtrans.predict(tmp_path / name, told.target, all_classes=True, device="cpu", quiet=True)
    folder = tmp_path / "hub"
    export(told.run, folder, to="hub-folder", model="source")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_classes"], config["label_names"]) == (2, [*TOLD])
    assert "with 2 classes" in (folder / "README.md").read_text()


def test_labels_of_an_absent_class_count_as_wrong(told: Told, run: Path, tmp_path: Path) -> None:
    measured = evaluate(run, told.labelled, device="cpu", quiet=True)
    assert (measured.classes, measured.images, measured.absent) == (CLASSES, 21, 7)
    for scores in (*measured.models.values(), *measured.epochs):
        assert (scores.right[1], scores.images[1]) == (0, 7)
    assert measured.accuracy <= 14 / 21
    table_row = read_result(run, run.parent, "a>b", by_class=True)
    assert table_row.per_class["source_only"][ABSENT] == 0, "as in a table of 'bench'"
    others = tmp_path / "others.txt"
    new = [draw(tmp_path / f"{n}.png", n % 3, seed=500 + n) for n in range(6)]
    others.write_text("".join(f"{path.name} {CLASSES[n % 3]}\n" for n, path in enumerate(new)))
    of_others = evaluate(run, others, model="source", device="cpu", quiet=True)
    assert (of_others.target, of_others.images, of_others.absent) == (None, 6, 2)
    rows = (
        f"{line.split()[0].split('/')[1]},{line.split()[1]},random" for line in told.labelled.read_text().splitlines()
    )
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label,part\n" + "\n".join(rows) + "\n")
    answered = answer(run, labels).measured
    assert answered is not None
    assert (answered.absent, answered.no_class, answered.classes) == (7, 0, CLASSES)
    page = write_report(RunRecord(run), Notes())
    assert "7 images are of classes that the run takes for absent" in page.read_text(encoding="utf-8")


def test_what_is_written_later_knows_the_classes(told: Told, run: Path) -> None:
    """`choose`, a new temperature and the report."""
    assert (run / "report.html").exists()
    for model in ("source", "adapted"):
        choose(run, model)
        recalibrate(RunRecord(run), 2.0)
        labels = {row["label"] for row in table(run / "predictions.csv").values()}
        assert labels <= {*TOLD}
        assert load(run, device="cpu").classes == TOLD


# Images of no class


def with_curve(run: Path, curve: NoClassCurve | None) -> RunRecord:
    """As if a person had answered."""
    outcome = RunRecord(run).outcome
    rewrite(run, RESULT, replace(outcome, class_set=replace(outcome.class_set, curve=curve)))
    return RunRecord(run)


def test_without_answers_the_score_ranks_and_no_label_changes(told: Told) -> None:
    rows, scores = table(told.run / "predictions.csv"), RunRecord(told.run).views.no_class
    paths = RunRecord(told.run).images.paths["target"]
    assert len(scores) == 21
    assert scores.mean() == pytest.approx(0, abs=1e-5)
    for path, score in zip(paths, scores, strict=True):
        assert float(rows[path]["no_class"]) == pytest.approx(1 / (1 + np.exp(-score)), abs=1e-6)
        assert rows[path]["label"] in TOLD


def test_with_answers_images_above_the_cut_are_of_no_class(told: Told, run: Path) -> None:
    curve = NoClassCurve(intercept=-0.5, slope=1.5, cut=0.3, share=0.4)
    record = with_curve(run, curve)
    rewrite(run, PREDICTIONS, predictions_of(record))
    before, after = table(told.run / "predictions.csv"), table(run / "predictions.csv")
    assert {row["label"] for row in after.values()} > {NO_CLASS}
    for path, score in zip(record.images.paths["target"], record.views.no_class, strict=True):
        row, p = after[path], float(no_class(score, curve))
        assert float(row["no_class"]) == pytest.approx(p, abs=1e-6)
        assert (row["label"] == NO_CLASS) == (score > 0.3)
        if score > 0.3:
            assert row["probability"] == row["no_class"]
        else:
            assert (row["label"], row["probability"]) == (before[path]["label"], before[path]["probability"])


def test_predict_relabels_above_a_cut(told: Told, run: Path, tmp_path: Path) -> None:
    scored = load(run, device="cpu", unknown=True).predict(told.target)
    middle = float(np.median([p.no_class for p in scored if p.no_class is not None]))
    above = sum(p.no_class is not None and p.no_class > middle for p in scored)
    screen, file = Notes(), tmp_path / "p.csv"
    counts = cdtrans.predict(run, told.target, csv=file, unknown=middle, abstain=0.6, device="cpu", screen=screen)
    rows = table(file)
    for p in scored:
        assert p.path is not None
        assert p.no_class is not None
        row, kept = rows[p.path.name], p.label if p.probability >= 0.6 else ""
        assert row["label"] == (NO_CLASS if p.no_class > middle else kept)
        assert float(row["no_class"]) == pytest.approx(p.no_class, abs=1e-6)
    assert counts.no_class == above == sum(row["label"] == NO_CLASS for row in rows.values()) > 0
    assert counts.kept + counts.abstained + counts.no_class == counts.images == 21
    assert says("\n".join(screen.lines), NO_CLASS, f"{above} of 21")
    whole = cdtrans.predict(run, told.target, unknown=1, device="cpu", quiet=True)
    assert whole.no_class == 0, "1 only adds the score"
    assert [p.label for p in whole.predictions] == [p.label for p in scored]


def test_auto_is_the_answered_cut(told: Told, run: Path) -> None:
    with raises("no-answered-cut") as caught:
        cdtrans.predict(run, told.target, unknown="auto", device="cpu", quiet=True)
    assert says(str(caught.value), "cdtrans ask")
    curve = NoClassCurve(intercept=-0.5, slope=1.5, cut=0.3, share=0.4)
    with_curve(run, curve)
    auto = cdtrans.predict(run, told.target, unknown="auto", device="cpu", quiet=True)
    cut = float(no_class(np.array(0.3), curve))
    assert 0 < auto.no_class < 21
    for p in auto.predictions:
        assert p.no_class is not None
        assert (p.label == NO_CLASS) == (p.no_class > cut)
    plain = cdtrans.predict(run, told.target, device="cpu", quiet=True)
    assert all(p.no_class is None and p.label != NO_CLASS for p in plain.predictions), "without --unknown as ever"


def test_auto_is_the_cut_of_answers_that_were_read_later(told: Told, run: Path, tmp_path: Path) -> None:
    record = RunRecord(run)
    order = np.argsort(record.views.no_class)
    paths = [record.images.paths["target"][i] for i in order]
    words = {True: NO_CLASS, False: ONE_CLASS}
    labels = tmp_path / "labels.csv"
    labels.write_text(
        "path,label,part\n" + "".join(f"{path},{words[n > 14]},{BELONGS}\n" for n, path in enumerate(paths))
    )
    curve = answer(run, labels).answers.curve
    assert curve is not None
    auto = cdtrans.predict(run, told.target, unknown="auto", device="cpu", quiet=True)
    assert {p.label for p in auto.predictions if p.no_class is not None and p.no_class > no_class_cut(curve)} == {
        NO_CLASS
    }
    assert 0 < auto.no_class < 21
    assert (run / "predictions.csv").read_bytes() == (told.run / "predictions.csv").read_bytes(), "the run's own"


@pytest.mark.parametrize("cut", ["most", "", "1.5", -0.1, 2])
def test_what_is_no_cut_is_refused(told: Told, cut: float | str) -> None:
    with error_says("--unknown"):
        cdtrans.predict(told.run, told.target, unknown=cut, device="cpu", quiet=True)
