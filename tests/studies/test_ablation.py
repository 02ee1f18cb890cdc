"""`cdtrans ablate losses` and `pseudo-labels` on the tiny task: runs, tables, and going on after a kill."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablation_task import make_labels, run, true_classes
from cdtrans.config import SETTINGS, compose, compose_run
from cdtrans.errors import CdtransError
from cdtrans.inputs.pixels import list_stores
from cdtrans.paper.pair_labels import UNKNOWN, TargetClasses, pair_quality, read_target_classes, require_target_images
from cdtrans.paper.printed_tables import Ablation, paper_ablation, paper_table
from cdtrans.record.record import RunRecord
from cdtrans.reporting.page import write_report
from cdtrans.runtime.screen import Screen
from cdtrans.studies.ablation import DEFAULTS, AblationPlan, ablate_losses, make_plan
from cdtrans.studies.results import SCORE_TITLES, FinishedRuns
from cdtrans.studies.study import owned
from commands import warm
from damages import check_damages
from support import raises, says
from tiny_task import CLASSES, Task, after_stage_1, computed, log_lines, make_task, tree

SMALL = {"source_epochs": 2, "epochs": 2, "rebuild_every": 1}
QUIET = Screen(quiet=True)
LOSS_ABLATION, PSEUDO_LABEL_ABLATION = paper_ablation("losses"), paper_ablation("pseudo-labels")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("task"), **SMALL)
    make_labels(task)
    return task


def read(out: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return record


def planned(
    task: Task, out: Path, ablation: Ablation = PSEUDO_LABEL_ABLATION, config: Path | None = None, **settings: Any
) -> AblationPlan:
    composed, _ = compose_run(task.source, task.target, config or task.config, settings, DEFAULTS)
    return make_plan(ablation, composed, task.folder / "labels.txt", out, QUIET, force=True)


def classes_of(task: Task, labels: Path, **settings: Any) -> TargetClasses:
    config, _ = compose_run(task.source, task.target, task.config, settings)
    return read_target_classes(config, labels, QUIET)


@pytest.fixture(scope="module")
def losses(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ablation that nothing disturbed."""
    out = tmp_path_factory.mktemp("losses") / "out"
    ended = run(task, "losses", out)
    assert ended.code == 0, ended.err
    assert f"5 of 5 runs are finished: {out / 'losses.md'}" in ended.out
    return out


@pytest.mark.slow
class TestLosses:
    def test_each_row_is_an_ordinary_run_with_its_own_losses(self, losses: Path) -> None:
        assert [variant.paper for variant in LOSS_ABLATION.variants] == [*paper_table("losses")]
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
            assert "labels.txt" not in (losses / folder / "config.yaml").read_text(), "no run knows the labels"
        assert sorted(p.name for p in losses.iterdir() if p.is_dir()) == sorted(logged)

    def test_the_last_row_has_the_bytes_of_a_plain_run(self, losses: Path, task: Task, tmp_path: Path) -> None:
        assert warm().run(task.adapt(tmp_path / "plain"), tmp_path / "logs").code == 0
        plain, row = computed(tmp_path / "plain"), computed(losses / "cls-dtl-cls")
        assert {name: row[name] for name in plain} == plain
        assert set(row) - set(plain) == {"evaluation.json"}
        assert after_stage_1(losses / "cls-dtl-cls") == after_stage_1(tmp_path / "plain")

    def test_all_rows_start_from_the_first_one_s_stage_1(self, losses: Path) -> None:
        first = losses / "cls-none-none"
        for variant in LOSS_ABLATION.variants[1:]:
            assert log_lines(losses / variant.folder)[0]["run"] == str(first)
            assert tree(losses / variant.folder / "source") == tree(first / "source")
        rows = read(losses, "losses")["rows"]
        assert {row["stage_1"] for row in rows} == {"cls-none-none"}
        assert len({str(row["scores"]["source_only"]) for row in rows}) == 1
        assert "Stage 1 was trained once for these 5 runs" in (losses / "losses.md").read_text(encoding="utf-8")

    def test_a_finished_one_is_not_run_again_and_another_recipe_is_refused(self, losses: Path, task: Task) -> None:
        before = {file: file.stat().st_mtime_ns for file in losses.rglob("*.safetensors")}
        assert "5 runs, 5 finished already" in run(task, "losses", losses).out
        ended = run(task, "losses", losses, "--lr", "0.07")
        assert ended.code == 2
        assert says(ended.err, "another ablation's runs", "lr: 0.05 there, 0.07 now", "--out")
        assert {file: file.stat().st_mtime_ns for file in losses.rglob("*.safetensors")} == before

    def test_a_given_stage_1_and_labels_of_a_part_of_the_target(self, losses: Path, task: Task, tmp_path: Path) -> None:
        (task.folder / "part.txt").write_text("target/00.png blue\ntarget/01.png green\n")
        part, row = str(task.folder / "part.txt"), losses / "cls-dtl-cls"
        ended = run(task, "losses", tmp_path / "out", "--labels", part, "--source-model", str(row), "--jobs", "2")
        assert ended.code == 0, ended.err
        rows = read(tmp_path / "out", "losses")["rows"]
        assert {row["stage_1"] for row in rows} == {str(row_of) for row_of in [row]}
        assert all(list(row["scores"]) == list(SCORE_TITLES) for row in rows)
        text = (tmp_path / "out" / "losses.md").read_text(encoding="utf-8")
        assert f"Not in the cost, since the table has no such run: {row}." in text
        assert "Scored on 2 of the target's 21 images." in text

    def test_the_table_has_the_scores_of_eval_beside_the_paper_s(self, losses: Path, task: Task) -> None:
        record, text = read(losses, "losses"), (losses / "losses.md").read_text(encoding="utf-8")
        assert record["unfinished"] == []
        for row, paper in zip(record["rows"], paper_table("losses").values(), strict=True):
            epochs = json.loads((losses / row["run"] / "evaluation.json").read_text())["epochs"]
            assert list(row["scores"]) == list(SCORE_TITLES)
            chosen = {"source_only": 0, "last_epoch": -1} | row["epochs"]
            for key, metric in (("scores", "accuracy"), ("class_means", "class_mean_accuracy")):
                assert row[key] == {kind: epochs[epoch][metric] for kind, epoch in chosen.items()}
            assert row["paper"] == paper
        rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
        assert [row.split(" | ")[-1] for row in rows] == ["67.1 |", "86.0 |", "86.7 |", "87.7 |", "88.4 |"]
        last = record["rows"][-1]
        assert rows[-1].startswith("| cls | dtl | cls | ")
        assert (
            rows[-1].split(" | ")[4]
            == f"{100 * last['scores']['last_epoch']:.1f} ({100 * last['class_means']['last_epoch']:.1f})"
        )
        assert says(
            text, str(task.folder / "labels.txt"), "scored with them, after training", "no row was trained with"
        )
        assert says(
            text, "Scored on 21 of the target's 21 images.", "Cost: 5 runs", "pass through the head's BatchNorm"
        )


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (None, {"labels": "nowhere"}),
        (None, {"labels": "strange.txt"}),
        (None, {"labels": "target"}),
        (None, {"source": "nowhere"}),
        (None, {"target": "nowhere"}),
        (None, {"lr": "fast"}),
        (None, {"source_model": "nowhere"}),
        (None, {"pairing": "ground_truth"}),
        (None, {"resize": "9"}),
        (None, {"method": "ground_truth"}),
        (None, {"method": "cdtrnas"}),
        ("labels-not-of-target", {"labels": "source"}),
        ("labels-not-of-target", {"labels": "mixed.txt"}),
        ("ablation-method", {"method": "rpll"}),
        ("out-not-writable", {"out": "labels.txt/below"}),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    task: Task, tmp_path: Path, code: str | None, change: dict[str, str]
) -> None:
    (task.folder / "strange.txt").write_text("target/00.png purple\n")
    (task.folder / "mixed.txt").write_text("target/00.png blue\nsource/red/00.png red\n")
    how = {"source": task.source, "target": task.target, "labels": task.folder / "labels.txt", "config": task.config}
    how["out"] = tmp_path / "out"
    for name, value in change.items():
        how[name] = task.folder / value if name in (*how, "source_model") else value
    with raises(code) if code else pytest.raises(CdtransError):
        ablate_losses(screen=QUIET, **how)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pseudo_labels(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pseudo-labels") / "out"
    ended = run(task, "pseudo-labels", out)
    assert ended.code == 0, ended.err
    return out


@pytest.mark.slow
class TestPseudoLabels:
    def test_the_quality_of_pairs_is_that_of_the_saved_pairs_and_the_labels(self, pseudo_labels: Path) -> None:
        rows = {row["run"]: row for row in read(pseudo_labels, "pseudo-labels")["rows"]}
        assert [v.paper for v in PSEUDO_LABEL_ABLATION.variants] == [*paper_table("pseudo-labels")]
        assert [name for name, row in rows.items() if "pairs" not in row] == ["rpll", "mrkld-lrent"]
        for name, row in rows.items():
            true = true_classes(pseudo_labels / name)
            for quality in row.get("pairs", ()):
                pairs = RunRecord(pseudo_labels / name).rounds[quality["round"]]
                source, target, labels = (x[pairs.kept] for x in (pairs.source, pairs.target, pairs.source_labels))
                assert quality == {
                    "round": quality["round"],
                    "pairs": pairs.kept.sum(),
                    "recall_source": len(set(source.tolist())) / 24,
                    "recall_target": len(set(target.tolist())) / 21,
                    "precision": pytest.approx((true[target] == labels).mean()),
                }
        complete = {
            "one-way-source": (24, True, False),
            "one-way-target": (21, False, True),
            "two-way": (45, True, True),
        }
        for name, (pairs, of_source, of_target) in complete.items():
            for quality in rows[name]["pairs"]:
                assert (quality["recall_source"] == 1, quality["recall_target"] == 1) == (of_source, of_target)
                assert quality["pairs"] == pairs

    def test_the_table_has_the_pairs_beside_the_papers_and_none_where_there_are_none(self, pseudo_labels: Path) -> None:
        text = (pseudo_labels / "pseudo-labels.md").read_text(encoding="utf-8")
        rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
        assert rows["| One-way-source"][-4:] == ["100.", "6.6", "90.6", "76.6 |"]
        last = read(pseudo_labels, "pseudo-labels")["rows"][3]["pairs"][-1]
        shares = [last[name] for name in ("recall_source", "recall_target", "precision")]
        assert rows["| Tw + Ca"][1:4] == [f"{100 * share:.1f}" for share in shares]
        for name in ("| RPLL", "| MRKLD+LRENT"):
            assert rows[name][1:4] == ["–"] * 3
            assert "–" not in rows[name][4:8]

    def test_the_other_methods_train_on_their_own_losses(self, pseudo_labels: Path) -> None:
        logged = {"rpll": {"source", "target"}, "mrkld-lrent": {"source", "target", "divergence"}}
        for folder, names in logged.items():
            for line in log_lines(pseudo_labels / folder):
                if line.get("stage") == "adaptation":
                    assert {name for name in line if name.startswith("loss")} == {f"loss_{name}" for name in names}

    def test_labels_of_part_of_the_target_judge_that_part(self, pseudo_labels: Path, task: Task) -> None:
        record = RunRecord(pseudo_labels / "two-way")
        some = task.folder / "some.txt"
        some.write_text("".join((task.folder / "labels.txt").read_text().splitlines(keepends=True)[:5]))
        true = classes_of(task, some).in_order(record)
        assert sorted(true.tolist()) == sorted([UNKNOWN] * 16 + [0, 1, 2, 0, 1])
        known = true != UNKNOWN
        assert (true[known] == true_classes(record.folder)[known]).all()
        assert all(quality.precision is not None for quality in pair_quality(record, true))
        assert all(quality.precision is None for quality in pair_quality(record, np.full(21, UNKNOWN)))

    def test_a_damaged_file_costs_only_its_own_row(
        self, pseudo_labels: Path, task: Task, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        two = replace(PSEUDO_LABEL_ABLATION, variants=PSEUDO_LABEL_ABLATION.variants[1:3])
        plan = planned(task, pseudo_labels, two)
        monkeypatch.setattr(AblationPlan, "write_files", lambda plan, record, document: record)

        def table(results: FinishedRuns) -> dict[str, Any]:
            return {row["run"]: row for row in plan.write(results)["rows"] if "scores" in row}

        check_damages(pseudo_labels, "two-way", table)

    def test_ground_truth_has_all_images_in_true_pairs_of_their_nearest(self, pseudo_labels: Path) -> None:
        rows = read(pseudo_labels, "pseudo-labels")["rows"]
        for quality in rows[-1]["pairs"]:
            assert (quality["recall_source"], quality["recall_target"], quality["precision"]) == (1, 1, 1)
            assert quality["pairs"] == 24 + 21
        all_pairs, found = (RunRecord(pseudo_labels / name).rounds[1] for name in ("two-way", "ground-truth"))
        right = all_pairs.source_labels == true_classes(pseudo_labels / "two-way")[all_pairs.target]
        nearest = set(zip(all_pairs.source[right].tolist(), all_pairs.target[right].tolist(), strict=True))
        assert nearest, "the same model: where the nearest image is of one's class, it is the nearest of the class too"
        assert nearest <= set(zip(found.source.tolist(), found.target.tolist(), strict=True))

    def test_only_the_row_with_ground_truth_was_trained_with_the_labels_and_says_so(
        self, task: Task, pseudo_labels: Path, tmp_path: Path
    ) -> None:
        rows = read(pseudo_labels, "pseudo-labels")["rows"]
        assert [row["row"] for row in rows if row["trained_with_labels"]] == ["Groundtruth"]
        text = (pseudo_labels / "pseudo-labels.md").read_text(encoding="utf-8")
        assert says(text, "Groundtruth was also trained with", "no other row was")
        for name, with_labels in (("ground-truth", True), ("two-way", False)):
            run = pseudo_labels / name
            assert RunRecord(run).outcome.trained_with_labels is with_labels
            ended = warm().run(["predict", str(run), str(task.target), "--device", "cpu"], tmp_path / "logs")
            assert ("was trained with target labels" in ended.err) == with_labels
            page = write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
            assert ("trained with target labels" in page) == with_labels
            (run / "report.html").unlink()

    def test_adapt_refuses_ground_truth_even_in_the_folder_of_such_a_run(
        self, pseudo_labels: Path, task: Task, tmp_path: Path
    ) -> None:
        for out in (tmp_path / "out", pseudo_labels / "ground-truth"):
            ended = warm().run(task.adapt(out, "--method", "ground_truth"), tmp_path / "logs")
            assert ended.code == 2
            assert says(ended.err, "error: ", "'ground_truth'", "target labels", "'adapt' does not")
        assert not (tmp_path / "out").exists()


class TestPlan:
    @pytest.mark.parametrize("text", ["recipe: best\n", "", "recipe: authors\n"])
    def test_the_recipe_of_a_file_is_that_of_the_plan(self, task: Task, tmp_path: Path, text: str) -> None:
        """The runs get the file, so the plan must not name another recipe."""
        file = tmp_path / "settings.yaml"
        file.write_text(f"{text}pretrained: false\ndevice: cpu\n")
        plan = planned(task, tmp_path / "out", config=file)
        assert plan.config.recipe == ("best" if "best" in text else "authors")

    @pytest.mark.parametrize("first", [{}, {"mutual_pairs": "once"}])
    def test_an_option_of_the_method_is_part_of_the_recipe_given_or_not(
        self, task: Task, tmp_path: Path, first: dict[str, str]
    ) -> None:
        second = {} if first else {"mutual_pairs": "once"}
        recipes = [planned(task, tmp_path / "out", LOSS_ABLATION, **given).recipe() for given in (first, second)]
        with owned(tmp_path / "out", "ablation", recipes[0]):
            pass
        with raises("other-study"), owned(tmp_path / "out", "ablation", recipes[1]):
            pass

    @pytest.mark.parametrize("text", ["", '{"lr": 0.0', "3"])
    def test_a_damaged_recipe_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "ablation.json").write_text(text)
        with pytest.raises(CdtransError, match=r"damaged.*--out"), owned(tmp_path, "ablation", {}):
            pass

    def test_a_configuration_with_another_method_changes_no_row(self, task: Task, tmp_path: Path) -> None:
        config = tmp_path / "self.yaml"
        config.write_text(task.config.read_text() + "method: mrkld_lrent\nmethod_args: {divergence: 0.3}\n")
        for row in planned(task, tmp_path, config=config).runs():
            own = {"rpll": "rpll", "mrkld-lrent": "mrkld_lrent", "ground-truth": "ground_truth"}
            assert row.settings["method"] == own.get(row.name, "cdtrans")
            assert ("divergence" in row.settings["method_args"]) == (row.name == "mrkld-lrent"), "which alone has it"
            assert "--force" in row.adapt

    def test_a_shared_option_goes_to_the_rows_whose_method_has_it(self, task: Task, tmp_path: Path) -> None:
        for row in planned(task, tmp_path, mutual_pairs="once", detach_teacher=True).runs():
            branches = row.name not in ("rpll", "mrkld-lrent")
            assert compose(row.settings).to_dict() == row.settings, "the run arrives at the planned settings"
            options = row.settings["method_args"]
            given = {name: options[name] for name in ("mutual_pairs", "detach_teacher") if name in options}
            assert given == ({"mutual_pairs": "once", "detach_teacher": True} if branches else {})


class TestLabels:
    def test_the_target_is_decoded_once_for_the_check_the_runs_and_the_labels(self, task: Task, tmp_path: Path) -> None:
        labels = task.folder / "labels.txt"
        require_target_images(classes_of(task, labels, cache=str(tmp_path / "cache")), labels)
        (store,) = list_stores(tmp_path / "cache")
        assert (store.root, store.images) == (task.target.resolve(), 21)

    def test_copies_and_streams_are_known_by_their_pixels(self, task: Task, tmp_path: Path) -> None:
        for n in range(21):
            (tmp_path / "labels" / CLASSES[n % 3]).mkdir(parents=True, exist_ok=True)
            shutil.copy(task.target / f"{n:02}.png", tmp_path / "labels" / CLASSES[n % 3])
        for how in ({"pixels": "stream"}, {"cache": str(tmp_path / "cache")}):
            classes = classes_of(task, tmp_path / "labels", **how)
            require_target_images(classes, tmp_path / "labels")
            assert sorted(classes.labels) == [0] * 7 + [1] * 7 + [2] * 7

    def test_nothing_is_decoded_of_labels_that_are_the_target(self, task: Task, tmp_path: Path) -> None:
        labels = task.folder / "labels.txt"
        config, _ = compose_run(task.source, labels, task.config, {"cache": str(tmp_path / "cache")})
        require_target_images(read_target_classes(config, labels, QUIET), labels)
        assert not (tmp_path / "cache").exists()


ABLATIONS = [LOSS_ABLATION, PSEUDO_LABEL_ABLATION]


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_row_decides_all_settings_that_rows_differ_in(ablation: Ablation) -> None:
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
    """Else they could not share stage 1."""
    groups = {SETTINGS[name].metadata["group"] for name in ablation.varied}
    assert groups <= {"Stage 2: adaptation", "Method: cdtrans"}


@pytest.mark.slow
def test_the_verbs_and_that_a_row_decides_its_own_settings(tmp_path: Path) -> None:
    shown = warm().run(["ablate", "--help"], tmp_path).out
    assert all(verb in shown for verb in ("losses", "pseudo-labels"))
    assert "with-labels" not in shown, "a row of a table, not a way to adapt"
    assert "theory" not in shown
    for ablation, other in ((LOSS_ABLATION, PSEUDO_LABEL_ABLATION), (PSEUDO_LABEL_ABLATION, LOSS_ABLATION)):
        shown = warm().run(["ablate", ablation.name, "--help-all"], tmp_path).out.replace("--[no-]", "--")
        assert "--labels" in shown
        assert "--source-epochs" in shown
        assert not [name for name in {*ablation.varied, "method"} if f"--{name.replace('_', '-')} " in shown]
        assert all(f"--{name.replace('_', '-')} " in shown for name in other.varied if name != "method")
        assert "--set " not in shown, "it does not say whose options it would be"
