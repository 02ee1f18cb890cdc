"""The user's word about the target (--answers): its way in, its effect, and measuring afterwards."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdtrans
from cdtrans.config import Config
from cdtrans.errors import CdtransError
from cdtrans.inputs.decode import Decoded
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.matching import read_target
from cdtrans.measure.measured import evaluate
from cdtrans.methods import method_class
from cdtrans.record.probabilities import fit_curve
from cdtrans.record.record import RunRecord
from cdtrans.reporting.page import write_report
from cdtrans.run.answers import Given, told_classes
from cdtrans.runtime.screen import Screen
from commands import warm
from labelled_runs import truth
from support import raises, says
from tiny_task import CLASSES, Task, make_task, tree

SOURCES = Path(cdtrans.__file__).parent
GIVEN = ("00.png", "01.png", "02.png", "05.png")


def write(file: Path, *lines: str, header: str = "path,label") -> Path:
    file.write_text("\n".join((header, *lines, "")))
    return file


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("labels"), source_epochs=1, epochs=2, rebuild_every=1, save_every=30)
    write(task.folder / "labels.csv", *(f"{name},{truth(name)}" for name in GIVEN))
    return task


def command(task: Task, out: Path, labels: Path, *flags: str) -> list[str]:
    method = ("--method", "cotraining", "--set", "length=0.01")
    return task.adapt(out, *method, "--answers", str(labels), *flags)


@pytest.fixture(scope="module")
def trained(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    ended = warm().run(command(task, out, task.folder / "labels.csv"), out.parent / "logs")
    assert ended.code == 0, ended.err
    assert "The run trains with the labels of 4 of 21 target images" in ended.err + ended.out
    return out


def test_only_one_module_makes_them() -> None:
    makers = [f.relative_to(SOURCES) for f in SOURCES.rglob("*.py") if re.search(r"\bTargetLabels\(", f.read_text())]
    assert sorted(map(str, makers)) == ["pairing/pairs.py", "run/answers.py"], "the first is the class"


@pytest.mark.slow
class TestRun:
    def test_result_card_and_folder_say_so(self, trained: Path) -> None:
        assert RunRecord(trained).outcome.target_labels == 4
        assert json.loads((trained / "adapted" / "model.json").read_text())["target_labels"] == 4
        assert json.loads((trained / "source" / "model.json").read_text())["target_labels"] == 0
        with open(trained / "given-answers.csv", newline="") as lines:
            assert {row["path"]: row["label"] for row in csv.DictReader(lines)} == {n: truth(n) for n in GIVEN}

    def test_killed_and_resumed_is_undisturbed(self, task: Task, trained: Path, tmp_path: Path) -> None:
        out, labels = tmp_path / "run", task.folder / "labels.csv"
        crash = {"name": "state.pt", "when": "after", "nth": 11}
        assert warm().run(command(task, out, labels, "--save-every", "0"), tmp_path / "logs", crash=crash).code == -9
        assert not (out / "result.json").exists()
        others = write(tmp_path / "labels.csv", f"00.png,{truth('01.png')}")
        kept = labels.read_text()
        labels.write_text(others.read_text())
        ended = warm().run(command(task, out, labels), tmp_path / "logs")
        labels.write_text(kept)
        assert ended.code == 2
        assert "have changed" in ended.err, "labels that were changed meanwhile are noticed"
        assert warm().run(command(task, out, labels), tmp_path / "logs").code == 0
        assert tree(out) == tree(trained)

    def test_labels_that_have_changed_since_it_was_finished(self, task: Task, trained: Path, tmp_path: Path) -> None:
        out, labels = Path(shutil.copytree(trained, tmp_path / "run")), task.folder / "labels.csv"
        before, kept = tree(out), labels.read_text()
        said = []
        for more in ("", f"06.png,{truth('06.png')}\n", "06.png,unsure\n"):  # the last is not trained with
            labels.write_text(kept + more)
            ended = warm().run(command(task, out, labels), tmp_path / "logs")
            assert ended.code == 0, ended.err
            said.append("have changed since this run was made with them; give another --out" in ended.err)
        labels.write_text("path,label\nstrange.png,red\n")
        said.append("have changed since" in warm().run(command(task, out, labels), tmp_path / "logs").err)
        labels.write_text(kept)
        assert said == [False, True, False, True]
        assert tree(out) == before

    def test_eval_leaves_the_images_out(self, task: Task, trained: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(trained, tmp_path / "run"))
        lines = [f"{path} {truth(path.name)}" for path in sorted(task.target.iterdir())]
        (tmp_path / "all.txt").write_text("\n".join(lines))
        measured = evaluate(run, tmp_path / "all.txt", screen=Screen(quiet=True), device="cpu")
        assert (measured.images, measured.trained_with, measured.target, measured.whole_target) == (17, 4, 17, True)
        (tmp_path / "few.txt").write_text("\n".join(line for line in lines if line.split()[0][-6:] in GIVEN))
        with pytest.raises(CdtransError, match="trained with the labels of all"):
            evaluate(run, tmp_path / "few.txt", screen=Screen(quiet=True), device="cpu")

    def test_ask_and_answer_leave_them_out(self, task: Task, trained: Path, tmp_path: Path, capsys: Any) -> None:
        run = Path(shutil.copytree(trained, tmp_path / "run"))
        target = read_target(RunRecord(run))
        assert len(target) == 17
        assert not {*GIVEN} & {*target.paths}
        asked = cdtrans.ask(run, budget=21)
        assert len(asked.parts) == 17
        labels = write(tmp_path / "l.csv", *(f"{p.name},{truth(p.name)}" for p in task.target.iterdir()))
        result = cdtrans.answer(run, labels, screen=Screen())
        assert says("".join(capsys.readouterr()), "4 labels are of images that the model was trained with")
        assert result.measured.whole_target
        assert result.measured.images == 17
        predicted = target.predicted[result.measured.model]
        right = np.mean([CLASSES[k] == truth(p) for k, p in zip(predicted, target.paths, strict=True)])
        assert result.measured.accuracy == pytest.approx(right)

    def test_another_method_refuses_them(self, task: Task, tmp_path: Path) -> None:
        flags = ["--method", "dann", "--answers", str(task.folder / "labels.csv")]
        ended = warm().run(task.adapt(tmp_path / "run", *flags), tmp_path / "logs")
        assert ended.code == 2
        assert says(ended.err, "This method cannot train with labels", "No label in", "or the method takes none")
        assert not (tmp_path / "run").exists()

    def test_other_classes_on_the_command_line(self, task: Task, tmp_path: Path) -> None:
        file = write(tmp_path / "l.csv", "00.png,none of these classes,belongs", header="path,label,part")
        for word, problem in (("no", "images of no class, and none"), ("maybe", "must be true or false")):
            ended = warm().run(command(task, tmp_path / "run", file, "--other-classes", word), tmp_path / "logs")
            assert ended.code == 2
            assert says(ended.err, problem)
            assert not (tmp_path / "run").exists()

    def test_another_method_takes_classes_and_curve(self, task: Task, tmp_path: Path) -> None:
        lines = [",red,,absent", ",blue,,occurs", "00.png,none of these classes,,belongs", "01.png,green,,"]
        file = write(tmp_path / "l.csv", *lines, header="path,label,digest,part")
        ended = warm().run(task.adapt(tmp_path / "run", "--method", "dann", "--answers", str(file)), tmp_path / "logs")
        assert ended.code == 0, ended.err
        assert says(ended.err + ended.out, "cannot train with labels", "1 class does not occur: 'red'", "1 of 1 image")
        record = RunRecord(tmp_path / "run")
        found = record.outcome.class_set
        assert (found.absent, found.by, found.others) == (("red",), "asked", True)
        assert found.curve is not None
        assert 0 < found.curve.share < 1
        assert (record.outcome.target_labels, record.trained_labels) == (0, ())
        assert record.card("adapted").classes == ("blue", "green")

    def test_the_report_says_so(self, trained: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(trained, tmp_path / "run"))
        page = write_report(RunRecord(run), Screen(quiet=True)).read_text()
        assert "trained with the labels of 4 target images" in page


class TestFile:
    """Files of labels, and an error for each that cannot be used."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Decoded[UnlabelledDomain]:
        domain = UnlabelledDomain(tmp_path, ("a.png", "b.png", "c.png"))
        pixels = np.zeros((3, 8, 8, 3), np.uint8)
        return Decoded(domain, pixels, np.arange(3), ("da", "db", "dc"))

    def read(self, file: Path, target: Decoded[UnlabelledDomain], method: str = "instant", **settings: Any) -> Given:
        config = Config(answers=str(file), resize=8, **settings)
        return Given.read(config, CLASSES, target, method_class(method), Screen())

    def given(self, file: Path, target: Decoded[UnlabelledDomain]) -> dict[int, int]:
        return self.read(file, target).labels

    def test_all_three_kinds(self, tmp_path: Path, target: Any, capsys: Any) -> None:
        lines = (",red,absent", ",green,", "a.png,one of these classes,belongs", "b.png,none of these classes,belongs")
        lines += ("c.png,unsure,belongs", "a.png,green,informative", "b.png,heaps of sand,group")
        file = write(tmp_path / "l.csv", *lines, header="path,label,part")
        given = self.read(file, target)
        assert (given.occurring, given.class_source, given.others) == (("blue", "green"), "asked", True)
        assert (given.none, given.labels) == ({0: False, 1: True}, {0: 1})
        assert says("".join(capsys.readouterr()), "1 row has no answer yet", "not occur: 'red'", "1 of 2 images")
        told = self.read(file, target, target_classes=["blue", "green"], other_classes=True)
        assert told.class_source == "told"
        other = self.read(file, target, "dann")
        assert (other.labels, other.none) == ({}, given.none)
        assert "cannot train with labels" in capsys.readouterr().err
        assert len({given.digest(), told.digest(), other.digest(), Given().digest()}) == 3, "told is a setting"
        belongs = [f"{name}.png,one of these classes,belongs" for name in "abc"]
        for lines, others in ((belongs[:1], None), (belongs, False)):  # one image says nothing of the others
            given = self.read(write(file, *lines, header="path,label,part"), target)
            assert (given.others, given.occurring) == (others, None)

    def test_the_curve_is_fitted_to_the_scores_of_the_answered_images(self) -> None:
        scores = np.linspace(-1.7, 1.7, 9)
        curve = Given(none={4: False, 7: True}).curve(scores)
        assert curve == fit_curve(scores, scores[[4, 7]], np.array([False, True]))
        assert Given().curve(scores) is None

    @pytest.mark.parametrize(
        ("lines", "settings", "code"),
        [
            ((",red,absent", ",red,occurs"), {}, "answers-contradict"),
            ((",red,absent", "a.png,red,"), {}, "answers-contradict"),
            ((",red,absent",), {"target_classes": ["red", "blue"]}, "answers-contradict"),
            ((",red,occurs",), {"target_classes": ["green", "blue"]}, "answers-contradict"),
            (("a.png,red,",), {"target_classes": ["green", "blue"]}, "answers-contradict"),
            (("a.png,none of these classes,belongs",), {"other_classes": False}, "answers-contradict"),
            ((",red,absent", ",blue,absent"), {}, "too-few-classes"),
            ((",purple,absent",), {}, "class-unknown"),
            (("a.png,red,belongs",), {}, "class-unknown"),
            ((",red,",), {}, "no-label"),
        ],
    )
    def test_answers_that_cannot_all_be_true(
        self, lines: tuple[str, ...], settings: dict[str, Any], code: str, tmp_path: Path
    ) -> None:
        file = write(tmp_path / "l.csv", *lines, header="path,label,part")
        with raises(code):
            Given.require(Config(answers=str(file), **settings), CLASSES)

    def test_told_classes(self, tmp_path: Path) -> None:
        many = tuple(f"class number {k}" for k in range(40))  # as one text too long for the name of a file
        odd = ("caf\udce9", "x,y", "z")  # a folder may be named in other bytes than UTF-8
        file = tmp_path / "names.txt"
        file.write_bytes(b"caf\xe9\r\nx,y\n\n")
        for told, classes, found in (
            (",".join(many[:39]), many, many[:39]),
            (str(file), odd, odd[:2]),
            (["z", "x,y"], odd, odd[1:]),
            ("all", odd, odd),
            ("z, all", ("all", "z"), ("all", "z")),
        ):
            assert told_classes(Config(target_classes=told), classes) == list(found)
        for told, code in (("z", "too-few-classes"), ("z,y", "class-unknown"), ([], "too-few-classes")):
            with raises(code):
                told_classes(Config(target_classes=told), odd)

    def test_the_random_part_is_left_to_measure_with(self, tmp_path: Path, target: Any, capsys: Any) -> None:
        lines = ("a.png,red,random", "b.png,green,informative", "c.png,blue,")
        file = write(tmp_path / "l.csv", *lines, header="path,label,part")
        assert self.given(file, target) == {1: 1, 2: 0}
        assert says("".join(capsys.readouterr()), "1 label of the random part is kept for measuring")

    def test_by_digest(self, tmp_path: Path, target: Any) -> None:
        file = write(tmp_path / "l.csv", "moved/elsewhere.png,red,dc", header="path,label,digest")
        assert self.given(file, target) == {2: 2}

    @pytest.mark.parametrize(
        ("lines", "code"),
        [
            (("a.png,unsure", "b.png,none of these classes"), "no-label-to-train-with"),
            (("a.png,", "b.png,"), "no-label"),
            (("x.png,red",), "images-not-in-target"),
            (("a.png,purple",), "class-unknown"),
        ],
    )
    def test_nothing_to_train_with(self, lines: tuple[str, ...], code: str, tmp_path: Path, target: Any) -> None:
        with raises(code):
            self.given(write(tmp_path / "l.csv", *lines), target)

    def test_one_class_and_all_images(self, tmp_path: Path, target: Any, capsys: Any) -> None:
        self.given(write(tmp_path / "l.csv", "a.png,red", "b.png,red", "c.png,red"), target)
        assert says("".join(capsys.readouterr()), "are 'red'; if the target has", "Every target image has a label")

    def test_a_wrong_file_is_refused_before_anything_is_decoded(self, tmp_path: Path) -> None:
        purple = write(tmp_path / "l.csv", "a.png,purple")
        for file, code in ((tmp_path / "none.csv", "no-labels-file"), (purple, "class-unknown")):
            with raises(code):
                Given.require(Config(answers=str(file)), CLASSES)
        Given.require(Config(), CLASSES)
