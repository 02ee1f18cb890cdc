import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdtrans.measure.intervals import wilson
from cdtrans.measure.labels import read_rows
from cdtrans.measure.matching import RunTarget, read_target as target_of
from cdtrans.measure.measured import Answered, answer
from cdtrans.record import wording
from cdtrans.record.layout import ANSWERS
from cdtrans.record.outcome import Choice, Comparison, Interval, Measured, Scores, Verdict
from cdtrans.record.record import RunRecord
from cdtrans.record.run import lock_folder
from cdtrans.run.ask import ask
from cdtrans.runtime.screen import Screen
from commands import warm
from labelled_runs import IMAGES, fill, train_with, truth, write_outcome
from run_folders import make_card, outcome
from support import raises, says
from tiny_task import CLASSES, tree


@pytest.fixture
def asked(run: Path) -> Path:
    """The run, and labels.csv of 30 questions in its folder `ask`."""
    ask(run, budget=30)
    return run


def questions(run: Path) -> Path:
    return run / "ask" / "labels.csv"


def read_target(run: Path) -> RunTarget:
    return target_of(RunRecord(run))


def all_labels(run: Path) -> Path:
    file = run / "all.csv"
    file.write_text("path,label\n" + "".join(f"{p},{truth(p)}\n" for p in read_target(run).paths))
    return file


def heard(capsys: pytest.CaptureFixture[str], run: Path, labels: Path) -> tuple[Answered, str]:
    """The result, and everything on the screen."""
    result = answer(run, labels, screen=Screen())
    captured = capsys.readouterr()
    sentences = wording.labels_show(result.labelled, result.measured, RunRecord(run).outcome, run)
    return result, " ".join([captured.out, captured.err, *sentences])


def test_accuracy_is_measured_on_the_random_part_only(asked: Path) -> None:
    labels = fill(questions(asked), asked / "l.csv")
    result = answer(asked, labels)
    measured, target, stored = result.measured, read_target(asked), RunRecord(asked).answers
    assert (result.target, result.labelled) == (IMAGES, 30)
    assert (measured.images, measured.random, measured.whole_target) == (18, True, False)
    assert stored.measured == measured
    assert all(truth(entry.path) == entry.label for entry in stored.labels)
    predicted = target.predicted["adapted"]
    random = [entry for entry in stored.labels if entry.part == "random"]
    right = [target.classes[predicted[target.find(entry.path)]] == entry.label for entry in random]
    assert abs(measured.accuracy - sum(right) / 18) < 0.05  # strata of 20 images each
    assert measured.scores.interval.low < measured.accuracy < measured.scores.interval.high
    again = answer(asked, fill(questions(asked), labels, informative="red")).measured
    assert again.scores == measured.scores
    none = answer(asked, fill(questions(asked), labels, random="none of these classes")).measured
    assert (none.accuracy, none.no_class) == (0, 18)


def test_the_report_is_written_again_if_there_is_one(asked: Path) -> None:
    report, labels = asked / "report.html", all_labels(asked)
    answer(asked, labels)
    report.touch(exist_ok=False)  # the run was made without one
    answer(asked, labels)
    assert "Measured accuracy" in report.read_text(encoding="utf-8")


def test_an_epoch_is_measured_as_its_model_is(asked: Path) -> None:
    (asked / "predictions").mkdir()
    for epoch, predicted in enumerate(read_target(asked).predicted.values()):  # source-only and adapted model
        confidence = np.ones(IMAGES, np.float16)
        file = asked / "predictions" / f"epoch-{epoch:03}.npz"
        np.savez(file, predicted=predicted.astype(np.int32), confidence=confidence)
    measured = answer(asked, fill(questions(asked), asked / "l.csv")).measured
    for scores, name in zip(measured.epochs, ("source", "adapted"), strict=True):
        assert replace(measured.models[name], confusion=()) == scores
    summary = measured.summary()
    assert summary["adapted_accuracy_interval"] == summary["accuracy_interval"]


def test_labels_for_all_images_give_the_exact_accuracy(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = read_target(asked)
    result, text = heard(capsys, asked, all_labels(asked))
    measured, true = result.measured, [CLASSES.index(truth(path)) for path in target.paths]
    right = int((target.predicted["adapted"] == true).sum())
    assert measured.whole_target
    assert measured.accuracy == pytest.approx(right / IMAGES)
    assert measured.scores.interval == wilson(right, IMAGES), "for new images like these"
    assert measured.comparison.better == "adapted"
    assert says(text, "all 60 images:", wording.EXACT, "better on this target, and the run uses it")


def test_a_better_model_that_the_run_does_not_use(asked: Path) -> None:
    labels = all_labels(asked)
    first = answer(asked, labels).measured
    write_outcome(asked, choice=Choice("source", 0, "person"))
    measured = answer(asked, labels).measured
    assert measured.scores == measured.models["source"] != first.scores == measured.models["adapted"]
    write_outcome(asked, choice=Choice("source", 0), adapted_epoch=0)
    alone = answer(asked, labels).measured
    assert (alone.comparison, alone.models.keys()) == (None, {"source"})


@pytest.mark.parametrize(
    ("better", "choice", "verdict", "words"),
    [
        ("adapted", Choice("adapted", 2), "better", ["and the run uses it", "guard was right"]),
        ("adapted", Choice("source", 0), "harm", ["run uses the other one; 'cdtrans choose runs/a adapted'", "wrong"]),
        ("source", Choice("adapted", 2), "better", ["run uses the other one; 'cdtrans choose runs/a source'", "wrong"]),
        ("adapted", Choice("source", 0, "person"), "better", ["you chose the other one", "guard was right"]),
        ("open", Choice("adapted", 2), "better", ["do not decide", "About 17 more random labels"]),
        ("neither", Choice("adapted", 2), "unknown", ["neither is better"]),
    ],
)
def test_labels_say_whether_the_right_model_was_chosen(
    better: str, choice: Choice, verdict: str, words: list[str]
) -> None:
    scores = Scores(0.5, Interval(0.3, 0.7), 0.5, Interval(0.3, 0.7), (5,), (10,), ((5,),))
    comparison = Comparison(9, 1, 0.02, better, disagree=20, more_labels=17 if better == "open" else None)
    models = {"source": scores, "adapted": scores}
    measured = Measured("adapted", ("a",), 25, 60, False, models, comparison=comparison, random=True)
    of_run = outcome(choice=choice, verdict=Verdict(verdict, ()))
    text = wording.comparison(measured, of_run, Path("runs/a"))
    assert says(text, *words)
    if better == "open":
        close = replace(measured, comparison=replace(comparison, more_labels=None))
        assert says(wording.comparison(close, of_run, Path("runs/a")), "too close", "20 of 60 images")
        chosen_by_hand = replace(measured, random=False)
        assert "random" not in wording.comparison(chosen_by_hand, of_run, Path("runs/a"))


def test_the_adapted_model_is_calibrated_by_the_labels(run: Path) -> None:
    """Its logits are those of a model that is far too sure."""
    ask(run, budget=50)
    labels = fill(questions(run), run / "l.csv")
    before = RunRecord(run).confidences().mean()
    result = answer(run, labels).measured
    assert result.recalibrated
    assert before - 0.1 > result.accuracy == pytest.approx(RunRecord(run).confidences().mean(), abs=1e-3)
    again = answer(run, labels).measured
    assert again.accuracy == result.accuracy, "the same labels again"
    write_outcome(run, choice=Choice("source", 0))
    source = answer(run, labels).measured
    assert not source.recalibrated
    assert RunRecord(run).calibrated_with("adapted") == "labels", "as it was left before"


def test_images_that_were_trained_with_do_not_calibrate(run: Path) -> None:
    """The model is sure of the images that it was trained with, and right; it is measured on the others."""
    whole = read_target(run)
    train_with(run, *whole.paths[:20])
    assert read_target(run).rows.tolist() == list(range(20, IMAGES))
    sure = np.where(np.arange(IMAGES) < 20, 40.0, 4.0)
    logits = sure[:, None] * np.eye(len(CLASSES))[whole.predicted["adapted"]]
    np.savez(run / "logits.npz", source=logits, adapted=logits)
    ask(run, budget=1000)
    measured = answer(run, fill(questions(run), run / "l.csv")).measured
    assert measured.recalibrated
    assert measured.accuracy == pytest.approx(RunRecord(run).confidences()[20:].mean(), abs=1e-3)
    train_with(run, *whole.paths)
    with raises("nothing-to-measure"):
        answer(run, run / "l.csv")


def test_labels_of_images_that_were_trained_with(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are known by path and by pixels, wherever target and files are now."""
    target = read_target(run)
    train_with(run, *target.paths[:3])
    (tmp_path / "moved").mkdir()
    shutil.copy(target.root / target.paths[0], tmp_path / "moved" / "new.png")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(target.root), str(tmp_path / "gone")))
    lines = [f"{tmp_path / 'moved' / 'new.png'},red,", f"./{target.paths[1]},red,", f"x.png,red,{target.digests[2]}"]
    lines += [f"{tmp_path / 'moved' / 'new.png'},red,0123"]  # a digest of a run at another --resize
    (tmp_path / "l.csv").write_text("\n".join(["path,label,digest", *lines]))
    result, text = heard(capsys, run, tmp_path / "l.csv")
    assert says(text, "4 labels are of images that the model was trained with", "not used to measure")
    assert says(text, "There is no label to measure or calibrate with")
    assert result.labelled == 0
    (tmp_path / "l.csv").write_text("\n".join(["path,label,digest", *lines, f"{target.paths[5]},red,", "y.png,red,"]))
    result, text = heard(capsys, run, tmp_path / "l.csv")
    assert result.labelled == 1
    assert says(text, "1 of 6 labelled images", "'y.png'")


def test_the_random_part_of_an_earlier_run_measures_the_later_one(
    made: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before and after the later run's own questions, also where these chose some of it as informative."""
    ask(run, budget=30)
    labels = fill(questions(run), tmp_path / "first.csv")
    lines = [line.split(",") for line in labels.read_text().splitlines()[1:]]
    first = {path for path, _, part in lines if part == "random"}
    later = Path(shutil.copytree(made, tmp_path / "later"))
    train_with(later, *(path for path, _, part in lines if part == "informative"))
    ask(later, budget=30, seed=1)
    parts = {q.path: q.part for q in RunRecord(later).questions.images}
    assert {parts.get(path) for path in first} == {"random", "informative", None}, "so that all cases are tested"
    result, text = heard(capsys, later, labels)
    assert (result.measured.images, result.labelled) == (18, 18)
    elsewhere = sum(parts.get(path) != "random" for path in first)
    assert says(text, f"{elsewhere} labels are of a random part that was drawn for another run")
    second = {path for path, part in parts.items() if part == "random"}
    result, _ = heard(capsys, later, fill(questions(later), tmp_path / "second.csv"))
    assert {e.path for e in RunRecord(later).answers.labels if e.part == "random"} == first | second


def test_moved_and_renamed_files_are_found_by_their_pixels(asked: Path, tmp_path: Path) -> None:
    target = read_target(asked)
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    lines = ["path,label"]
    for n, path in enumerate(target.paths[:5]):
        shutil.copy(target.root / path, elsewhere / f"new-{n}.png")
        lines.append(f"new-{n}.png,{truth(path)}")
    lines.append(f"{target.root / target.paths[5]},{truth(target.paths[5])}")
    lines.append(f"./{target.paths[6]},{truth(target.paths[6])}")
    (elsewhere / "labels.csv").write_text("\n".join(lines))
    result = answer(asked, elsewhere / "labels.csv")
    assert (result.labelled, result.measured is None) == (7, False), "some of them belong to the random part"
    assert [entry.path for entry in RunRecord(asked).answers.labels] == list(target.paths[:7])


def test_answers_add_up_and_newer_ones_replace_older_ones(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(asked, fill(questions(asked), asked / "l.csv", informative=""))
    result, text = heard(capsys, asked, fill(questions(asked), asked / "l.csv", random=""))
    assert (result.labelled, result.measured.images) == (30, 18)
    assert says(text, "18 rows have no answer yet", "18 labels of earlier answers")
    _, text = heard(capsys, asked, fill(questions(asked), asked / "l.csv", all="red"))
    assert says(text, "had another label before", "replaced", "are 'red'")


def test_unsure_is_left_out_and_mentioned(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = fill(questions(asked), asked / "l.csv")
    lines = labels.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.endswith(",random"))
    lines[at] = lines[at].split(",")[0] + ",unsure,random"
    labels.write_text("\n".join(lines))
    result, text = heard(capsys, asked, labels)
    assert (result.measured.images, result.measured.unsure, result.labelled) == (17, 1, 29)
    assert says(text, "1 random image is marked 'unsure' and left out")


def test_labels_outside_the_random_part_are_kept_and_do_not_measure(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = read_target(run).paths[:4]
    (run / "own.csv").write_text("path,label\n" + "".join(f"{p},{truth(p)}\n" for p in paths))
    result, text = heard(capsys, run, run / "own.csv")
    assert (result.measured, len(RunRecord(run).answers.labels)) == (None, 4)
    assert says(text, "4 labels are stored, but none is of the random part")
    (run / "parts.csv").write_text("path,label,part\n" + "".join(f"{p},{truth(p)},random\n" for p in paths))
    assert answer(run, run / "parts.csv").measured.images == 4, "the questions are gone, but the CSV of `ask` says it"


def test_contradicting_strange_and_repeated_labels(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = read_target(asked).paths[:3]
    (asked / "l.csv").write_text(f"path,label\n{a},red\n{a},blue\n{b},red\n{b},red\n{c},green\nstrange.png,red\n")
    result, text = heard(capsys, asked, asked / "l.csv")
    assert result.labelled == 2
    assert says(text, "contradicting", f"{a}: blue or red", "1 of 6", "'strange.png'", "skipped")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"path,label\n{0},redd\n{1},gren\n", "class-unknown"),
        (b"path,label\nnowhere.png,red\n", "images-not-in-target"),
        (b"path,label\n{0},\n{1},\n", "no-label"),
        (b"path,label,probability\n{0},red,0.9\n", "labels-predicted"),  # the model's own opinion
        (b"\n \n", "labels-empty"),
        (b"image,class\n{0},red\n", "labels-columns"),
        (b"\x89PNG\r\n\x1a\n\0\0", "labels-format"),
        (b'{"a": 1}', "labels-format"),
        (b'[{"id": 3}]', "labels-format"),
        (b"[1", "labels-format"),
    ],
)
def test_an_unusable_file_is_refused_and_nothing_is_lost(asked: Path, content: bytes, code: str) -> None:
    answer(asked, fill(questions(asked), asked / "l.csv"))
    for n, path in enumerate(read_target(asked).paths[:2]):
        content = content.replace(b"{%d}" % n, path.encode())
    (asked / "bad.csv").write_bytes(content)
    before = tree(asked)
    with raises(code):
        answer(asked, asked / "bad.csv")
    assert tree(asked) == before


def test_places_that_are_no_file_of_labels(asked: Path) -> None:
    with raises("no-labels-file"):
        answer(asked, asked / "missing.csv")
    with raises("labels-format"):
        answer(asked, asked / "ask")


def test_a_label_that_means_a_class_and_another_answer_is_refused(asked: Path) -> None:
    for model in ("source", "adapted"):
        make_card(asked / model, (*CLASSES[1:], "unsure"))
    with raises("class-unclear"):
        answer(asked, fill(questions(asked), asked / "l.csv", all="unsure"))
    assert not (asked / ANSWERS.name).exists()
    assert answer(asked, fill(questions(asked), asked / "l.csv", all=CLASSES[1])).measured, "other labels are clear"


@pytest.mark.parametrize("shape", ["full", "min", "semicolons", "old Mac"])
def test_exports_of_other_tools(asked: Path, shape: str) -> None:
    """Label Studio's JSON and JSON-MIN, and what a spreadsheet saves."""
    tasks = json.loads((asked / "ask" / "label-studio.json").read_text())
    paths = [task["data"]["path"] for task in tasks]
    if shape == "full":
        for task, path in zip(tasks, paths, strict=True):
            result = {"type": "choices", "from_name": "label", "value": {"choices": [truth(path)]}}
            cancelled = {"was_cancelled": True, "result": [result | {"value": {"choices": ["red"]}}]}
            task["annotations"] = [cancelled, {"was_cancelled": False, "result": [result]}]
        tasks[0]["annotations"] = []
        tasks[0]["data"]["label"] = "red"  # a column of the user's, and no annotation
        text = json.dumps(tasks)
    elif shape == "min":
        text = json.dumps([task["data"] | {"label": truth(p)} for task, p in zip(tasks, paths, strict=True)][1:])
    elif shape == "old Mac":
        text = "path,label\r" + "".join(f"{p},{truth(p)}\r" for p in paths[1:])
    else:
        text = "\ufeffLabel;Path\r\n" + "".join(f"{truth(p)};{p}\r\n" for p in paths[1:])
    (asked / "export").write_text(text, encoding="utf-8", newline="")
    assert answer(asked, asked / "export").labelled == 29
    assert {entry.label for entry in RunRecord(asked).answers.labels} == set(CLASSES)


@pytest.mark.slow
def test_two_commands_at_once_lose_no_label(asked: Path, tmp_path: Path) -> None:
    lines = fill(questions(asked), tmp_path / "all.csv").read_text().splitlines()
    halves = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for n, file in enumerate(halves):
        file.write_text("\n".join([lines[0], *lines[1 + n :: 2]]) + "\n")
    with lock_folder(asked):  # as the other process holds it
        ended = warm().run(["answer", str(asked), str(halves[0]), "--json"], tmp_path / "logs")
    assert (ended.code, json.loads(ended.out)["error"]["code"]) == (2, "run-locked")
    both = [warm().start(["answer", str(asked), str(file)], tmp_path / "logs") for file in halves]
    for file, process in zip(halves, both, strict=True):
        if process.wait().code == 2:  # it came while the other one had the run
            assert warm().run(["answer", str(asked), str(file)], tmp_path / "logs").code == 0
    assert len(RunRecord(asked).answers.labels) == 30


@pytest.mark.parametrize("name", ["nested", "zero", "blank"])
def test_odd_files_of_labels(asked: Path, tmp_path: Path, name: str) -> None:
    file = Path("/dev/zero") if name == "zero" else tmp_path / "labels.json"
    if name != "zero":
        file.write_text("[" * 100_000 if name == "nested" else "path,label\nx.png,\u2028\n")
    if name == "blank":
        assert [row.label for row in read_rows(file)] == ["\u2028"], "white space that may be the name of a class"
    else:
        with raises("labels-format"):
            answer(asked, file)
