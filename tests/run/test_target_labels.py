"""Labels of target images that the user gives to train with: where they come in, what they change, what they measure
afterwards."""

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
from cdtrans.record.record import RunRecord
from cdtrans.reporting.page import write_report
from cdtrans.run.target_labels import Given
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
    return task.adapt(out, *method, "--target-labels", str(labels), *flags)


@pytest.fixture(scope="module")
def trained(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    ended = warm().run(command(task, out, task.folder / "labels.csv"), out.parent / "logs")
    assert ended.code == 0, ended.err
    assert "The run trains with the labels of 4 of 21 target images" in ended.err + ended.out
    return out


def test_only_one_module_makes_them() -> None:
    makers = [f.relative_to(SOURCES) for f in SOURCES.rglob("*.py") if re.search(r"\bTargetLabels\(", f.read_text())]
    assert sorted(map(str, makers)) == ["pairing/pairs.py", "run/target_labels.py"], "the first is the class"


@pytest.mark.slow
class TestRun:
    def test_result_card_and_folder_say_so(self, trained: Path) -> None:
        assert RunRecord(trained).outcome.target_labels == 4
        assert json.loads((trained / "adapted" / "model.json").read_text())["target_labels"] == 4
        assert json.loads((trained / "source" / "model.json").read_text())["target_labels"] == 0
        with open(trained / "target_labels.csv", newline="") as lines:
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
            said.append("have changed since this run was trained with them; give another --out" in ended.err)
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
        flags = ["--method", "dann", "--target-labels", str(task.folder / "labels.csv")]
        ended = warm().run(task.adapt(tmp_path / "run", *flags), tmp_path / "logs")
        assert ended.code == 2
        assert says(ended.err, "The method 'dann' cannot train with --target-labels")
        assert not (tmp_path / "run").exists()

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

    def given(self, file: Path, target: Decoded[UnlabelledDomain]) -> dict[int, int]:
        return Given.read(Config(target_labels=str(file), resize=8), CLASSES, target, Screen()).labels

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
                Given.require(Config(target_labels=str(file)), CLASSES)
        Given.require(Config(), CLASSES)
