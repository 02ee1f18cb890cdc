"""The figure of noise on the tiny task."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from ablation_task import make_labels, true_classes
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import Screen
from cdtrans.studies.results import RunResult, Spread
from cdtrans.studies.study import BenchResult
from research.figures.noise import CURVES, ONLY_TRUE, WITH, WITHOUT, Levels, Point, ablate_noise, figure, parse_levels
from support import raises, says
from tiny_task import QUICK, Task, log_lines, make_source, make_target, make_task

RUNS = [
    "seed-1234/cross-attention-0",
    "seed-1234/no-cross-attention-0",
    "seed-1234/cross-attention-50",
    "seed-1234/no-cross-attention-50",
    "seed-1234/only-true-pairs-50",
    "seed-1234/cross-attention-100",
    "seed-1234/no-cross-attention-100",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("task"), source_epochs=2, epochs=2, rebuild_every=1)
    make_labels(task)
    return task


def made(task: Task, out: Path, **how: Any) -> BenchResult:
    labels = how.pop("labels", task.folder / "labels.txt")
    settings = {"levels": "0,50,100", "pairs": 20, "config": task.config, "screen": Screen(quiet=True)} | how
    return ablate_noise(task.source, task.target, labels=labels, out=out, **settings)


@pytest.fixture(scope="module")
def noise(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noise") / "out"
    result = made(task, out, jobs=2)
    assert (result.asked, result.finished, result.failed, result.table) == (7, 7, (), "noise.png")
    return out


def read(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "noise.json").read_text(encoding="utf-8"))
    return record


def trained_on(run: Path) -> list[tuple[int, int, int]]:
    """(source, its label, target)"""
    pairs = RunRecord(run).rounds[1]
    columns = (column[pairs.kept].tolist() for column in (pairs.source, pairs.source_labels, pairs.target))
    return list(zip(*columns, strict=True))


@pytest.mark.slow
class TestRuns:
    def test_a_run_for_each_point_but_for_those_that_are_the_same_or_empty(self, noise: Path) -> None:
        assert sorted(f.parent.relative_to(noise).as_posix() for f in noise.rglob("result.json")) == sorted(RUNS)
        for name in RUNS[1:]:
            assert log_lines(noise / name)[0]["run"] == str(noise / RUNS[0]), "one stage 1 for a seed"

    def test_half_of_the_pairs_are_false_or_gone(self, noise: Path) -> None:
        for name, pairs, false in (
            ("cross-attention", 20, 10),
            ("no-cross-attention", 20, 10),
            ("only-true-pairs", 10, 0),
        ):
            folder = noise / f"seed-1234/{name}-50"
            kept, true = trained_on(folder), true_classes(folder)
            assert len(kept) == pairs
            assert sum(true[target] != label for _, label, target in kept) == false

    def test_curves_and_levels_share_their_pairs(self, noise: Path) -> None:
        pairs = {name: trained_on(noise / "seed-1234" / name) for name in (Path(run).name for run in RUNS)}
        for level in ("0", "50", "100"):
            assert pairs[f"cross-attention-{level}"] == pairs[f"no-cross-attention-{level}"]
        assert set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-0"])
        assert set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-50"])
        assert set(pairs["cross-attention-50"]) - set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-100"])

    def test_losses_and_settings_are_those_of_the_point(self, noise: Path) -> None:
        for curve, distils in ((WITH, True), (WITHOUT, False), (ONLY_TRUE, True)):
            lines = log_lines(noise / f"seed-1234/{curve.folder}-50")
            epoch = next(line for line in lines if line.get("stage") == "adaptation")
            names = {"loss_source", "loss_target"} | ({"loss_distillation"} if distils else set())
            assert {name for name in epoch if name.startswith("loss")} == names
        for name in RUNS:
            assert len(list((noise / name / "pairs").iterdir())) == 1, "the pairs stay for the whole run"
            config = yaml.safe_load((noise / name / "config.yaml").read_text())
            options = config["method_args"]
            assert config["method"].endswith("sampled_pairs.py:SampledPairs")
            assert options["drop_false"] == ("only" in name)
            assert (options["pairs"], options["false_share"]) == (20, int(name.split("-")[-1]) / 100)
            assert options["sample_seed"] == config["seed"] == 1234
            assert not any(config[name] for name in ("guard", "report"))

    def test_levels_and_seeds_of_earlier_calls_stay(self, tmp_path: Path) -> None:
        task, out = make_task(tmp_path / "task", **QUICK), tmp_path / "out"
        make_labels(task)
        for levels in ("100", "0"):
            assert not made(task, out, levels=levels, seeds="2", jobs=2).failed
        for seed in (1234, 1):
            logs = out.glob(f"seed-{seed}/*/log.jsonl")
            (trained,) = (log.parent for log in logs if '"source_model"' not in log.read_text())
            assert trained.name == "cross-attention-100"
        assert not made(task, out, levels="100", seeds="7,", jobs=2).failed
        record = read(out)
        assert record["seeds"] == [1, 7, 1234]
        with_, without, only = record["curves"]
        for curve in (with_, without):
            assert [[r["seed"] for r in p["runs"]] for p in curve["points"]] == [[1, 1234], [1, 7, 1234]]
        assert [p["false_pairs_percent"] for p in only["points"]] == [0]
        text = (out / "noise.md").read_text(encoding="utf-8")
        assert "Not every point has all seeds; noise.json lists the runs of each." in text
        assert "UNFINISHED" not in text


@pytest.mark.slow
class TestFiles:
    def test_the_numbers_are_those_of_the_run_folders(self, noise: Path) -> None:
        record = read(noise)
        assert record["unfinished"] == []
        assert (record["sampled_pairs"], record["seeds"], record["epochs"]) == (20, [1234], 2)
        assert [curve["curve"] for curve in record["curves"]] == [curve.name for curve in CURVES]
        levels = [[point["false_pairs_percent"] for point in curve["points"]] for curve in record["curves"]]
        assert levels == [[0, 50, 100], [0, 50, 100], [0, 50]], "without a true pair there is nothing to train on"
        for curve in record["curves"]:
            assert curve["trained_with_labels"]
            for point in curve["points"]:
                (made,) = point["runs"]
                evaluation = RunRecord(noise / made["run"]).evaluation
                assert evaluation is not None
                assert made["scores"]["label_free"] == evaluation.accuracy
                assert made["class_means"]["last_epoch"] == evaluation.epochs[-1].class_mean_accuracy
                mean = {kind: {"mean": 100 * s, "deviation": None} for kind, s in made["scores"].items()}
                assert point["accuracy_percent"] == mean
        first, _, third = ([p["runs"][0]["run"] for p in curve["points"]] for curve in record["curves"])
        assert first[0] == third[0], "without a false pair the curves are one"
        assert [point["pairs"] for point in record["curves"][2]["points"]] == [20, 10]

    def test_page_and_figure(self, noise: Path, task: Task) -> None:
        text = (noise / "noise.md").read_text(encoding="utf-8")
        assert says(text, str(task.folder / "labels.txt"), "every run was trained", "20 pairs, 2 epochs, seed 1234.")
        assert says(text, "Scored on 21 of the target's 21 images.", "Stage 1 was trained once for these 7 runs")
        titles = [line for line in text.splitlines() if line.startswith("## ")]
        assert titles == ["## Last epoch", "## Label-free choice", "## Best epoch by target labels"]
        last = [line for line in text.splitlines() if line.startswith("| ")][:5]
        assert last[0] == f"| false pairs | {' | '.join(curve.name for curve in CURVES)} |"
        evaluation = RunRecord(noise / "seed-1234/no-cross-attention-50").evaluation
        assert evaluation is not None
        assert last[3].split(" | ")[2] == f"{100 * evaluation.epochs[-1].accuracy:.1f}"
        assert last[4].endswith("| – |")
        with Image.open(noise / "noise.png") as image:
            assert image.format == "PNG"
            assert min(image.size) > 500

    def test_other_levels_go_into_the_same_folder_and_another_number_of_pairs_does_not(
        self, noise: Path, task: Task
    ) -> None:
        before = read(noise), (noise / "noise.png").read_bytes(), (noise / "noise.md").read_text()
        assert made(task, noise, levels="50,0").asked == 5
        assert (read(noise), (noise / "noise.png").read_bytes(), (noise / "noise.md").read_text()) == before
        with raises("other-study"):
            made(task, noise, pairs=None)

    def test_force_runs_a_task_that_check_would_stop(self, tmp_path: Path) -> None:
        task = make_task(tmp_path / "task", source_epochs=1, epochs=1)
        shutil.rmtree(task.target)
        shutil.copytree(task.source, task.target)
        for force in (False, True):
            result = made(task, tmp_path / "out", levels="0", labels=task.target, force=force)
            assert bool(result.failed) != force


class TestLevels:
    def test_seeds_have_runs_of_their_own(self) -> None:
        variants = Levels((0, 50), (1234, 1), pairs=10).variants()
        assert [v.settings["seed"] for v in variants] == [1234] * 5 + [1] * 5
        assert all(v.settings["sample_seed"] == v.settings["seed"] for v in variants)
        assert len({v.folder for v in variants}) == 10

    def test_where_fewer_than_two_true_pairs_are_left_there_is_no_run(self) -> None:
        levels = Levels((80, 90), (1,), pairs=10)
        assert levels.run(ONLY_TRUE, 80, 1) == "seed-1/only-true-pairs-80"
        assert levels.run(ONLY_TRUE, 90, 1) is None

    def test_levels_from_text(self) -> None:
        assert parse_levels("100, 0,12.5") == (0, 12.5, 100)
        for text in ("", "x", "0,0", "-1", "101", "nan", "1,1.0000001"):
            with raises("levels"):
                parse_levels(text)

    def test_too_many_pairs_are_refused_at_once(self, tmp_path: Path) -> None:
        places = (make_source(tmp_path / "s", each=1), make_target(tmp_path / "t", each=1))
        with raises("too-many-pairs"):
            ablate_noise(*places, labels=places[1], out=tmp_path / "out", screen=Screen(quiet=True), pairs=10**12)
        assert not (tmp_path / "out").exists()

    def test_close_levels_have_folders_of_their_own(self) -> None:
        levels = parse_levels("33.333333,33.333334,99.999999,100")
        variants = Levels(levels, (1,), pairs=9).variants()
        assert len({v.folder for v in variants if v.folder.startswith("seed-1/c")}) == 4


def test_the_figure_has_a_line_for_each_curve_and_bars_for_several_seeds() -> None:
    def point(level: float, *accuracies: float) -> Point:
        empty: dict[str, Any] = dict.fromkeys(RunResult.__dataclass_fields__)
        results = [RunResult(**(empty | {"scores": {"last_epoch": accuracy}})) for accuracy in accuracies]
        return Point(level, 9, {}, dict(enumerate(results)))

    curves = {name: (point(0, 0.79, 0.81), point(100, 0.2)) for name in ("a", "b")} | {"c": ()}
    axes = figure(curves, Spread(60, None)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c", "source only"]
    assert list(axes.lines[0].get_xdata()) == [0, 100]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([80, 20])
    assert len(axes.containers) == 2


@pytest.mark.slow
def test_the_command_has_the_flags_of_a_verb() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "research.figures.noise", "--help-all"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert all(flag in shown.stdout for flag in ("--labels", "--levels", "--source-epochs", "--jobs"))
    assert "--loss-target" not in shown.stdout
