"""Whole benchmarks on a miniature Office-31: killed, interrupted, failing, continued, and their results."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from cdtrans.config import Config, compose, make_config, read_recipe
from cdtrans.errors import CdtransError
from cdtrans.inputs.benchmarks import OFFICE31, find_benchmark
from cdtrans.inputs.scan import scan_labelled, scan_unlabelled
from cdtrans.runtime.screen import Screen
from cdtrans.studies.benchmark import BenchPlan, bench, parse_seeds, read_results
from cdtrans.studies.results import SCORE_TITLES, FinishedRuns, is_scored
from cdtrans.studies.study import PlannedRun, owned
from cdtrans.studies.tables import markdown, paper_layout
from commands import Ended, Process, warm
from damages import check_damages
from mini_office31 import CLASSES, EACH, make_mini
from support import raises, says
from tiny_task import QUICK, TINY, computed, log_lines, tree


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("mini") / "office31")


class Bench:
    """`cdtrans bench office31` on the miniature, in a child of the warm process, as are its own children."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.out = folder / "out"

    def start(
        self, *flags: str, settings: dict[str, Any] = TINY, crash: dict[str, Any] | None = None, **how: Any
    ) -> Process:
        config = self.folder / "tiny.yaml"
        config.write_text(yaml.safe_dump(settings | {"cache": str(self.folder / "cache")}))
        places = ["--data", str(self.data), "--out", str(self.out), "--config", str(config)]
        arguments = ["bench", "office31", *places, "--allow-incomplete", *flags]
        return warm().start(arguments, self.folder / "logs", crash=crash, **how)

    def run(self, *flags: str, **how: Any) -> Ended:
        return self.start(*flags, **how).wait()


@pytest.fixture
def mini_bench(tmp_path: Path, mini: Path) -> Bench:
    return Bench(tmp_path, mini)


Planned = Callable[..., BenchPlan]


@pytest.fixture
def planned(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """planned(**how) -> the plan of a benchmark whose runs are not started."""
    plans: list[BenchPlan] = []
    monkeypatch.setattr(BenchPlan, "carry_out", lambda plan, *how: plans.append(plan))

    def plan(**how: Any) -> BenchPlan:
        arguments = {"data": mini, "out": tmp_path / "out", "allow_incomplete": True, "quiet": True} | how
        bench("office31", **arguments)
        return plans[-1]

    return plan


TWO = ("--tasks", "A>D,A>W", "--seeds", "1")
ONE = ("--tasks", "D>W", "--seeds", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, mini: Path) -> Path:
    """The folder of a benchmark of two runs with one source that nothing disturbed."""
    undisturbed = Bench(tmp_path_factory.mktemp("whole"), mini)
    ended = undisturbed.run(*TWO)
    assert ended.code == 0, ended.err
    return undisturbed.out


def untimed(out: Path) -> dict[str, str]:
    """The results of a benchmark without durations."""
    text = {name: (out / name).read_text(encoding="utf-8") for name in ("table.md", "table.tex", "results.jsonl")}
    text["table.md"] = re.sub(r"Cost: .*\n", "", text["table.md"])
    text["table.tex"] = re.sub(r"Cost: .* hours of", "", text["table.tex"])
    text["results.jsonl"] = re.sub(r'"(device_)?seconds": [0-9.]+', "", text["results.jsonl"])
    return text


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def run_of(out: Path, name: str) -> PlannedRun:
    return PlannedRun(name, out / name / "seed-1234", (), out, {})


def occupy(folder: Path) -> None:
    """Make the run in this folder fail."""
    folder.mkdir(parents=True)
    (folder / "thesis.doc").touch()


def wait(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.mark.slow
class TestWhole:
    def test_every_run_is_an_ordinary_run_folder_and_a_line_with_the_scores_of_eval(self, whole: Path) -> None:
        first = "A-D/seed-1234"
        assert [(line["task"], line["seed"], line["run"], line["stage_1"]) for line in lines(whole)] == [
            ("A>D", 1234, first, first),
            ("A>W", 1234, "A-W/seed-1234", first),
        ]
        for line in lines(whole):
            run = whole / line["run"]
            assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 1234
            assert (run / "adapted" / "model.safetensors").exists()
            assert line["seconds"] > 0
            assert line["images"] == line["target_images"] == 3 * EACH[{"W": "webcam", "D": "dslr"}[line["task"][-1]]]
            epochs = json.loads((run / "evaluation.json").read_text())["epochs"]
            chosen = json.loads((run / "result.json").read_text())["choice"]["epoch"]
            best = line["epochs"]["best_by_labels"]
            kinds = {"source_only": 0, "last_epoch": -1, "label_free": chosen, "best_by_labels": best}
            assert line["scores"] == {kind: epochs[epoch]["accuracy"] for kind, epoch in kinds.items()}
            assert line["scores"]["best_by_labels"] == max(epoch["accuracy"] for epoch in epochs[1:])

    def test_the_table_names_data_cost_and_missing_runs(self, whole: Path) -> None:
        table, tex = ((whole / name).read_text(encoding="utf-8") for name in ("table.md", "table.tex"))
        assert says(table.splitlines()[0], "# Office-31, vit_tiny_patch16_224")
        assert says(table, "not the published data", "amazon", "'back_pack', 'bike'")
        assert says(table, "unfinished", "4 of 6 runs", "D>A seed 1234, D>W seed 1234")
        assert says(table, "amazon/images", "24 images")
        for text in (table, tex):
            assert says(text, "stage 1", "trained once", "2 runs", "counted once")
        assert f"| source only | {100 * lines(whole)[0]['scores']['source_only']:.1f} | " in table

    def test_a_run_is_the_same_with_another_run_s_stage_1(self, whole: Path, mini_bench: Bench) -> None:
        first, second = (whole / name / "seed-1234" for name in ("A-D", "A-W"))
        assert log_lines(second)[0]["run"] == str(first)
        assert tree(second / "source") == tree(first / "source")
        assert mini_bench.run("--tasks", "A>W", "--seeds", "1").code == 0
        alone = mini_bench.out / "A-W" / "seed-1234"
        assert [line["event"] for line in log_lines(alone)].count("source_model") == 0
        assert computed(second) == computed(alone), "no target has a part in stage 1"

    def test_a_finished_benchmark_is_not_run_again_and_grows_by_new_runs(self, whole: Path, mini_bench: Bench) -> None:
        shutil.copytree(whole, mini_bench.out)
        config = mini_bench.out / "A-W" / "seed-1234" / "config.yaml"
        config.write_text(config.read_text().replace(str(whole), str(mini_bench.out)))
        (mini_bench.out / "A-W" / "seed-1234" / "evaluation.json").unlink()
        log = mini_bench.out / "A-W" / "seed-1234.log"
        before, logged = tree(mini_bench.out / "A-D"), log.read_text()
        ended = mini_bench.run(*TWO, "--json")
        assert ended.code == 0
        assert json.loads(ended.out) == {
            **{"out": str(mini_bench.out), "runs": 2, "finished": 2, "failed": []},
            "mean": dict.fromkeys(SCORE_TITLES),
        }
        assert tree(mini_bench.out / "A-D") == before
        assert log.read_text().startswith(logged), "only scored again"
        assert "already finished" not in log.read_text()
        assert untimed(mini_bench.out) == untimed(whole)
        assert mini_bench.run("--tasks", "D-W", "--seeds", "7,", settings=TINY).code == 0
        assert [(line["task"], line["seed"]) for line in lines(mini_bench.out)] == [
            ("A>D", 1234),
            ("A>W", 1234),
            ("D>W", 7),
        ]
        assert "over seeds 7, 1234" in (mini_bench.out / "table.md").read_text(encoding="utf-8")

    def test_a_damaged_file_costs_only_its_own_run(self, whole: Path, planned: Planned) -> None:
        how = {"tasks": "A>D,A>W", "seeds": "1", "out": whole, "config": whole.parent / "tiny.yaml"}
        plan = planned(**how)

        def table(runs: FinishedRuns) -> dict[str, Any]:
            results = read_results(plan, runs)
            assert markdown(paper_layout(results))
            return {result.run: asdict(result) for result in results.finished}

        check_damages(whole, "A-D/seed-1234", table)

    def test_a_damaged_run_is_named_and_the_exit_code_is_3(self, whole: Path, mini_bench: Bench) -> None:
        shutil.copytree(whole, mini_bench.out)
        damaged = mini_bench.out / "A-D" / "seed-1234" / "evaluation.json"
        damaged.write_text("[]")
        ended = mini_bench.run(*TWO)
        assert ended.code == 3
        assert says(ended.err, str(damaged), "damaged", "delete this folder to make the run again")
        assert "1 of 2 runs are finished" in ended.out
        assert [line["task"] for line in lines(mini_bench.out)] == ["A>W"]

    def test_a_folder_of_another_recipe_is_refused(self, whole: Path, mini: Path) -> None:
        before, config = tree(whole), whole.parent / "tiny.yaml"
        for change in ({"lr": 0.07}, {"guard": True}):
            refuse("other-study", mini, whole, config=config, **change)
        assert tree(whole) == before


SEVERAL = ("--method", "minent,cdan_tn,cdtrans", "--start", "authors", "--tasks", "A>D,A>W", "--seeds", "1")


@pytest.mark.slow
def test_several_methods_share_stage_1_and_a_failed_run_shows_in_its_row(mini: Path, mini_bench: Bench) -> None:
    out, first = mini_bench.out, ("--method", "cdtrans,minent", "--start", "authors", "--tasks", "A>D", "--seeds", "1")
    assert mini_bench.run(*first, settings=QUICK).code == 0
    occupy(out / "minent" / "A-W" / "seed-1234")
    ended = mini_bench.run(*SEVERAL, "--json", settings=QUICK)
    assert ended.code == 3
    summary = json.loads(ended.out)
    assert (summary["runs"], summary["finished"], summary["failed"]) == (4, 3, ["minent A>W seed 1234"])
    rows = {row["method"]: row for row in summary["methods"]}
    assert [*rows] == ["source_only", "cdtrans", "minent", "cdan_tn"]
    assert (rows["minent"]["note"], rows["cdan_tn"]["note"]) == ("1 of 2 failed", "needs BatchNorm")
    assert rows["minent"]["mean"]["label_free"] is None
    assert not (out / "cdan_tn").exists()

    scores = {line["run"]: line["scores"]["label_free"] for line in lines(out)}
    runs = [f"{name}/seed-1234" for name in ("cdtrans/A-D", "cdtrans/A-W", "minent/A-D")]
    assert [*scores] == runs
    assert rows["cdtrans"]["mean"]["label_free"] == pytest.approx(50 * (scores[runs[0]] + scores[runs[1]]))
    assert (rows["minent"]["pairs"], rows["cdtrans"]["pairs"]) == (1, 0)
    assert rows["minent"]["difference"] == pytest.approx(100 * (scores[runs[2]] - scores[runs[0]]))

    assert {line["stage_1"] for line in lines(out)} == {runs[0]}
    trained, *others = (tree(out / run / "source")["model.safetensors"] for run in runs)
    assert others == [trained] * 2
    text = (out / "bench.html").read_text(encoding="utf-8")
    assert says(text, "minent", "1 of 2 failed", "needs BatchNorm", "--target: #e0762f")
    assert not re.search(r"https?://|<script|src=", text)
    for how in ({"method": "dann,mcd", "start": "best"}, {"method": "cdtrans"}):
        refuse("other-study", mini, out, config=mini_bench.folder / "tiny.yaml", **how)


@pytest.mark.slow
class TestKilled:
    @pytest.mark.parametrize(("name", "jobs"), [("A-D", "2"), ("A-W", "1")], ids=["one waits", "one has ended"])
    def test_killed_and_continued_it_is_the_same_table(
        self, whole: Path, mini_bench: Bench, name: str, jobs: str
    ) -> None:
        process = mini_bench.start(*TWO, "--jobs", jobs)
        first, second = run_of(mini_bench.out, "A-D"), run_of(mini_bench.out, "A-W")
        under_way = run_of(mini_bench.out, name)
        assert process.wait_until(lambda: (under_way.folder / "state").exists())
        process.send(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        wait(lambda: not under_way.busy())  # its process was told to end, and saved its state
        assert not (under_way.folder / "result.json").exists()
        assert second.folder.exists() == is_scored(first.folder) == (under_way.name == "A-W")
        ended = mini_bench.run(*TWO, "--jobs", jobs)
        assert ended.code == 0, ended.err
        assert untimed(mini_bench.out) == untimed(whole)
        for run in (first, second):
            assert computed(run.folder) == computed(whole / run.name / "seed-1234")

    def test_a_kill_in_the_middle_of_a_write_corrupts_nothing(self, mini_bench: Bench) -> None:
        killed = mini_bench.run(*ONE, settings=QUICK, crash={"name": "results.jsonl", "when": "before"})
        assert killed.code == -signal.SIGKILL
        ended = mini_bench.run(*ONE, settings=QUICK)
        assert ended.code == 0, ended.err
        assert [line["task"] for line in lines(mini_bench.out)] == ["D>W"]

    def test_ctrl_c_ends_the_children_and_exits_with_130(self, mini_bench: Bench) -> None:
        tasks = ("--tasks", "A>W,D>A", "--seeds", "1", "--jobs", "2")
        process = mini_bench.start(*tasks, settings=TINY | {"epochs": 12})  # else they might end before they hear of it
        both = [run_of(mini_bench.out, name) for name in ("A-W", "D-A")]
        assert process.wait_until(lambda: all((run.folder / "state").exists() for run in both))
        process.send(signal.SIGINT)
        ended = process.wait()
        assert ended.code == 130
        assert says(ended.err, "interrupted", "saved", "same command again")
        assert all(str(run.folder.with_suffix(".log")) in ended.out for run in both), "known before a run has ended"
        assert not any(run.busy() or (run.folder / "result.json").exists() for run in both)
        assert lines(mini_bench.out) == []
        assert all(json.loads((run.folder.parent / "seed-1234.sessions.json").read_text()) for run in both)


@pytest.mark.slow
class TestFailing:
    def test_a_failed_run_is_reported_and_another_trains_its_stage_1(self, mini_bench: Bench) -> None:
        assert mini_bench.run(*ONE, settings=QUICK).code == 0
        failing = mini_bench.out / "A-D" / "seed-1234"
        occupy(failing)
        ended = mini_bench.run(*TWO, "--jobs", "2", settings=QUICK)
        assert ended.code == 3
        assert says(ended.err, "warning: A>D seed 1234 failed", "exit code 2", str(failing), f"{failing}.log")
        assert says(ended.out, "1 of 2 runs", "finished")
        stage_1 = {line["task"]: line["stage_1"] for line in lines(mini_bench.out)}
        assert stage_1 == {"A>W": "A-W/seed-1234", "D>W": "D-W/seed-1234"}
        assert "A>D seed 1234" in (mini_bench.out / "table.md").read_text(encoding="utf-8")
        shutil.rmtree(failing)
        assert mini_bench.run(*TWO, settings=QUICK).code == 0
        assert [line["stage_1"] for line in lines(mini_bench.out)][:2] == ["A-W/seed-1234"] * 2

    def test_a_killed_run_and_another_benchmark_at_work_on_the_folder(self, mini_bench: Bench) -> None:
        process = mini_bench.start("--tasks", "A>W", "--seeds", "1")
        run = run_of(mini_bench.out, "A-W")
        assert process.wait_until(run.busy)
        other = mini_bench.run(*TWO)
        assert other.code == 2
        assert says(other.err, "error: another process", str(mini_bench.out))
        os.kill(next(children(process.pid)), signal.SIGKILL)
        ended = process.wait()
        assert ended.code == 3
        assert says(ended.err, "A>W seed 1234 failed", "signal 9")


def children(pid: int) -> Iterator[int]:
    """The processes that run `cdtrans adapt`: the leaves below a process."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rsplit(")", 1)[1].split()[1])
    for child, parent in parents.items():
        if parent == pid:
            below = list(children(child))
            yield from below or [child]


@pytest.mark.slow
def test_domains_that_come_as_lists(mini_bench: Bench) -> None:
    data = shutil.copytree(mini_bench.data, mini_bench.folder / "listed")
    for domain in ("dslr", "webcam"):
        files = sorted((data / domain).rglob("*.png"))
        label = {name: str(len(CLASSES) - k) for k, name in enumerate(CLASSES)}  # not in the alphabet's order
        listed = [f"/gone/{p.relative_to(data).as_posix()} {label[p.parent.name]}\n" for p in files]
        (data / f"{domain}_list.txt").write_text("".join(listed))
    mini_bench.data = data
    ended = mini_bench.run("--tasks", "D>W", "--seeds", "7,", "--device", "cpu", "--no-center-aware", settings=QUICK)
    assert ended.code == 0, ended.err
    run = mini_bench.out / "D-W" / "seed-7"
    assert json.loads((run / "adapted" / "model.json").read_text())["classes"] == ["ruler", "pen", "mug"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["method_args"]["center_aware"], config["root"]) == (False, str(data))
    unlabelled = mini_bench.out / "data" / "webcam.unlabelled.txt"
    assert config["target"] == str(unlabelled)
    assert unlabelled.read_text().splitlines()[0] == "webcam/images/mug/frame_0000.png"
    assert says((mini_bench.out / "table.md").read_text(encoding="utf-8"), "webcam_list.txt", "18 images")


def refuse(code: str | None, mini: Path, out: Path, **how: Any) -> None:
    """Call a benchmark that is refused; the code of an error of another package is not given here."""
    arguments = {"data": mini, "allow_incomplete": True, "seeds": "1", "config": None} | how
    with raises(code) if code else pytest.raises(CdtransError):
        bench(arguments.pop("name", "office31"), out=out, screen=Screen(quiet=True), **arguments)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (None, {"name": "office32"}),
        (None, {"tasks": "A>W,A>X"}),
        (None, {"tasks": "A>W,"}),
        (None, {"allow_incomplete": False}),
        (None, {"lr": -1}),
        (None, {"weights": "gone.pth"}),
        (None, {"device": "tpu"}),
        (None, {"pairing": "ground_truth"}),
        (None, {"method": "ground_truth"}),
        (None, {"method": "cdtrans,dannn"}),
        (None, {"effort": "quick"}),
        (None, {"method": "dann", "method_args": {"ramp": -1}}),
        (None, {"backbone": "deit_smal"}),
        (None, {"data": Path("gone")}),
        ("seeds", {"seeds": "0"}),
        ("seeds", {"seeds": "1234"}),
        ("seeds", {"seeds": "1,1"}),
        ("decided-by-bench", {"seed": 3}),
        ("decided-by-bench", {"source_model": "runs/first"}),
        ("method-twice", {"method": "dann,cdtrans,dann"}),
        ("method-twice", {"method": "all,mcd"}),
        ("option-of-one-method", {"method": "dann,mcd", "method_args": {"ramp": 1}}),
        ("option-of-one-method", {"method": "cdtrans,mcd", "pairing": "two_way"}),
        ("recipe-of-several", {"method": "dann,mcd", "recipe": "best"}),
        ("start-unknown", {"method": "dann,mcd", "start": "bets"}),
        ("start-of-one", {"method": "dann", "start": "best"}),
        ("no-method-fits", {"method": "cdan_tn,dcan", "pretrained": False}),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    mini: Path, tmp_path: Path, code: str | None, how: dict[str, Any]
) -> None:
    refuse(code, mini, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else_is_refused(mini: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").touch()
    refuse("not-a-study", mini, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.doc"]


@pytest.mark.parametrize("kind", ["benchmark", "ablation"])
def test_one_process_starts_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """The ranks of torchrun would each start all of them, as ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises("study-under-torchrun"), owned(tmp_path / "out", kind, {}):
        pass
    assert not (tmp_path / "out").exists()


class TestSettings:
    def test_runs_of_a_table_have_neither_guard_nor_report_unless_given(self, planned: Planned, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("report: true\nlr: 0.1\n")
        (config,) = planned(config=file, lr=0.2).configs
        assert (config.guard, config.report, config.lr) == (False, True, 0.2)
        assert planned(guard=True).shared.guard

    def test_all_tasks_with_the_first_seed_come_first(self, planned: Planned, tmp_path: Path) -> None:
        runs = planned().runs()
        assert [run.name for run in runs[:7]] == [*(f"{task.name} seed 1234" for task in OFFICE31.tasks), "A>D seed 1"]
        assert len(runs) == 18
        assert runs[1].folder == tmp_path / "out" / "A-W" / "seed-1234"

    def test_several_methods_have_a_stage_1_for_each_start(self, planned: Planned, tmp_path: Path) -> None:
        how = {"method": "dann,cotraining,cdtrans", "tasks": "A>W,D>W", "seeds": "2"}
        plan = planned(start="authors", **how)
        runs = plan.runs()
        assert [run.name for run in runs[:7]] == [
            *("cotraining A>W seed 1234", "cotraining D>W seed 1234", "cdtrans A>W seed 1234", "cdtrans D>W seed 1234"),
            *("dann A>W seed 1234", "dann D>W seed 1234", "cotraining A>W seed 1"),
        ]
        peers = [[p.relative_to(plan.out).as_posix() for p in run.peers] for run in (runs[0], runs[4])]
        assert peers[0] == ["cotraining/A-D/seed-1234", "cotraining/A-W/seed-1234"]
        assert peers[1] == [f"{method}/{task}/seed-1234" for method in ("cdtrans", "dann") for task in ("A-D", "A-W")]
        assert [config.recipe for config in plan.configs] == ["best", "authors", "authors"]

    def test_a_comparison_from_the_authors_start_has_a_quarter_of_their_stage_2(
        self, planned: Planned, tmp_path: Path
    ) -> None:
        """Unless the user says otherwise; the methods of the best recipe keep theirs."""

        def schedule(config: Config) -> list[int]:
            return [config.epochs, config.warmup_epochs, config.rebuild_every]

        file = tmp_path / "settings.yaml"
        file.write_text("rebuild_every: 5\n")
        how = {"method": "cotraining,dann", "start": "authors"}
        plan = planned(**how)
        assert [schedule(config) for config in plan.configs] == [[10, 1, 1], [10, 10, 3]]
        assert plan.configs[1].source_epochs == 10
        assert schedule(plan.shared) == [10, 10, 3]
        plan = planned(epochs=40, config=file, **how)
        assert schedule(plan.configs[1]) == [40, 10, 5]
        plan = planned(method="dann")
        assert schedule(plan.configs[0]) == [40, 10, 10], "one method is as its authors' scripts"

    @pytest.mark.parametrize(("method", "epochs"), [("cotraining", 10), ("instant", 1)])
    def test_a_method_of_the_best_recipe_has_it_also_by_itself(
        self, planned: Planned, tmp_path: Path, method: str, epochs: int
    ) -> None:
        (config,) = planned(method=method).configs
        assert [config.recipe, config.source_fit, config.epochs] == ["best", "probe", epochs]

    def test_the_best_start_is_the_best_recipe_with_another_method(self, planned: Planned, tmp_path: Path) -> None:
        given = {"method": "instant,dann", "start": "best", "epochs": 7}
        instant, dann = planned(**given).configs
        assert [instant.source_fit, instant.epochs, instant.effort] == ["probe", 1, "instant"]
        assert [dann.source_fit, dann.epochs, dann.optimizer] == ["probe", 7, "adamw"]

    @pytest.mark.parametrize("start", ["authors", "best"])
    def test_a_file_s_backbone_wins_over_the_recipe_s(self, planned: Planned, tmp_path: Path, start: str) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("backbone: vit_tiny_patch16_224\n")
        given = {"method": "mcc,dann", "start": start, "config": file}
        plan = planned(**given)
        assert {config.backbone for config in plan.configs} == {plan.shared.backbone} == {"vit_tiny_patch16_224"}

    @pytest.mark.parametrize(
        ("backbone", "recipe", "name"),
        [
            ("deit_small", "office31-deit-small", "deit_small_distilled_patch16_224.fb_in1k"),
            ("deit_base", "office31-deit-base", "deit_base_distilled_patch16_224.fb_in1k"),
            ("vit_small_patch14_dinov2.lvd142m", "office31-deit-small", "vit_small_patch14_dinov2.lvd142m"),
        ],
    )
    def test_a_backbone_is_a_recipe_or_a_name(
        self, planned: Planned, tmp_path: Path, backbone: str, recipe: str, name: str
    ) -> None:
        (config,) = planned(backbone=backbone).configs
        assert config == make_config(read_recipe(recipe), {"backbone": name, "guard": False, "report": False})

    def test_settings_reach_adapt_and_the_device_also_eval(self, planned: Planned, mini: Path, tmp_path: Path) -> None:
        weights = tmp_path / "w.safetensors"
        save_file({"a": torch.zeros(1)}, weights)
        settings = {"weights": str(weights), "pretrained": False, "detach_teacher": True, "lr": 0.01, "device": "cpu"}
        plan = planned(force=True, **settings)
        run = plan.runs()[0]
        for name in ("weights", "pretrained", "lr", "device"):
            assert run.settings[name] == settings[name]
        assert run.settings["method_args"] == {"detach_teacher": True}
        assert run.adapt == ("adapt", "--force")
        assert compose(run.settings).to_dict() == run.settings, "the run arrives at the planned settings"
        assert run.score[-4:] == ("--device", "cpu", "--max-bad", "0.05")
        places = [run.settings[name] for name in ("source", "target", "root", "seed")]
        assert places == [str(mini / "amazon" / "images"), str(mini / "dslr" / "images"), None, 1234]

    def test_the_default_folder_is_named_after_both(
        self, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert planned(backbone="deit_base", out=None).out == Path("runs/office31-deit_base")

    def test_the_lists_that_are_written_give_the_same_domain(self, planned: Planned, tmp_path: Path) -> None:
        data = make_mini(tmp_path / "data")
        names = {"mug": 9, "pen": 4, "ruler": 6}
        images = sorted((data / "dslr").rglob("*.png"), key=lambda p: p.name)
        listed = "".join(f"{p.relative_to(data).as_posix()} {names[p.parent.name]}\n" for p in images)
        (data / "dslr.txt").write_text(listed)
        plan = planned(data=data)
        plan.prepare()
        domain = find_benchmark(OFFICE31, data, OFFICE31.tasks, allow_incomplete=True).domains["dslr"].images
        assert scan_labelled(tmp_path / "out" / "data" / "dslr.labelled.txt", data) == domain
        unlabelled = scan_unlabelled(tmp_path / "out" / "data" / "dslr.unlabelled.txt", data)
        assert unlabelled.paths == domain.paths
        assert domain.classes == ("pen", "ruler", "mug")
        assert plan.runs()[0].settings["target"] == str(tmp_path / "out" / "data" / "dslr.unlabelled.txt")


class TestSeeds:
    def test_a_number_and_a_list(self) -> None:
        assert parse_seeds("3") == (1234, 1, 2)
        assert parse_seeds("1234,1") == (1234, 1)
        assert parse_seeds("7,") == (7,)
        assert parse_seeds(" 4 , 5 ") == (4, 5)
        assert parse_seeds("1") == (Config().seed,)

    @pytest.mark.parametrize("text", ["9" * 5000, f"1,{'9' * 5000}", "1000000000000", "one", "1,1", "0"])
    def test_bad_numbers_are_refused(self, text: str) -> None:
        with raises("seeds"):
            parse_seeds(text)

    @given(st.integers(1, 100))
    def test_as_many_as_asked_for_and_all_different(self, count: int) -> None:
        assert len(set(parse_seeds(str(count)))) == count

    @given(st.text())
    def test_any_other_text_is_refused_in_a_sentence(self, text: str) -> None:
        with suppress(CdtransError):
            assert all(seed >= 0 for seed in parse_seeds(text))
