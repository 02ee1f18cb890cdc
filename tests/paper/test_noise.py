"""`cdtrans ablate noise` on the tiny task."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from ablation_task import make_key, run, start, true_classes
from cdtrans.paper.ablations import read_scored
from cdtrans.paper.noise import CURVES, ONLY_TRUE, WITH, WITHOUT, Study, ablate_noise, parse_levels
from cdtrans.paper.noise_figure import figure
from cdtrans.runtime.screen import Screen
from cdtrans.studies.results import Spread
from commands import warm
from support import error_says, says
from tiny_task import QUICK, Task, log_lines, make_source, make_target, make_task

FLAGS = ("--levels", "0,50,100", "--pairs", "20")
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
    make_key(task)
    return task


@pytest.fixture(scope="module")
def noise(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noise") / "out"
    ended = run(task, "noise", out, *FLAGS)
    assert ended.code == 0, ended.err
    assert f"7 of 7 runs are finished: {out / 'noise.png'}" in ended.out
    return out


def read(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "noise.json").read_text(encoding="utf-8"))
    return record


def trained_on(run: Path) -> list[tuple[int, int, int]]:
    """(source, its label, target)"""
    with np.load(run / "pairs" / "round-01.npz") as arrays:
        kept = arrays["kept"]
        return list(zip(*(arrays[k][kept].tolist() for k in ("source", "source_labels", "target")), strict=True))


@pytest.mark.slow
class TestRuns:
    def test_a_run_for_each_point_but_for_those_that_are_the_same_or_empty(self, noise: Path) -> None:
        assert sorted(f.parent.relative_to(noise).as_posix() for f in noise.rglob("result.json")) == sorted(RUNS)

    @pytest.mark.parametrize(
        ("name", "pairs", "false"),
        [("cross-attention", 20, 10), ("no-cross-attention", 20, 10), ("only-true-pairs", 10, 0)],
    )
    def test_half_of_the_pairs_are_false_or_gone(self, noise: Path, name: str, pairs: int, false: int) -> None:
        folder = noise / f"seed-1234/{name}-50"
        found, true = trained_on(folder), true_classes(folder)
        assert len(found) == pairs
        assert sum(true[target] != label for _, label, target in found) == false

    def test_curves_and_levels_share_their_pairs(self, noise: Path) -> None:
        pairs = {name: trained_on(noise / "seed-1234" / name) for name in (Path(run).name for run in RUNS)}
        for level in ("0", "50", "100"):
            assert pairs[f"cross-attention-{level}"] == pairs[f"no-cross-attention-{level}"]
        assert set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-0"])
        assert set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-50"])
        assert set(pairs["cross-attention-50"]) - set(pairs["only-true-pairs-50"]) <= set(pairs["cross-attention-100"])

    def test_the_losses_are_those_of_the_curve(self, noise: Path) -> None:
        for curve, distils in ((WITH, True), (WITHOUT, False), (ONLY_TRUE, True)):
            lines = log_lines(noise / f"seed-1234/{curve.folder}-50")
            epoch = next(line for line in lines if line.get("stage") == "adaptation")
            names = {"loss_source", "loss_target"} | ({"loss_distillation"} if distils else set())
            assert {name for name in epoch if name.startswith("loss")} == names

    def test_pairs_stay_for_the_whole_run_and_the_settings_say_what_they_are(self, noise: Path) -> None:
        for name in RUNS:
            assert len(list((noise / name / "pairs").iterdir())) == 1
            config = yaml.safe_load((noise / name / "config.yaml").read_text())
            assert config["method"] == "sampled_pairs"
            options = config["method_args"]
            assert options["drop_false"] == ("only" in name)
            assert (options["pairs"], options["false_share"]) == (20, int(name.split("-")[-1]) / 100)
            assert options["sample_seed"] == config["seed"] == 1234
            assert not any(config[name] for name in ("guard", "report"))

    def test_adapt_refuses_such_a_setting(self, task: Task, tmp_path: Path) -> None:
        ended = warm().run(task.adapt(tmp_path / "out", "--method", "sampled_pairs"), tmp_path / "logs")
        assert ended.code == 2
        assert says(ended.err, "error: ", "'sampled_pairs'", "target labels", "'adapt' does not")
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
class TestSharedStage1:
    def test_all_points_of_a_seed_start_from_one(self, noise: Path) -> None:
        first = noise / RUNS[0]
        for name in RUNS[1:]:
            assert log_lines(noise / name)[0]["run"] == str(first)
        assert "Stage 1 was trained once for these 7 runs" in (noise / "noise.md").read_text(encoding="utf-8")

    def test_also_those_of_a_level_that_was_asked_for_before(self, tmp_path: Path) -> None:
        task, out, flags = make_task(tmp_path / "task", **QUICK), tmp_path / "out", ("--pairs", "20", "--jobs", "2")
        make_key(task)
        for levels in ("100", "0"):
            assert run(task, "noise", out, "--levels", levels, "--seeds", "2", *flags).code == 0
        for seed in (1234, 1):
            (trained,) = (
                f.parent for f in out.glob(f"seed-{seed}/*/log.jsonl") if '"source_model"' not in f.read_text()
            )
            assert trained.name == "cross-attention-100"
        assert run(task, "noise", out, "--levels", "100", "--seeds", "7,", *flags).code == 0
        record = read(out)
        assert record["seeds"] == [1, 7, 1234], "those of earlier calls too"
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
            assert curve["trained_with_key"]
            for point in curve["points"]:
                (told,) = point["runs"]
                scored = read_scored(noise / told["run"], noise)
                assert scored is not None
                assert told["scores"] == scored.scores
                mean = {kind: {"mean": 100 * s["accuracy"], "deviation": None} for kind, s in scored.scores.items()}
                assert point["accuracy_percent"] == mean
        first, _, third = ([p["runs"][0]["run"] for p in curve["points"]] for curve in record["curves"])
        assert first[0] == third[0], "without a false pair the curves are one"
        assert [point["pairs"] for point in record["curves"][2]["points"]] == [20, 10]

    def test_the_page_has_a_table_for_each_choice_and_says_what_the_key_was_for(self, noise: Path, task: Task) -> None:
        text = (noise / "noise.md").read_text(encoding="utf-8")
        assert says(text, str(task.folder / "key.txt"), "every run was trained")
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            "## Last epoch",
            "## Label-free choice",
            "## Best epoch by target labels",
        ]
        last = [line for line in text.splitlines() if line.startswith("| ")][:5]
        assert last[0] == f"| false pairs | {' | '.join(curve.name for curve in CURVES)} |"
        scored = read_scored(noise / "seed-1234/no-cross-attention-50", noise)
        assert scored is not None
        assert last[3].split(" | ")[2] == f"{100 * scored.scores['last_epoch']['accuracy']:.1f}"
        assert last[4].endswith("| – |")
        assert "UNFINISHED" not in text
        assert "20 pairs, 2 epochs, seed 1234." in text
        assert "Scored on 21 of the target's 21 images." in text
        assert "all three branches run and pass through the head's BatchNorm" in text

    def test_the_picture_is_one(self, noise: Path) -> None:
        with Image.open(noise / "noise.png") as image:
            assert image.format == "PNG"
            assert min(image.size) > 500

    def test_killed_it_goes_on_and_comes_to_the_same(self, noise: Path, task: Task, tmp_path: Path) -> None:
        out = tmp_path / "out"
        killed = start(task, "noise", out, *FLAGS)
        assert killed.wait_until(lambda: (out / RUNS[1] / "state").exists())
        killed.send(9)
        assert killed.wait().code == -9
        assert "UNFINISHED: 6 of 7 runs are missing: " in (out / "noise.md").read_text(encoding="utf-8")
        ended = run(task, "noise", out, *FLAGS, "--jobs", "2", "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out) == read(noise) | {"out": str(out), "failed": []}
        assert (out / "noise.png").read_bytes() == (noise / "noise.png").read_bytes()

    def test_other_levels_go_into_the_same_folder_and_another_number_of_pairs_does_not(
        self, noise: Path, task: Task
    ) -> None:
        before = read(noise), (noise / "noise.png").read_bytes(), (noise / "noise.md").read_text()
        ended = run(task, "noise", noise, "--levels", "50,0", "--pairs", "20")
        assert "5 runs, 5 of them finished already" in ended.out
        assert (read(noise), (noise / "noise.png").read_bytes(), (noise / "noise.md").read_text()) == before
        ended = run(task, "noise", noise, "--levels", "0,50,100")
        assert ended.code == 2, "one pair for each of the 21 target images"
        assert says(ended.err, "another ablation", "pairs: 20 there, 21 now")
        run(task, "noise", noise, *FLAGS)


@pytest.mark.slow
def test_what_check_would_stop_is_run_with_force(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", source_epochs=1, epochs=1)
    shutil.rmtree(task.target)
    shutil.copytree(task.source, task.target)
    flags = ("--levels", "0", "--pairs", "20", "--key", str(task.target))
    ended = run(task, "noise", tmp_path / "out", *flags)
    assert ended.code == 1
    assert says(ended.err, "--force")
    ended = run(task, "noise", tmp_path / "out", *flags, "--force")
    assert ended.code == 0, ended.err
    assert "20 pairs, 1 epoch, seed 1234." in (tmp_path / "out" / "noise.md").read_text(encoding="utf-8")


class TestStudy:
    def test_seeds_have_runs_of_their_own(self) -> None:
        variants = Study((0, 50), (1234, 1), pairs=10).variants()
        assert [v.settings["seed"] for v in variants] == [1234] * 5 + [1] * 5
        assert all(v.settings["sample_seed"] == v.settings["seed"] for v in variants)
        assert len({v.folder for v in variants}) == 10

    def test_where_fewer_than_two_true_pairs_are_left_there_is_no_run(self) -> None:
        study = Study((80, 90), (1,), pairs=10)
        assert study.run(ONLY_TRUE, 80, 1) == "seed-1/only-true-pairs-80"
        assert study.run(ONLY_TRUE, 90, 1) is None

    def test_levels(self) -> None:
        assert parse_levels("100, 0,12.5") == (0, 12.5, 100)
        for text in ("", "x", "0,0", "-1", "101", "nan", "1,1.0000001"):
            with error_says("--levels", "different percentages", "0 to 100"):
                parse_levels(text)

    def test_pairs_without_end_are_refused_at_once(self, tmp_path: Path) -> None:
        places = (make_source(tmp_path / "s", each=1), make_target(tmp_path / "t", each=1))
        with error_says("--pairs", "at most 10000000"):
            ablate_noise(*places, key=places[1], out=tmp_path / "out", screen=Screen(quiet=True), pairs=10**12)
        assert not (tmp_path / "out").exists()

    def test_close_levels_have_folders_of_their_own(self) -> None:
        levels = parse_levels("33.333333,33.333334,99.999999,100")
        assert len({v.folder for v in Study(levels, (1,), pairs=9).variants() if v.folder.startswith("seed-1/c")}) == 4


def test_the_figure_has_a_line_for_each_curve_and_bars_for_several_seeds() -> None:
    curves = {name: [(0.0, Spread(80, 1.5)), (100.0, Spread(20, None))] for name in ("a", "b")} | {"c": []}
    axes = figure(curves, Spread(60, None), "last epoch").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c", "source only"]
    assert list(axes.lines[0].get_xdata()) == [0, 100]
    assert len(axes.containers) == 2
