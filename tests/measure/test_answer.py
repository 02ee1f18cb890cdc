import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdtrans.measure.answer import Answered, answer
from cdtrans.measure.ask import ask
from cdtrans.measure.comparison import EXACT, wilson
from cdtrans.measure.target import read_target
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import calibrated_with, confidences
from labelled_runs import IMAGES, fill, train_with, truth
from support import error_says, says
from tiny_task import CLASSES, tree


@pytest.fixture
def asked(run: Path) -> Path:
    """The run, and labels.csv of 30 questions in its folder `ask`."""
    ask(run, budget=30)
    return run


def questions(run: Path) -> Path:
    return run / "ask" / "labels.csv"


def said(capsys: pytest.CaptureFixture[str], run: Path, labels: Path) -> tuple[Answered, str]:
    result = answer(run, labels, screen=Screen())
    captured = capsys.readouterr()
    return result, " ".join([captured.out, captured.err, *result.sentences()])


def test_accuracy_is_measured_on_the_random_part_only(asked: Path) -> None:
    labels = fill(questions(asked), asked / "l.csv")
    result = answer(asked, labels)
    target = read_target(asked)
    random = [r for r in json.loads((asked / "answers.json").read_text())["labels"] if r["part"] == "random"]
    right = [target.classes[target.predicted[target.find(r["path"])]] == r["label"] for r in random]
    assert (result.images, result.labelled, result.random) == (IMAGES, 30, 18)
    assert result.accuracy is not None
    assert abs(result.accuracy.estimate - sum(right) / 18) < 0.05  # strata of 20 images each
    assert result.accuracy.low < result.accuracy.estimate < result.accuracy.high
    assert answer(asked, fill(questions(asked), labels, informative="red")).accuracy == result.accuracy
    other = answer(asked, fill(questions(asked), labels, random="none of these classes"))
    assert other.accuracy is not None
    assert (other.accuracy.estimate, other.no_class) == (0, 18)


def test_everything_is_stored_and_told(asked: Path) -> None:
    result = answer(asked, fill(questions(asked), asked / "l.csv"))
    stored = json.loads((asked / "answers.json").read_text())
    assert stored["result"] == json.loads(json.dumps(result.summary()))
    assert stored["date"][:2] == "20"
    assert all(truth(entry["path"]) == entry["label"] for entry in stored["labels"])
    text = " ".join(result.sentences())
    assert says(text, "adapted model", "95% interval", "18 random images of 60", "source-only", "sign test")


def test_labels_for_all_images_give_the_exact_accuracy(asked: Path) -> None:
    target = read_target(asked)
    labels = asked / "all.csv"
    labels.write_text("path,label\n" + "".join(f"{p},{truth(p)}\n" for p in target.paths))
    result = answer(asked, labels)
    right = [target.classes[k] == truth(p) for k, p in zip(target.predicted, target.paths, strict=True)]
    assert result.complete
    assert result.accuracy is not None
    assert result.accuracy.low == result.accuracy.high == pytest.approx(sum(right) / IMAGES)
    assert result.comparison is not None
    assert result.comparison.better == "adapted"
    text = " ".join(result.sentences())
    assert says(text, "all 60 images:", EXACT, "better on this target, and the run uses it")
    low, high = wilson(sum(right), IMAGES)
    assert says(text, f"{sum(right) / IMAGES:.1%}, 95% interval {low:.1%} to {high:.1%}"), "as eval prints it"


def test_a_better_model_that_the_run_does_not_use(asked: Path, run: Path) -> None:
    target = read_target(asked)
    labels = asked / "all.csv"
    labels.write_text("path,label\n" + "".join(f"{p},{truth(p)}\n" for p in target.paths))
    (run / "result.json").write_text(json.dumps({"chosen_epoch": 0, "chosen_model": "source", "judged_epoch": 1}))
    result = answer(run, labels)
    assert result.accuracy == result.source != result.adapted
    assert says(" ".join(result.sentences()), "the run uses the other one", "cdtrans choose RUN adapted")
    assert f"'cdtrans choose {run} adapted'" in result.sentences(run)[-1]
    for verdict, words in (("harm", "guard was wrong"), ("better", "guard was right")):
        assert says(replace(result, verdict=verdict).sentences()[-1], words), "whichever model the run uses"
    for verdict in ("unknown", "off", ""):
        assert "guard" not in replace(result, verdict=verdict).sentences()[-1], "it has not judged"
    (run / "result.json").write_text(json.dumps({"chosen_epoch": 0, "chosen_model": "source", "judged_epoch": 0}))
    assert answer(run, labels).comparison is None


@pytest.mark.parametrize("header", ["path,label,probability", "path,label,probability,no_class"])
def test_predictions_are_not_labels(asked: Path, header: str) -> None:
    """They would measure the model by its own opinion."""
    file = asked / "predicted.csv"
    file.write_text(f"{header}\n" + "".join(f"{p},{truth(p)},0.9,0.1\n" for p in read_target(asked).paths))
    with error_says("'probability'", "predictions", "cdtrans ask"):
        answer(asked, file)
    assert not (asked / "answers.json").exists()


def test_the_adapted_model_is_calibrated_by_the_labels(run: Path) -> None:
    """The logits are those of a model that is far too sure. Older runs have recorded none."""
    ask(run, budget=50)
    labels = fill(questions(run), run / "l.csv")
    assert not answer(run, labels).recalibrated
    with np.load(run / "views.npz") as views:
        sure = 1 + 20 * views["confidence_after"].astype(float)
        classes = {"source": views["target_before"], "adapted": views["target_after"]}
    np.savez(run / "logits.npz", **{name: sure[:, None] * np.eye(len(CLASSES))[k] for name, k in classes.items()})
    before = confidences(run).mean()
    told = answer(run, labels)
    assert told.recalibrated
    assert told.adapted is not None
    assert before - 0.1 > told.adapted.estimate == pytest.approx(confidences(run).mean(), abs=1e-3)
    assert "calibrated" in " ".join(told.sentences())
    assert answer(run, labels).adapted == told.adapted, "the same labels again"
    (run / "result.json").write_text((run / "result.json").read_text().replace('"adapted"', '"source"'))
    assert not answer(run, labels).recalibrated
    assert calibrated_with(run, "adapted") == "labels", "as it was left before"


def test_images_that_were_trained_with_do_not_calibrate(run: Path) -> None:
    """The model is sure of the images that it was trained with, and right; it is measured on the others."""
    whole = read_target(run)
    train_with(run, *whole.paths[:20])
    target = read_target(run)
    assert target.rows.tolist() == list(range(20, IMAGES))
    sure = np.where(np.arange(IMAGES) < 20, 40.0, 4.0)
    logits = {name: sure[:, None] * np.eye(len(CLASSES))[whole.adapted_predicted] for name in ("source", "adapted")}
    np.savez(run / "logits.npz", **logits)
    ask(run, budget=1000)
    told = answer(run, fill(questions(run), run / "l.csv"))
    assert told.recalibrated
    assert told.adapted is not None
    assert told.adapted.estimate == pytest.approx(confidences(run)[20:].mean(), abs=1e-3)


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
    result, text = said(capsys, run, tmp_path / "l.csv")
    assert says(text, "4 labels are of images that the model was trained with", "not used to measure")
    assert says(text, "There is no label to measure or calibrate with")
    assert result.labelled == 0
    (tmp_path / "l.csv").write_text("\n".join(["path,label,digest", *lines, f"{target.paths[5]},red,", "y.png,red,"]))
    result, text = said(capsys, run, tmp_path / "l.csv")
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
    asked = {q["path"]: q["part"] for q in json.loads((later / "ask" / "questions.json").read_text())["images"]}
    assert {asked.get(path) for path in first} == {"random", "informative", None}, "so that all cases are tested"
    result, text = said(capsys, later, labels)
    assert (result.random, result.labelled) == (18, 18)
    elsewhere = sum(asked.get(path) != "random" for path in first)
    assert says(text, "12 labels are of images that the model was trained with")
    assert says(text, f"{elsewhere} labels are of a random part that was drawn for another run")
    second = {path for path, part in asked.items() if part == "random"}
    result, _ = said(capsys, later, fill(questions(later), tmp_path / "second.csv"))
    assert result.random == len(first | second)
    measured = {e["path"] for e in json.loads((later / "answers.json").read_text())["labels"] if e["part"] == "random"}
    assert measured == first | second


def test_an_open_comparison_says_what_would_decide_it(asked: Path) -> None:
    result = answer(asked, fill(questions(asked), asked / "l.csv"))
    assert result.comparison is not None
    assert result.comparison.better == "open"
    open_ = replace(result.comparison, more_labels=17)
    assert says(" ".join(replace(result, comparison=open_).sentences()), "do not decide", "About 17 more random labels")
    close = replace(result.comparison, more_labels=None)
    assert says(" ".join(replace(result, comparison=close).sentences()), "too close", f"{close.disagree} of 60 images")
    same = replace(result.comparison, better="neither", disagree=0)
    assert says(" ".join(replace(result, comparison=same).sentences()), "neither is better")


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
    assert answer(asked, elsewhere / "labels.csv").labelled == 7
    stored = json.loads((asked / "answers.json").read_text())["labels"]
    assert [entry["path"] for entry in stored] == list(target.paths[:7])


def test_answers_add_up_and_newer_ones_replace_older_ones(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(asked, fill(questions(asked), asked / "l.csv", informative=""))
    result, text = said(capsys, asked, fill(questions(asked), asked / "l.csv", random=""))
    assert (result.labelled, result.random) == (30, 18)
    assert says(text, "12 of 30 rows have a label", "18 labels of earlier answers")
    _, text = said(capsys, asked, fill(questions(asked), asked / "l.csv", all="red"))
    assert says(text, "had another label before", "replaced", "All labels are 'red'")


def test_unsure_is_left_out_and_mentioned(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = fill(questions(asked), asked / "l.csv")
    lines = labels.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.endswith(",random"))
    lines[at] = lines[at].split(",")[0] + ",unsure,random"
    labels.write_text("\n".join(lines))
    result, text = said(capsys, asked, labels)
    assert (result.random, result.unsure, result.labelled) == (17, 1, 29)
    assert says(text, "1 random image is marked 'unsure' and left out")


def test_only_informative_labels_give_no_accuracy(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, text = said(capsys, asked, fill(questions(asked), asked / "l.csv", random=""))
    assert result.accuracy is None
    assert result.comparison is None
    assert says(text, "12 labels are stored, but none is of the random part")
    assert len(json.loads((asked / "answers.json").read_text())["labels"]) == 12


def test_labels_of_the_users_own_choice_are_kept_but_do_not_measure(run: Path) -> None:
    paths = read_target(run).paths[:4]
    (run / "own.csv").write_text("path,label\n" + "".join(f"{p},{truth(p)}\n" for p in paths))
    assert answer(run, run / "own.csv").accuracy is None
    (run / "parts.csv").write_text("path,label,part\n" + "".join(f"{p},{truth(p)},random\n" for p in paths))
    assert answer(run, run / "parts.csv").random == 4, "the questions are gone, but the CSV of `ask` says it"


def test_contradicting_labels_are_left_out_and_repeated_ones_count_once(
    asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = read_target(asked).paths[:3]
    (asked / "l.csv").write_text(f"path,label\n{a},red\n{a},blue\n{b},red\n{b},red\n{c},green\n")
    result, text = said(capsys, asked, asked / "l.csv")
    assert result.labelled == 2
    assert says(text, "contradicting", f"{a}: blue or red", "1 repeated")


def test_images_that_are_not_in_the_target_are_skipped(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = read_target(asked).paths[0]
    (asked / "l.csv").write_text(f"path,label\nstrange.png,red\n{known},red\nother.png,red\n")
    result, text = said(capsys, asked, asked / "l.csv")
    assert result.labelled == 1
    assert says(text, "2 of 3", "not in the target", "'strange.png'", "skipped")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"path,label\n{0},redd\n{1},gren\n", ["'redd'", "line 2", "1 more", "unknown", "did you mean 'red'"]),
        (b"path,label\nnowhere.png,red\n", ["not in the target", "relative to"]),
        (b"path,label\n{0},\n{1},\n", ["2 rows", "no label yet"]),
        (b"", ["empty"]),
        (b"\n \n", ["empty"]),
        (b"image,class\n{0},red\n", ["'path' and 'label'", "'image', 'class'"]),
        (b"\x89PNG\r\n\x1a\n\0\0", ["neither a CSV nor a JSON"]),
        (b'{"a": 1}', ["Label Studio"]),
        (b'[{"id": 3}]', ["Label Studio"]),
        (b"[1", ["Label Studio"]),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_lost(asked: Path, content: bytes, words: list[str]) -> None:
    answer(asked, fill(questions(asked), asked / "l.csv"))
    paths = read_target(asked).paths
    for n in range(2):
        content = content.replace(b"{%d}" % n, paths[n].encode())
    (asked / "bad.csv").write_bytes(content)
    before = tree(asked)
    with error_says("bad.csv", *words):
        answer(asked, asked / "bad.csv")
    assert tree(asked) == before


def test_a_label_that_means_a_class_and_another_answer_is_refused(asked: Path) -> None:
    for model in ("source", "adapted"):
        (asked / model / "model.json").write_text(json.dumps({"classes": [*CLASSES[1:], "unsure"]}))
    with error_says("'unsure'", "rename"):
        answer(asked, fill(questions(asked), asked / "l.csv", all="unsure"))
    assert not (asked / "answers.json").exists()
    assert answer(asked, fill(questions(asked), asked / "l.csv", all=CLASSES[1])).random > 0, "other labels are clear"


def test_a_file_that_is_none(asked: Path) -> None:
    with error_says("does not exist", "cdtrans ask"):
        answer(asked, asked / "missing.csv")
    with error_says("a folder", "cdtrans eval"):
        answer(asked, asked / "ask")


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
        text = json.dumps(tasks)
    elif shape == "min":
        text = json.dumps([task["data"] | {"label": truth(p)} for task, p in zip(tasks, paths, strict=True)][1:])
    elif shape == "old Mac":
        text = "path,label\r" + "".join(f"{p},{truth(p)}\r" for p in paths[1:])
    else:
        text = "\ufeffLabel;Path\r\n" + "".join(f"{truth(p)};{p}\r\n" for p in paths[1:])
    (asked / "export").write_text(text, encoding="utf-8", newline="")
    assert answer(asked, asked / "export").labelled == 29
    assert {entry["label"] for entry in json.loads((asked / "answers.json").read_text())["labels"]} == set(CLASSES)
