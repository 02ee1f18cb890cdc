"""`cdtrans ablate losses` on the tiny task: what is run, what the table says, and going on after a kill."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdtrans.errors import CdtransError
from cdtrans.evaluation.ablations import LOSSES, ablate
from cdtrans.evaluation.paper_tables import paper_table
from cdtrans.evaluation.results import KINDS, SCORED
from cdtrans.screen import Screen
from tiny_task import CLASSES, Ended, Process, Task, log_lines, make_task, tree, warm

SMALL = {"source_epochs": 2, "epochs": 2, "rebuild_every": 1}


def make_key(task: Task) -> Path:
    """The target's labels, as a list."""
    key = task.folder / "key.txt"
    key.write_text("".join(f"target/{n:02}.png {CLASSES[n % 3]}\n" for n in range(21)))
    return key


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("task"), **SMALL)
    make_key(task)
    return task


def start(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Process:
    places = [str(task.source), str(task.target), "--key", str(task.folder / "key.txt"), "--out", str(out)]
    arguments = ["ablate", name, *places, "--config", str(task.config), *flags]
    return warm().start(arguments, out.parent / "logs", fork_jobs=True, **how)


def run(task: Task, name: str, out: Path, *flags: str, **how: Any) -> Ended:
    return start(task, name, out, *flags, **how).wait()


def read(out: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return record


@pytest.fixture(scope="module")
def losses(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ablation that nothing disturbed."""
    out = tmp_path_factory.mktemp("losses") / "out"
    ended = run(task, "losses", out)
    assert ended.code == 0, ended.err
    assert f"5 of 5 runs are finished: {out / 'losses.md'}" in ended.out
    return out


class TestLosses:
    def test_the_rows_are_the_papers(self) -> None:
        assert [variant.paper for variant in LOSSES.variants] == [row.method for row in paper_table("losses", 3)]

    def test_each_row_is_an_ordinary_run_with_its_own_losses(self, losses: Path) -> None:
        logged = {
            "cls-none-none": {"source"},
            "none-none-cls": {"target"},
            "cls-none-cls": {"source", "target"},
            "cls-cls-cls": {"source", "target", "source_target"},
            "cls-dtl-cls": {"source", "target", "distillation"},
        }
        for folder, names in logged.items():
            epochs = [line for line in log_lines(losses / folder) if line.get("stage") == "adaptation"]
            assert len(epochs) == 2
            for line in epochs:
                assert {name for name in line if name.startswith("loss")} == {f"loss_{name}" for name in names}
        assert sorted(p.name for p in losses.iterdir() if p.is_dir()) == sorted(logged)

    def test_the_last_row_has_the_bytes_of_a_plain_run(self, losses: Path, task: Task, tmp_path: Path) -> None:
        assert warm().run(task.adapt(tmp_path / "plain"), tmp_path / "logs").code == 0
        plain, row = tree(tmp_path / "plain"), tree(losses / "cls-dtl-cls")
        assert {name: row[name] for name in plain} == plain
        assert set(row) - set(plain) == {SCORED, "evaluation.json"}

    def test_the_scores_are_those_of_eval_beside_the_papers(self, losses: Path) -> None:
        record = read(losses, "losses")
        assert record["unfinished"] == []
        for row, paper in zip(record["rows"], paper_table("losses", 3), strict=True):
            told = json.loads((losses / row["run"] / SCORED).read_text())
            assert list(row["scores"]) == list(KINDS)
            for metric in ("accuracy", "class_mean_accuracy"):
                history = told[f"{metric}_by_epoch"]
                assert row["scores"]["source_only"][metric] == history[0]
                assert row["scores"]["last_epoch"][metric] == history[-1]
                assert row["scores"]["label_free"][metric] == told[metric]
                assert row["scores"]["best_by_labels"][metric] == history[told["best_by_labels_epoch"]]
            assert row["paper"] == paper.cells

    def test_the_table_has_both_and_says_what_the_key_was_for(self, losses: Path, task: Task) -> None:
        text = (losses / "losses.md").read_text(encoding="utf-8")
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert [row.split(" | ")[-1] for row in rows[1:]] == ["67.1 |", "86.0 |", "86.7 |", "87.7 |", "88.4 |"]
        last = read(losses, "losses")["rows"][-1]["scores"]["last_epoch"]
        shown = f"{100 * last['accuracy']:.1f} ({100 * last['class_mean_accuracy']:.1f})"
        assert rows[-1].startswith("| cls | dtl | cls | ")
        assert rows[-1].split(" | ")[4] == shown
        assert f"Answer key: {task.folder / 'key.txt'}. Every number of ours was scored with it, after training" in text
        assert "No row was trained with it." in text
        assert "UNFINISHED" not in text
        assert "Cost: 5 runs" in text

    def test_no_run_is_told_of_the_key(self, losses: Path) -> None:
        for row in read(losses, "losses")["rows"]:
            assert "key.txt" not in (losses / row["run"] / "config.yaml").read_text()

    def test_killed_it_goes_on_and_comes_to_the_same(self, losses: Path, task: Task, tmp_path: Path) -> None:
        out = tmp_path / "out"
        killed = start(task, "losses", out)
        assert killed.wait_until(lambda: (out / "none-none-cls" / "state").exists())
        killed.send(9)
        assert killed.wait().code == -9
        text = (out / "losses.md").read_text(encoding="utf-8")
        assert "UNFINISHED: 4 of 5 runs are missing: none-none-cls, cls-none-cls" in text
        ended = run(task, "losses", out, "--jobs", "2", "--json")
        assert ended.code == 0, ended.err
        told = json.loads(ended.out)
        assert told["out"] == str(out)
        assert told["failed"] == told["unfinished"] == []
        for row, undisturbed in zip(told["rows"], read(losses, "losses")["rows"], strict=True):
            assert {**row, "seconds": 0} == {**undisturbed, "seconds": 0}

    def test_a_finished_one_is_not_run_again(self, losses: Path, task: Task) -> None:
        before = {file: file.stat().st_mtime_ns for file in losses.rglob("*.safetensors")}
        ended = run(task, "losses", losses)
        assert "5 runs, 5 of them finished already" in ended.out
        assert {file: file.stat().st_mtime_ns for file in losses.rglob("*.safetensors")} == before

    def test_another_recipe_is_refused(self, losses: Path, task: Task) -> None:
        ended = run(task, "losses", losses, "--lr", "0.07")
        assert ended.code == 2
        assert "holds another ablation's runs (lr: 0.05 there, 0.07 now); choose another --out." in ended.err

    def test_a_row_that_fails_is_named_and_the_others_go_on(self, losses: Path, task: Task, tmp_path: Path) -> None:
        out = tmp_path / "out"
        (out / "none-none-cls").mkdir(parents=True)
        (out / "none-none-cls" / "mine.txt").write_text("not a run")
        ended = run(task, "losses", out)
        assert ended.code == 2, "a folder of something else is not written to"
        assert f"'{out}' exists and is not an ablation's folder; choose another --out." in ended.err
        shutil.copy(losses / "ablation.json", out)
        for row in ("cls-none-none", "cls-none-cls", "cls-cls-cls"):
            shutil.copytree(losses / row, out / row)
        ended = run(task, "losses", out)
        assert ended.code == 1
        assert "none-none-cls failed: exit code 2, error: " in ended.err
        assert read(out, "losses")["unfinished"] == ["none-none-cls"]
        assert f"4 of 5 runs are finished: {out / 'losses.md'}" in ended.out

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"key": "nowhere"}, ["nowhere"]),
            ({"key": "strange.txt"}, ["'purple'", "strange.txt", "not one the model knows"]),
            ({"source": "nowhere"}, ["nowhere"]),
            ({"target": "nowhere"}, ["nowhere"]),
            ({"lr": "fast"}, ["'lr'", "fast"]),
        ],
    )
    def test_bad_input_is_one_sentence_and_writes_nothing(
        self, task: Task, tmp_path: Path, change: dict[str, str], words: list[str]
    ) -> None:
        (task.folder / "strange.txt").write_text("target/00.png purple\n")
        how = {"source": task.source, "target": task.target, "key": task.folder / "key.txt", "config": task.config}
        for name, value in change.items():
            how[name] = value if name == "lr" else task.folder / value
        with pytest.raises(CdtransError) as caught:
            ablate(LOSSES, out=tmp_path / "out", screen=Screen(quiet=True), **how)
        assert all(word in str(caught.value) for word in words)
        assert not (tmp_path / "out").exists()
