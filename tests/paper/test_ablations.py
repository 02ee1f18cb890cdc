"""`cdtrans ablate losses` on the tiny task: what is run, what the table says, and going on after a kill."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ablation_task import make_key, run, start, true_classes
from cdtrans.config import SETTINGS, compose_run
from cdtrans.errors import CdtransError
from cdtrans.inputs.pixels import list_stores
from cdtrans.paper.ablation_rows import LOSSES, PSEUDO_LABELS, Ablation
from cdtrans.paper.ablations import ablate, make_plan, read_scored
from cdtrans.paper.known_pairs import SampledPairsOptions
from cdtrans.paper.noise import Study
from cdtrans.paper.pair_quality import UNKNOWN, Answers, check_of_target, measure, read_answers
from cdtrans.paper.printed_tables import paper_table
from cdtrans.record.run_folder import read_result
from cdtrans.reporting.page import write_report
from cdtrans.runtime.screen import Screen
from cdtrans.studies.folder import owned
from cdtrans.studies.results import KINDS, SCORED
from commands import warm
from support import error_says, says
from tiny_task import CLASSES, Task, after_stage_1, computed, log_lines, make_task, tree

SMALL = {"source_epochs": 2, "epochs": 2, "rebuild_every": 1}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("task"), **SMALL)
    make_key(task)
    return task


def read(out: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return record


def answers_of(task: Task, key: Path, **settings: Any) -> Answers:
    config, _ = compose_run(task.source, task.target, None, task.config, settings)
    return read_answers(config, key, Screen(quiet=True))


@pytest.fixture(scope="module")
def losses(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ablation that nothing disturbed."""
    out = tmp_path_factory.mktemp("losses") / "out"
    ended = run(task, "losses", out)
    assert ended.code == 0, ended.err
    assert f"5 of 5 runs are finished: {out / 'losses.md'}" in ended.out
    return out


@pytest.fixture(scope="module")
def given(task: Task, losses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same from the stage 1 of one of its rows, with a key of two images."""
    out = tmp_path_factory.mktemp("given") / "out"
    (task.folder / "part.txt").write_text("target/00.png blue\ntarget/01.png green\n")
    key, row = str(task.folder / "part.txt"), str(losses / "cls-dtl-cls")
    ended = run(task, "losses", out, "--key", key, "--source-model", row, "--jobs", "2")
    assert ended.code == 0, ended.err
    return out


@pytest.mark.slow
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
        plain, row = computed(tmp_path / "plain"), computed(losses / "cls-dtl-cls")
        assert {name: row[name] for name in plain} == plain
        assert set(row) - set(plain) == {SCORED, "evaluation.json"}
        assert after_stage_1(losses / "cls-dtl-cls") == after_stage_1(tmp_path / "plain")

    def test_all_rows_start_from_the_first_one_s_stage_1(self, losses: Path) -> None:
        first = losses / "cls-none-none"
        for variant in LOSSES.variants[1:]:
            assert log_lines(losses / variant.folder)[0]["run"] == str(first)
            assert tree(losses / variant.folder / "source") == tree(first / "source")
        rows = read(losses, "losses")["rows"]
        assert {row["stage_1"] for row in rows} == {"cls-none-none"}
        assert len({str(row["scores"]["source_only"]) for row in rows}) == 1
        text = (losses / "losses.md").read_text(encoding="utf-8")
        assert "Stage 1 was trained once for these 5 runs" in text

    def test_killed_while_all_others_wait_it_goes_on_and_comes_to_the_same(
        self, losses: Path, task: Task, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        killed = start(task, "losses", out, "--jobs", "3")
        assert killed.wait_until(lambda: (out / "cls-none-none" / "state").exists())
        killed.send(9)
        assert killed.wait().code == -9
        assert [file.parent.name for file in out.glob("*/config.yaml")] == ["cls-none-none"]
        assert run(task, "losses", out, "--jobs", "3").code == 0
        for variant in LOSSES.variants:
            assert computed(out / variant.folder) == computed(losses / variant.folder)

    def test_all_rows_start_from_a_given_one(self, losses: Path, given: Path) -> None:
        row = losses / "cls-dtl-cls"
        assert {row["stage_1"] for row in read(given, "losses")["rows"]} == {str(row)}
        text = (given / "losses.md").read_text(encoding="utf-8")
        assert f"Not in the cost, since the table has no such run: {row}." in text

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
        assert says(text, str(task.folder / "key.txt"), "scored with them, after training", "no row was trained with")
        assert "UNFINISHED" not in text
        assert "Cost: 5 runs" in text

    def test_a_row_that_ended_before_stage_2_has_no_last_epoch(self, losses: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(losses / "cls-dtl-cls", tmp_path / "row"))
        told = json.loads((folder / SCORED).read_text())
        first = {name: values[:1] for name, values in told.items() if name.endswith("_by_epoch")}
        (folder / SCORED).write_text(json.dumps(told | first | {"best_by_labels_epoch": 0}))
        scored = read_scored(folder, tmp_path)
        assert scored is not None
        assert list(scored.scores) == ["source_only", "label_free"]
        assert scored.scores["source_only"]["accuracy"] == told["accuracy_by_epoch"][0]

    def test_without_a_score_of_every_epoch_there_is_no_row(self, losses: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(losses / "cls-dtl-cls", tmp_path / "row"))
        told = json.loads((folder / SCORED).read_text())
        del told["accuracy_by_epoch"]
        (folder / SCORED).write_text(json.dumps(told))
        with pytest.raises(CdtransError, match=r"row/eval.json' has no score of every epoch.*delete the file"):
            read_scored(folder, tmp_path)

    def test_a_key_of_part_of_the_target_is_enough_and_the_table_says_of_how_much(
        self, losses: Path, given: Path
    ) -> None:
        assert "Scored on 21 of the target's 21 images." in (losses / "losses.md").read_text(encoding="utf-8")
        assert "Scored on 2 of the target's 21 images." in (given / "losses.md").read_text(encoding="utf-8")
        assert all(list(row["scores"]) == list(KINDS) for row in read(given, "losses")["rows"])

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

    def test_the_guard_is_on_in_all_rows_or_in_none(self, losses: Path, task: Task, tmp_path: Path) -> None:
        assert "(guard: False there, True now)" in run(task, "losses", losses, "--guard").err
        out = Path(shutil.copytree(losses, tmp_path / "out"))
        older = {k: v for k, v in json.loads((out / "ablation.json").read_text()).items() if k != "guard"}
        (out / "ablation.json").write_text(json.dumps(older))
        assert run(task, "losses", out).code == 0, "before it was recorded it was off unless told otherwise"

    @pytest.mark.parametrize("text", ["recipe: best\n", "", "recipe: authors\n"])
    def test_the_recipe_of_a_file_is_that_of_the_plan(self, task: Task, tmp_path: Path, text: str) -> None:
        """The runs get the file, so the plan must not name another recipe."""
        file = tmp_path / "settings.yaml"
        file.write_text(f"{text}pretrained: false\ndevice: cpu\n")
        how = {"key": task.folder / "key.txt", "out": tmp_path / "out", "preset": None, "config": file, "force": False}
        plan = make_plan(PSEUDO_LABELS, task.source, task.target, {}, screen=Screen(quiet=True), **how)
        assert plan.config.recipe == ("best" if "best" in text else "authors")

    @pytest.mark.parametrize("text", ["", '{"lr": 0.0', "3"])
    def test_a_damaged_record_is_one_sentence(self, task: Task, tmp_path: Path, text: str) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "ablation.json").write_text(text)
        ended = run(task, "losses", tmp_path / "out")
        assert ended.code == 2
        assert says(ended.err, f"'{tmp_path / 'out' / 'ablation.json'}'", "damaged", "--out")

    def test_what_is_left_out_is_said(self, losses: Path) -> None:
        text = (losses / "losses.md").read_text(encoding="utf-8")
        assert "all three branches run and pass through the head's BatchNorm" in text

    def test_a_folder_from_before_a_setting_existed_had_its_default(
        self, losses: Path, task: Task, tmp_path: Path
    ) -> None:
        out = Path(shutil.copytree(losses, tmp_path / "out"))
        older = {k: v for k, v in json.loads((out / "ablation.json").read_text()).items() if k != "mutual_pairs"}
        (out / "ablation.json").write_text(json.dumps(older))
        ended = run(task, "losses", out, "--mutual-pairs", "once")
        assert ended.code == 2
        assert says(ended.err, "another ablation", "mutual_pairs: twice there, once now")
        assert run(task, "losses", out).code == 0

    @pytest.mark.parametrize(("first", "second"), [((), ("--mutual-pairs", "once")), (("--mutual-pairs", "once"), ())])
    def test_an_option_of_the_method_is_part_of_the_recipe_given_or_not(
        self, task: Task, tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
    ) -> None:
        plans = [
            make_plan(
                *(LOSSES, task.source, task.target, {"mutual_pairs": flags[1]} if flags else {}),
                key=task.folder / "key.txt",
                out=tmp_path / "out",
                preset=None,
                config=task.config,
                force=False,
                screen=Screen(quiet=True),
            )
            for flags in (first, second)
        ]
        with owned(tmp_path / "out", "ablation.json", plans[0].recipe(), "an ablation"):
            pass
        recipe = plans[1].recipe()
        with (
            error_says("another ablation", "mutual_pairs"),
            owned(tmp_path / "out", "ablation.json", recipe, "an ablation"),
        ):
            pass

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
            ({"key": "strange.txt"}, ["'purple'", "strange.txt", "unknown to the model"]),
            ({"key": "source"}, ["source'", "is in the target", "TARGET"]),
            ({"key": "mixed.txt"}, ["1 of the 2", "mixed.txt'", "red/00.png"]),
            ({"key": "target"}, ["labelled images cannot be used", "target' holds images but no class folders"]),
            ({"source": "nowhere"}, ["nowhere"]),
            ({"target": "nowhere"}, ["nowhere"]),
            ({"lr": "fast"}, ["'lr'", "fast"]),
            ({"source_model": "nowhere"}, ["nowhere", "has no finished stage 1"]),
            ({"pairing": "ground_truth"}, ["'ground_truth'", "'pairing'", "two_way"]),
            ({"resize": "9"}, ["resized to 9", "cropped to 16"]),
            ({"method": "rpll"}, ["'losses'", "'loss_source'", "'rpll'", "'method'"]),
            ({"method": "ground_truth"}, ["'ground_truth'", "target labels"]),
            ({"method": "cdtrnas"}, ["'cdtrnas'", "did you mean 'cdtrans'?"]),
            ({"mutual_pairs": "thrice"}, ["'thrice'", "'mutual_pairs'"]),
            ({"out": "key.txt/below"}, ["key.txt/below' cannot be written: Not a directory; choose another --out."]),
        ],
    )
    def test_bad_input_is_one_sentence_and_writes_nothing(
        self, task: Task, tmp_path: Path, change: dict[str, str], words: list[str]
    ) -> None:
        (task.folder / "strange.txt").write_text("target/00.png purple\n")
        (task.folder / "mixed.txt").write_text("target/00.png blue\nsource/red/00.png red\n")
        how = {"source": task.source, "target": task.target, "key": task.folder / "key.txt", "config": task.config}
        how["out"] = tmp_path / "out"
        for name, value in change.items():
            how[name] = task.folder / value if name in (*how, "source_model") else value
        with error_says(*words):
            ablate(LOSSES, screen=Screen(quiet=True), **how)
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pseudo_labels(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pseudo-labels") / "out"
    ended = run(task, "pseudo-labels", out)
    assert ended.code == 0, ended.err
    return out


@pytest.mark.slow
class TestPseudoLabels:
    def test_the_rows_are_the_papers_in_its_order(self) -> None:
        assert [v.paper for v in PSEUDO_LABELS.variants] == [row.method for row in paper_table("pseudo-labels")]

    @pytest.mark.parametrize(
        ("row", "recalls"),
        [
            ("one-way-source", (True, False)),
            ("one-way-target", (False, True)),
            ("two-way", (True, True)),
        ],
    )
    def test_unfiltered_pairs_have_all_of_the_side_they_start_from(
        self, pseudo_labels: Path, row: str, recalls: tuple[bool, bool]
    ) -> None:
        record = next(r for r in read(pseudo_labels, "pseudo-labels")["rows"] if r["run"] == row)
        assert len(record["pairs"]) == 2
        for quality in record["pairs"]:
            assert (quality["recall_source"] == 1, quality["recall_target"] == 1) == recalls
            assert quality["pairs"] == 24 * recalls[0] + 21 * recalls[1]

    def test_recall_and_precision_are_those_of_the_saved_pairs_and_the_key(self, pseudo_labels: Path) -> None:
        for row in read(pseudo_labels, "pseudo-labels")["rows"]:
            if row["settings"]["method"] in ("rpll", "mrkld_lrent"):
                assert "pairs" not in row
                continue
            true = true_classes(pseudo_labels / row["run"])
            for quality in row["pairs"]:
                file = pseudo_labels / row["run"] / "pairs" / f"round-{quality['round']:02}.npz"
                with np.load(file) as arrays:
                    kept = np.flatnonzero(arrays["kept"])
                    source, target = arrays["source"][kept].tolist(), arrays["target"][kept].tolist()
                    labels = arrays["source_labels"][kept].tolist()
                right = [true[t] == label for t, label in zip(target, labels, strict=True)]
                assert quality == {
                    "round": quality["round"],
                    "pairs": len(kept),
                    "recall_source": len(set(source)) / 24,
                    "recall_target": len(set(target)) / 21,
                    "precision": sum(right) / len(right),
                }

    def test_the_table_has_the_pairs_beside_the_papers_and_none_where_there_are_none(self, pseudo_labels: Path) -> None:
        text = (pseudo_labels / "pseudo-labels.md").read_text(encoding="utf-8")
        rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
        assert rows["| One-way-source"][-4:] == ["100.", "6.6", "90.6", "76.6 |"]
        last = read(pseudo_labels, "pseudo-labels")["rows"][3]["pairs"][-1]
        shares = [last[name] for name in ("recall_source", "recall_target", "precision")]
        assert rows["| Tw + Ca"][1:4] == [f"{100 * share:.1f}" for share in shares]
        assert "as many as there are pairs: the number of steps differs." in text
        for name in ("| RPLL", "| MRKLD+LRENT"):
            assert rows[name][1:4] == ["–"] * 3
            assert "–" not in rows[name][4:8]

    def test_the_other_methods_train_on_their_own_losses(self, pseudo_labels: Path) -> None:
        logged = {"rpll": {"source", "target"}, "mrkld-lrent": {"source", "target", "divergence"}}
        for folder, names in logged.items():
            lines = [line for line in log_lines(pseudo_labels / folder) if line.get("stage") == "adaptation"]
            for line in lines:
                assert {name for name in line if name.startswith("loss")} == {f"loss_{name}" for name in names}
        config = yaml.safe_load((pseudo_labels / "rpll" / "config.yaml").read_text())
        assert (config["method"], config["method_args"]) == ("rpll", {})

    def test_a_run_of_another_method_killed_continues_and_comes_to_the_same(
        self, pseudo_labels: Path, task: Task, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        killed = warm().start(task.adapt(out, "--method", "mrkld_lrent"), tmp_path / "logs")
        assert killed.wait_until(lambda: (out / "predictions" / "epoch-001.npz").exists())
        killed.send(9)
        assert killed.wait().code == -9
        assert warm().run(task.adapt(out, "--method", "mrkld_lrent"), tmp_path / "logs").code == 0
        ours, row = computed(out), computed(pseudo_labels / "mrkld-lrent")
        assert {name: row[name] for name in ours} == ours
        assert after_stage_1(out) == after_stage_1(pseudo_labels / "mrkld-lrent")

    def test_the_row_of_the_whole_method_has_the_bytes_of_a_plain_run(
        self, pseudo_labels: Path, task: Task, tmp_path: Path
    ) -> None:
        assert warm().run(task.adapt(tmp_path / "plain"), tmp_path / "logs").code == 0
        plain, row = computed(tmp_path / "plain"), computed(pseudo_labels / "two-way-center-aware")
        assert {name: row[name] for name in plain} == plain

    def test_a_key_of_part_of_the_target_judges_that_part(self, pseudo_labels: Path, task: Task) -> None:
        run = pseudo_labels / "two-way"
        key = task.folder / "some.txt"
        key.write_text("".join((task.folder / "key.txt").read_text().splitlines(keepends=True)[:5]))
        true = answers_of(task, key).of_target(run)
        assert sorted(true.tolist()) == sorted([UNKNOWN] * 16 + [0, 1, 2, 0, 1])
        known = {i for i, label in enumerate(true.tolist()) if label != UNKNOWN}
        assert {i: true[i] for i in known} == {i: label for i, label in true_classes(run).items() if i in known}
        assert all(quality.precision is not None for quality in measure(run, true, sources=24))
        assert all(quality.precision is None for quality in measure(run, np.full(21, UNKNOWN), sources=24))

    def test_ground_truth_has_all_images_in_true_pairs_of_their_nearest(self, pseudo_labels: Path) -> None:
        row = read(pseudo_labels, "pseudo-labels")["rows"][-1]
        assert row["run"] == "ground-truth"
        assert row["trained_with_key"]
        for quality in row["pairs"]:
            assert (quality["recall_source"], quality["recall_target"], quality["precision"]) == (1, 1, 1)
            assert quality["pairs"] == 24 + 21
        with np.load(pseudo_labels / "ground-truth" / "pairs" / "round-01.npz") as arrays:
            found = set(zip(arrays["source"].tolist(), arrays["target"].tolist(), strict=True))
        with np.load(pseudo_labels / "two-way" / "pairs" / "round-01.npz") as arrays:
            right = arrays["source_labels"] == [true_classes(pseudo_labels / "two-way")[t] for t in arrays["target"]]
            nearest = set(zip(arrays["source"][right].tolist(), arrays["target"][right].tolist(), strict=True))
        assert nearest, "the same model: where the nearest image is of one's class, it is the nearest of the class too"
        assert nearest <= found

    def test_only_the_row_with_ground_truth_was_trained_with_the_key(self, pseudo_labels: Path) -> None:
        rows = read(pseudo_labels, "pseudo-labels")["rows"]
        assert [row["row"] for row in rows if row["trained_with_key"]] == ["Groundtruth"]
        for row in rows:
            config = yaml.safe_load((pseudo_labels / row["run"] / "config.yaml").read_text())
            assert (config["method"] == "ground_truth") == row["trained_with_key"]
        text = (pseudo_labels / "pseudo-labels.md").read_text(encoding="utf-8")
        assert says(text, "Groundtruth was also trained with", "no other row was")

    def test_whoever_opens_a_run_that_had_the_key_is_told(
        self, task: Task, pseudo_labels: Path, tmp_path: Path
    ) -> None:
        for name, with_key in (("ground-truth", True), ("two-way", False)):
            run = pseudo_labels / name
            assert read_result(run)["trained_with_key"] is with_key
            ended = warm().run(["predict", str(run), str(task.target), "--device", "cpu"], tmp_path / "logs")
            assert ("was trained with target labels" in ended.err) == with_key
            page = write_report(run, Screen(quiet=True)).read_text(encoding="utf-8")
            assert ("trained with target labels" in page) == with_key
            assert ("training used them" in page) == with_key
            assert ("did not use them" in page) != with_key
            (run / "report.html").unlink()

    def test_adapt_refuses_ground_truth_even_in_the_folder_of_such_a_run(
        self, pseudo_labels: Path, task: Task, tmp_path: Path
    ) -> None:
        for out in (tmp_path / "out", pseudo_labels / "ground-truth"):
            ended = warm().run(task.adapt(out, "--method", "ground_truth"), tmp_path / "logs")
            assert ended.code == 2
            assert says(ended.err, "error: ", "'ground_truth'", "target labels", "'adapt' does not")
        assert not (tmp_path / "out").exists()


def test_a_configuration_with_another_method_changes_no_row(task: Task, tmp_path: Path) -> None:
    config = tmp_path / "self.yaml"
    config.write_text(task.config.read_text() + "method: mrkld_lrent\nmethod_args: {divergence: 0.3}\n")
    how = {"key": task.folder / "key.txt", "preset": None, "config": config, "force": True}
    plan = make_plan(PSEUDO_LABELS, task.source, task.target, {}, out=tmp_path, screen=Screen(quiet=True), **how)
    for planned in plan.runs():
        own = {"rpll": "rpll", "mrkld-lrent": "mrkld_lrent", "ground-truth": "ground_truth"}
        assert [word for word in planned.adapt if word.startswith("--method")] == [
            f"--method={own.get(planned.name, 'cdtrans')}"
        ]
        assert ("--set=divergence=0.3" in planned.adapt) == (planned.name == "mrkld-lrent"), "which alone has it"
        assert "--force" in planned.adapt


def test_a_shared_option_goes_to_the_rows_whose_method_has_it(task: Task, tmp_path: Path) -> None:
    how = {"key": task.folder / "key.txt", "preset": None, "config": task.config, "force": False}
    given = {"mutual_pairs": "once", "detach_teacher": True}
    plan = make_plan(PSEUDO_LABELS, task.source, task.target, given, out=tmp_path, screen=Screen(quiet=True), **how)
    for planned in plan.runs():
        branches = planned.name not in ("rpll", "mrkld-lrent")
        assert ('--set=mutual_pairs="once"' in planned.adapt) == branches
        assert ("--set=detach_teacher=true" in planned.adapt) == branches
        assert not any("mutual-pairs" in word for word in planned.adapt)


class TestKey:
    def test_the_target_is_decoded_once_for_the_check_the_runs_and_the_key(self, task: Task, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        check_of_target(answers_of(task, task.folder / "key.txt", cache=str(cache)), task.folder / "key.txt")
        (store,) = list_stores(cache)
        assert (store.root, store.images) == (task.target.resolve(), 21)

    def test_copies_and_streams_are_known_by_their_pixels(self, task: Task, tmp_path: Path) -> None:
        for n in range(21):
            (tmp_path / "key" / CLASSES[n % 3]).mkdir(parents=True, exist_ok=True)
            shutil.copy(task.target / f"{n:02}.png", tmp_path / "key" / CLASSES[n % 3])
        for how in ({"pixels": "stream"}, {"cache": str(tmp_path / "cache")}):
            answers = answers_of(task, tmp_path / "key", **how)
            check_of_target(answers, tmp_path / "key")
            assert sorted(answers.by_digest.values()) == [0] * 7 + [1] * 7 + [2] * 7

    def test_nothing_is_decoded_of_a_key_that_is_the_target(self, task: Task, tmp_path: Path) -> None:
        key = task.folder / "key.txt"
        config, _ = compose_run(task.source, key, None, task.config, {"cache": str(tmp_path / "cache")})
        check_of_target(read_answers(config, key, Screen(quiet=True)), key)
        assert not (tmp_path / "cache").exists()


ABLATIONS = [LOSSES, PSEUDO_LABELS, Ablation("noise", "", (), Study((50,), (1,), 9).variants())]


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_row_decides_all_that_rows_differ_in(ablation: Ablation) -> None:
    """Else a configuration would decide it for some rows, and the table would not say so."""
    of_method: dict[str, set[str]] = {}
    for variant in ablation.variants:
        of_method.setdefault(variant.settings.get("method", ""), set()).update(variant.settings)
        assert ("method" in variant.settings) == ("method" in ablation.varied)
    for variant in ablation.variants:
        assert set(variant.settings) == of_method[variant.settings.get("method", "")]
    assert set.union(*of_method.values()) == set(ablation.varied)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_rows_differ_in_stage_2_alone(ablation: Ablation) -> None:
    """Else they could not share stage 1. Runs of another seed are in another folder, and share nothing."""
    stage_2 = {"Stage 2: adaptation", "Method: cdtrans"}
    own = {f.name for f in fields(SampledPairsOptions)}  # of the method that Fig. 2b has
    settings = [name for name in ablation.varied if name not in own | {"seed"}]
    assert {SETTINGS[name].metadata["group"] for name in settings} <= stage_2
    seeds = {}
    for variant in ablation.variants:
        seeds.setdefault(Path(variant.folder).parent, set()).add(variant.settings.get("seed"))
    assert all(len(found) == 1 for found in seeds.values())


@pytest.mark.slow
def test_the_verbs_and_that_a_row_decides_its_own_settings(tmp_path: Path) -> None:
    shown = warm().run(["ablate", "--help"], tmp_path).out
    assert all(verb in shown for verb in ("losses", "pseudo-labels", "noise", "attention"))
    assert "with-key" not in shown, "a row of a table, not a way to adapt"
    for ablation, other in ((LOSSES, PSEUDO_LABELS), (PSEUDO_LABELS, LOSSES)):
        shown = warm().run(["ablate", ablation.name, "--help-all"], tmp_path).out.replace("--[no-]", "--")
        assert "--key" in shown
        assert "--source-epochs" in shown
        assert not [name for name in {*ablation.varied, "method"} if f"--{name.replace('_', '-')} " in shown]
        assert all(f"--{name.replace('_', '-')} " in shown for name in other.varied if name != "method")
        assert "--set " not in shown, "whose options it would be is not said"
