"""Whole benchmarks on a miniature Office-31: killed, interrupted, failing, continued, and what they come to."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from cdtrans.config import Config, make_config, read_recipe
from cdtrans.errors import CdtransError
from cdtrans.inputs.benchmarks import OFFICE31, VISDA2017, find_benchmark
from cdtrans.inputs.scan import scan_labelled, scan_unlabelled
from cdtrans.runtime.screen import Screen
from cdtrans.studies.benchmark import Plan, bench, parse_seeds
from cdtrans.studies.jobs import PlannedRun
from cdtrans.studies.results import KINDS, SCORED, read_run
from commands import Ended, Process, warm
from support import error_says, says
from tiny_task import QUICK, TINY, computed, draw, log_lines, tree

CLASSES = ("mug", "pen", "ruler")
EACH = {"amazon": 8, "dslr": 5, "webcam": 6}


def make_mini(data: Path, inner: str = "images") -> Path:
    """Office-31 with three of its classes and a few images of each."""
    for n, (domain, each) in enumerate(EACH.items()):
        for kind, name in enumerate(CLASSES):
            for i in range(each):
                draw(data / domain / inner / name / f"frame_{i:04}.png", kind, seed=1000 * n + i, shift=0.5 * n)
    return data


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("mini") / "office31")


class Bench:
    """`cdtrans bench office31` on the miniature, in a child of the warm process, as are its own children."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.out = folder / "out"

    def arguments(self, *flags: str, settings: dict[str, Any] = TINY, out: Path | None = None) -> list[str]:
        config = self.folder / "tiny.yaml"
        config.write_text(yaml.safe_dump(settings | {"cache": str(self.folder / "cache")}))
        places = ["--data", str(self.data), "--out", str(out or self.out), "--config", str(config)]
        return ["bench", "office31", *places, "--allow-incomplete", *flags]

    def start(self, *flags: str, crash: dict[str, Any] | None = None, **how: Any) -> Process:
        return warm().start(self.arguments(*flags, **how), self.folder / "logs", crash=crash)

    def run(self, *flags: str, **how: Any) -> Ended:
        return self.start(*flags, **how).wait()


@pytest.fixture
def mini_bench(tmp_path: Path, mini: Path) -> Bench:
    return Bench(tmp_path, mini)


TWO = ("--tasks", "A>W,D>A", "--seeds", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, mini: Path) -> Path:
    """The folder of a benchmark of two runs that nothing disturbed."""
    undisturbed = Bench(tmp_path_factory.mktemp("whole"), mini)
    ended = undisturbed.run(*TWO)
    assert ended.code == 0, ended.err
    return undisturbed.out


def untimed(out: Path) -> dict[str, str]:
    """What a benchmark came to, but for how long it took."""
    text = {name: (out / name).read_text(encoding="utf-8") for name in ("table.md", "table.tex", "results.jsonl")}
    text["table.md"] = re.sub(r"Cost: .*\n", "", text["table.md"])
    text["table.tex"] = re.sub(r"Cost: .* hours of", "", text["table.tex"])
    text["results.jsonl"] = re.sub(r'"(device_)?seconds": [0-9.]+', "", text["results.jsonl"])
    return text


def lines(out: Path) -> list[dict[str, Any]]:
    text = (out / "results.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def run_of(out: Path, name: str) -> PlannedRun:
    return PlannedRun(name, out / name / "seed-1234", (), ())


def wait(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.mark.slow
class TestWhole:
    def test_every_run_is_an_ordinary_run_folder_and_a_line(self, whole: Path) -> None:
        assert [(line["task"], line["seed"], line["run"]) for line in lines(whole)] == [
            ("A>W", 1234, "A-W/seed-1234"),
            ("D>A", 1234, "D-A/seed-1234"),
        ]
        for line in lines(whole):
            config = yaml.safe_load((whole / line["run"] / "config.yaml").read_text())
            assert config["seed"] == 1234
            assert (whole / line["run"] / "adapted" / "model.safetensors").exists()
            assert line["seconds"] > 0
            assert line["images"] == 3 * EACH[{"W": "webcam", "A": "amazon"}[line["task"][-1]]]

    def test_the_scores_are_those_of_eval(self, whole: Path) -> None:
        line = lines(whole)[0]
        told = json.loads((whole / line["run"] / SCORED).read_text())
        assert line["scores"] == {
            "source_only": told["source_only_accuracy"],
            "last_epoch": told["last_epoch_accuracy"],
            "label_free": told["accuracy"],
            "best_by_labels": told["best_by_labels_accuracy"],
        }
        chosen = json.loads((whole / line["run"] / "result.json").read_text())["chosen_epoch"]
        assert line["epochs"] == {"label_free": chosen, "best_by_labels": told["best_by_labels_epoch"]}

    def test_the_table_says_what_it_lacks(self, whole: Path) -> None:
        table = (whole / "table.md").read_text(encoding="utf-8")
        assert says(table.splitlines()[0], "# Office-31, vit_tiny_patch16_224")
        assert says(table, "not the published data", "amazon", "'back_pack', 'bike', 'bike_helmet' and 25 more")
        assert says(table, "unfinished", "4 of 6 runs", "A>D (seed 1234), D>W")
        assert says(table, "amazon/images", "24 images")
        percent = 100 * lines(whole)[0]["scores"]["source_only"]
        assert f"| source only | – | {percent:.1f} | " in table

    def test_a_finished_benchmark_is_not_run_again_and_grows_by_what_is_new(
        self, whole: Path, mini_bench: Bench, tmp_path: Path
    ) -> None:
        shutil.copytree(whole, mini_bench.out)
        before, scored = tree(mini_bench.out / "A-W"), (mini_bench.out / "A-W/seed-1234" / SCORED).stat().st_mtime_ns
        ended = mini_bench.run(*TWO, "--json")
        assert ended.code == 0
        assert json.loads(ended.out) == {
            **{"out": str(mini_bench.out), "runs": 2, "finished": 2, "failed": []},
            "mean": dict.fromkeys(KINDS),
        }
        assert tree(mini_bench.out / "A-W") == before
        assert (mini_bench.out / "A-W/seed-1234" / SCORED).stat().st_mtime_ns == scored
        assert untimed(mini_bench.out) == untimed(whole)
        assert mini_bench.run("--tasks", "W-D", "--seeds", "1").code == 0
        assert [line["task"] for line in lines(mini_bench.out)] == ["A>W", "D>A", "W>D"]

    def test_a_run_that_eval_had_not_seen_is_only_scored(self, whole: Path, mini_bench: Bench) -> None:
        shutil.copytree(whole, mini_bench.out)
        (mini_bench.out / "A-W" / "seed-1234" / SCORED).unlink()
        log = (mini_bench.out / "A-W" / "seed-1234.log").read_text()
        assert mini_bench.run(*TWO).code == 0
        assert (mini_bench.out / "A-W" / "seed-1234.log").read_text().startswith(log)
        assert "already finished" not in (mini_bench.out / "A-W" / "seed-1234.log").read_text()
        assert untimed(mini_bench.out) == untimed(whole)


SHARED = ("--tasks", "A>D,A>W", "--seeds", "1")
SHORT = TINY | {"source_epochs": 2, "epochs": 2}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, mini: Path) -> Path:
    """The folder of a benchmark of two runs with one source."""
    undisturbed = Bench(tmp_path_factory.mktemp("shared"), mini)
    ended = undisturbed.run(*SHARED, settings=SHORT)
    assert ended.code == 0, ended.err
    return undisturbed.out


@pytest.mark.slow
class TestSharedStage1:
    def test_the_second_run_has_the_first_s_and_else_what_it_would_have_come_to_alone(
        self, shared: Path, mini_bench: Bench
    ) -> None:
        first, second = (shared / name / "seed-1234" for name in ("A-D", "A-W"))
        assert log_lines(second)[0] | {"weights": ""} == {
            **{"event": "source_model", "run": str(first), "epochs": 2, "weights": ""},
        }
        assert tree(second / "source") == tree(first / "source")
        assert mini_bench.run("--tasks", "A>W", "--seeds", "1", settings=SHORT).code == 0
        alone = mini_bench.out / "A-W" / "seed-1234"
        assert [line["event"] for line in log_lines(alone)].count("source_model") == 0
        assert computed(second) == computed(alone), "no target has a part in stage 1"

    def test_the_results_and_the_table_say_who_trained_it(self, shared: Path) -> None:
        assert [(line["run"], line["stage_1"]) for line in lines(shared)] == [
            ("A-D/seed-1234", "A-D/seed-1234"),
            ("A-W/seed-1234", "A-D/seed-1234"),
        ]
        for name in ("table.md", "table.tex"):
            text = (shared / name).read_text(encoding="utf-8")
            assert says(text, "stage 1", "trained once", "2 runs", "counted once")

    def test_every_seed_and_every_source_has_its_own(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = TestSettings().plan(mini, monkeypatch, out=tmp_path / "out", seeds="2", tasks="A>W,D>W").runs()
        assert [[str(peer.relative_to(tmp_path / "out")) for peer in run.peers] for run in runs] == [
            ["A-D/seed-1234", "A-W/seed-1234"],
            ["D-A/seed-1234", "D-W/seed-1234"],
            ["A-D/seed-1", "A-W/seed-1"],
            ["D-A/seed-1", "D-W/seed-1"],
        ]

    def test_killed_while_one_waits_it_goes_on_to_the_same(self, shared: Path, mini_bench: Bench) -> None:
        process = mini_bench.start(*SHARED, "--jobs", "2", settings=SHORT)
        first, second = run_of(mini_bench.out, "A-D"), run_of(mini_bench.out, "A-W")
        assert process.wait_until(lambda: (first.folder / "state").exists())
        process.send(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        wait(lambda: not first.busy())
        assert not second.folder.exists(), "it waited"
        ended = mini_bench.run(*SHARED, "--jobs", "2", settings=SHORT)
        assert ended.code == 0, ended.err
        assert untimed(mini_bench.out) == untimed(shared)
        assert computed(first.folder) == computed(shared / "A-D" / "seed-1234")
        assert computed(second.folder) == computed(shared / "A-W" / "seed-1234")

    def test_a_run_of_before_that_is_not_asked_for_now_gives_its_own(self, shared: Path, mini_bench: Bench) -> None:
        shutil.copytree(shared / "A-D", mini_bench.out / "A-D")
        shutil.copy(shared / "bench.json", mini_bench.out)
        assert mini_bench.run("--tasks", "A>W", "--seeds", "1", settings=SHORT).code == 0
        assert untimed(mini_bench.out)["results.jsonl"] == untimed(shared)["results.jsonl"]

    def test_if_the_first_fails_the_second_trains_it(self, mini_bench: Bench) -> None:
        assert mini_bench.run("--tasks", "D>W", "--seeds", "1", settings=QUICK).code == 0
        alien = mini_bench.out / "A-D" / "seed-1234"
        alien.mkdir(parents=True)
        (alien / "thesis.doc").touch()
        ended = mini_bench.run(*SHARED, "--jobs", "2", settings=QUICK)
        assert ended.code == 1
        assert "A>D seed 1234 failed: " in ended.err
        assert {line["task"]: line["stage_1"] for line in lines(mini_bench.out)} == {
            "A>W": "A-W/seed-1234",
            "D>W": "D-W/seed-1234",
        }
        shutil.rmtree(alien)
        assert mini_bench.run(*SHARED, settings=QUICK).code == 0
        assert [line["stage_1"] for line in lines(mini_bench.out)][:2] == ["A-W/seed-1234"] * 2

    def test_seeds_of_earlier_calls_stay_in_the_table(self, mini_bench: Bench) -> None:
        for seeds in ("7,", "5,"):
            assert mini_bench.run("--tasks", "D>W", "--seeds", seeds, settings=QUICK).code == 0
            shutil.copytree(
                mini_bench.out / "D-W" / "seed-7", mini_bench.out / "D-W" / "seed-seven", dirs_exist_ok=True
            )
        assert [line["seed"] for line in lines(mini_bench.out)] == [5, 7]
        assert "over seeds 5, 7" in (mini_bench.out / "table.md").read_text(encoding="utf-8")

    def test_a_benchmark_is_not_given_one(self, mini: Path, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("source_model: runs/first\n")
        said = TestBadInput().refused(mini, tmp_path / "out", config=file)
        assert says(said, "stage 1", "leave 'source_model' out")
        assert not (tmp_path / "out").exists()


SEVERAL = ("--method", "minent,cdan_tn,cdtrans", "--start", "authors", "--tasks", "A>D,A>W", "--seeds", "1")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, mini: Path) -> tuple[Path, Ended]:
    """The folder of a comparison in which one run fails, and what the command printed."""
    made = Bench(tmp_path_factory.mktemp("several"), mini)
    flags = ("--method", "cdtrans,minent", "--start", "authors", "--tasks", "A>D", "--seeds", "1")
    assert made.run(*flags, settings=QUICK).code == 0
    alien = made.out / "minent" / "A-W" / "seed-1234"
    alien.mkdir(parents=True)
    (alien / "thesis.doc").touch()
    return made.out, made.run(*SEVERAL, "--json", settings=QUICK)


@pytest.mark.slow
class TestSeveralMethods:
    def test_a_failed_run_shows_in_its_row_and_the_others_go_on(self, several: tuple[Path, Ended]) -> None:
        out, ended = several
        assert ended.code == 1
        told = json.loads(ended.out)
        assert (told["runs"], told["finished"], told["failed"]) == (4, 3, ["minent A>W seed 1234"])
        rows = {row["method"]: row for row in told["methods"]}
        assert [*rows] == ["source_only", "cdtrans", "minent", "cdan_tn"]
        assert rows["minent"]["note"] == "1 of 2 failed"
        assert rows["minent"]["mean"]["label_free"] is None
        assert rows["cdan_tn"]["note"] == "needs BatchNorm"
        assert not (out / "cdan_tn").exists()
        assert "| 1 of 2 failed |" in (out / "compared.md").read_text(encoding="utf-8")

    def test_the_numbers_are_those_of_the_runs(self, several: tuple[Path, Ended]) -> None:
        out, ended = several
        rows = {row["method"]: row for row in json.loads(ended.out)["methods"]}
        scores = {line["run"]: line["scores"] for line in lines(out)}
        assert [*scores] == [f"{name}/seed-1234" for name in ("cdtrans/A-D", "cdtrans/A-W", "minent/A-D")]
        two = [100 * scores[f"cdtrans/{task}/seed-1234"]["label_free"] for task in ("A-D", "A-W")]
        assert rows["cdtrans"]["mean"]["label_free"] == pytest.approx(sum(two) / 2)
        assert rows["minent"]["label_free"]["A>D"] == pytest.approx(100 * scores["minent/A-D/seed-1234"]["label_free"])
        assert (rows["minent"]["pairs"], rows["cdtrans"]["pairs"]) == (1, 0)
        assert rows["minent"]["difference"] == pytest.approx(rows["minent"]["label_free"]["A>D"] - two[0])

    def test_all_methods_and_tasks_of_a_source_share_stage_1(self, several: tuple[Path, Ended]) -> None:
        assert {line["stage_1"] for line in lines(several[0])} == {"cdtrans/A-D/seed-1234"}
        trained, *others = (
            tree(several[0] / name / "seed-1234" / "source")["model.safetensors"]
            for name in ("cdtrans/A-D", "cdtrans/A-W", "minent/A-D")
        )
        assert others == [trained] * 2

    def test_the_page_is_self_contained(self, several: tuple[Path, Ended]) -> None:
        text = (several[0] / "bench.html").read_text(encoding="utf-8")
        assert says(text, "minent", "1 of 2 failed", "needs BatchNorm", "--target: #e0762f")
        assert not re.search(r"https?://|<script|src=", text)

    def test_the_folder_is_of_this_start_and_of_several_methods(
        self, several: tuple[Path, Ended], mini: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump(QUICK))
        for how in ({"method": "dann,mcd", "start": "best"}, {"method": "cdtrans"}):
            said = TestBadInput().refused(mini, several[0], config=file, **how)
            assert says(said, str(several[0]), "several, from the start 'authors' there")


@pytest.mark.slow
class TestKilled:
    def test_killed_in_the_middle_and_continued_it_is_the_same_table(self, whole: Path, mini_bench: Bench) -> None:
        process = mini_bench.start(*TWO)
        first, second = run_of(mini_bench.out, "A-W"), run_of(mini_bench.out, "D-A")
        assert process.wait_until(lambda: (second.folder / "state").exists())
        process.send(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        wait(lambda: not second.busy())  # its process was told to end, and saved its state
        assert first.finished
        assert not second.finished
        assert not (second.folder / "result.json").exists()
        assert [line["task"] for line in lines(mini_bench.out)] == ["A>W"]
        assert says((mini_bench.out / "table.md").read_text(encoding="utf-8"), "unfinished", "5 of 6 runs")
        before = tree(first.folder)
        ended = mini_bench.run(*TWO)
        assert ended.code == 0, ended.err
        assert says(ended.out, "2 runs", "1 of them finished")
        assert untimed(mini_bench.out) == untimed(whole)
        assert tree(first.folder) == before
        for name in ("A-W", "D-A"):
            expected = {k: v for k, v in tree(whole / name / "seed-1234").items() if k != "config.yaml"}
            assert {
                k: v for k, v in tree(mini_bench.out / name / "seed-1234").items() if k != "config.yaml"
            } == expected

    @pytest.mark.parametrize("name", ["results.jsonl", "table.md", "bench.json"])
    def test_a_kill_in_the_middle_of_a_write_corrupts_nothing(self, mini_bench: Bench, name: str) -> None:
        flags = ("--tasks", "D>W", "--seeds", "1")
        killed = mini_bench.run(*flags, settings=QUICK, crash={"name": name, "when": "before"})
        assert killed.code == -signal.SIGKILL
        ended = mini_bench.run(*flags, settings=QUICK)
        assert ended.code == 0, ended.err
        assert [line["task"] for line in lines(mini_bench.out)] == ["D>W"]

    def test_ctrl_c_ends_the_children_and_exits_with_130(self, mini_bench: Bench) -> None:
        long = TINY | {"epochs": 12}  # else they might end before they hear of it
        process = mini_bench.start(*TWO, "--jobs", "2", settings=long)
        both = [run_of(mini_bench.out, name) for name in ("A-W", "D-A")]
        assert process.wait_until(lambda: all((run.folder / "state").exists() for run in both))
        process.send(signal.SIGINT)
        ended = process.wait()
        assert ended.code == 130
        assert says(ended.err, "interrupted", "saved", "same command again")
        assert not any(run.busy() for run in both)
        assert not any((run.folder / "result.json").exists() for run in both)
        assert lines(mini_bench.out) == []
        assert all(json.loads((run.folder.parent / "seed-1234.sessions.json").read_text()) for run in both)
        assert mini_bench.run(*TWO, "--jobs", "2", settings=long).code == 0
        assert len(lines(mini_bench.out)) == 2


@pytest.mark.slow
class TestFailing:
    def test_a_run_that_fails_is_reported_and_the_others_go_on(self, mini_bench: Bench) -> None:
        alien = mini_bench.out / "A-W" / "seed-1234"
        assert mini_bench.run("--tasks", "D>W", "--seeds", "1", settings=QUICK).code == 0
        alien.mkdir(parents=True)
        (alien / "thesis.doc").touch()
        ended = mini_bench.run("--tasks", "A>W,D>A", "--seeds", "1", settings=QUICK)
        assert ended.code == 1
        assert says(ended.err, "warning: A>W seed 1234 failed", "exit code 2", str(alien), "not a run folder")
        assert f"{alien}.log" in ended.err
        assert says(ended.out, "1 of 2 runs", "finished")
        assert [line["task"] for line in lines(mini_bench.out)] == ["D>A", "D>W"]
        assert "A>W (seed 1234)" in (mini_bench.out / "table.md").read_text(encoding="utf-8")

    def test_a_run_that_is_killed(self, mini_bench: Bench) -> None:
        process = mini_bench.start("--tasks", "A>W", "--seeds", "1")
        run = run_of(mini_bench.out, "A-W")
        assert process.wait_until(run.busy)
        pid = next(children(process.pid))
        os.kill(pid, signal.SIGKILL)
        ended = process.wait()
        assert ended.code == 1
        assert says(ended.err, "A>W seed 1234 failed", "signal 9")

    def test_another_benchmark_at_work_on_the_folder(self, mini_bench: Bench) -> None:
        process = mini_bench.start(*TWO)
        assert process.wait_until(lambda: (mini_bench.out / "bench.json").exists())
        ended = mini_bench.run(*TWO)
        assert ended.code == 2
        assert says(ended.err, "error: another process", str(mini_bench.out))
        process.send(signal.SIGTERM)
        assert process.wait().code == 143


def is_alive(pid: int) -> bool:
    """An ended process that nobody has waited for is not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def children(pid: int) -> Iterator[int]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        fields = file.read_text().rsplit(")", 1)[1].split()
        if int(fields[1]) == pid:
            yield int(file.parent.name)


@pytest.mark.slow
class TestRealProcesses:
    def test_the_command_as_a_user_gives_it(self, mini_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """The children are those of `runtime/children.py`, and the domains come as lists."""
        data = shutil.copytree(mini_bench.data, mini_bench.folder / "listed")
        for domain in ("dslr", "webcam"):
            files = sorted((data / domain).rglob("*.png"))
            label = {name: str(len(CLASSES) - k) for k, name in enumerate(CLASSES)}  # not in the alphabet's order
            listed = [f"/gone/{p.relative_to(data).as_posix()} {label[p.parent.name]}\n" for p in files]
            (data / f"{domain}_list.txt").write_text("".join(listed))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        flags = ("--tasks", "D>W", "--seeds", "7,", "--device", "cpu", "--no-center-aware")
        mini_bench.data = data
        ended = warm().run(mini_bench.arguments(*flags, settings=QUICK), mini_bench.folder / "logs")
        assert ended.code == 0, ended.err
        run = mini_bench.out / "D-W" / "seed-7"
        card = json.loads((run / "adapted" / "model.json").read_text())
        assert card["classes"] == ["ruler", "pen", "mug"]
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["method_args"]["center_aware"], config["root"]) == (False, str(data))
        unlabelled = mini_bench.out / "data" / "webcam.unlabelled.txt"
        assert config["target"] == str(unlabelled)
        assert unlabelled.read_text().splitlines()[0] == "webcam/images/mug/frame_0000.png"
        assert says((mini_bench.out / "table.md").read_text(encoding="utf-8"), "webcam_list.txt", "18 images")


class TestBadInput:
    """One sentence, and nothing left behind."""

    def refused(self, mini: Path, out: Path, **how: Any) -> str:
        given = {"data": mini, "allow_incomplete": True, "seeds": "1", "config": None} | how
        with pytest.raises(CdtransError) as caught:
            bench(given.pop("name", "office31"), out=out, screen=Screen(quiet=True), **given)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("how", "words"),
        [
            ({"name": "office32"}, ["'office32'", "'office31'?"]),
            ({"tasks": "A>W,A>X"}, ["'A>X'", "task", "Office-31"]),
            ({"tasks": "A>W,"}, ["''", "task", "Office-31"]),
            ({"seeds": "0"}, ["from 1 to 100"]),
            ({"seeds": "1234"}, ["one seed", "'1234,'"]),
            ({"seeds": "one"}, ["--seeds", "number"]),
            ({"seeds": "1,1"}, ["seed", "twice"]),
            ({"allow_incomplete": False}, ["published", "amazon", "'back_pack'"]),
            ({"lr": -1}, ["'lr'", "at least 0"]),
            ({"weights": "gone.pth"}, ["weights", "'gone.pth'"]),
            ({"device": "tpu"}, ["device 'tpu'"]),
            ({"pairing": "ground_truth"}, ["'ground_truth'", "'pairing'", "two_way"]),
            ({"method": "ground_truth"}, ["'ground_truth'", "target labels"]),
            ({"method": "dannn"}, ["'dannn'", "did you mean 'dann'?"]),
            ({"method": "cdtrans,dannn"}, ["'dannn'", "did you mean 'dann'?"]),
            ({"method": "dann,"}, ["''", "method"]),
            ({"method": "dann,cdtrans,dann"}, ["'dann'", "twice"]),
            ({"method": "all,mcd"}, ["'mcd'", "twice"]),
            ({"method": "dann,mcd", "method_args": {"ramp": 1}}, ["--set", "one method", "several"]),
            ({"method": "cdtrans,mcd", "pairing": "two_way"}, ["'pairing'", "one method", "several"]),
            ({"method": "dann,mcd", "recipe": "best"}, ["--start", "not", "--recipe"]),
            ({"method": "dann,mcd", "start": "bets"}, ["'bets'", "--start", "did you mean 'best'?"]),
            ({"effort": "quick"}, ["--effort quick", "recipe 'best'"]),
            ({"method": "dann,mcd", "start": "best", "effort": "instant"}, ["--effort instant", "--method dann"]),
            ({"method": "dann", "start": "best"}, ["--start", "several methods", "--recipe"]),
            ({"method": "cdan_tn,dcan", "pretrained": False}, ["none of these methods", "deit_small"]),
            ({"method": "dann", "method_args": {"ramp": -1}}, ["'ramp'", "at least 0"]),
            ({"backbone": "deit_smal"}, ["deit_smal"]),
            ({"data": Path("gone")}, ["'gone'", "Office-31"]),
        ],
    )
    def test_before_anything_is_written(
        self, mini: Path, tmp_path: Path, how: dict[str, Any], words: list[str]
    ) -> None:
        assert says(self.refused(mini, tmp_path / "out", **how), *words)
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_holds_something_else(self, mini: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis.doc").touch()
        assert says(self.refused(mini, tmp_path), f"'{tmp_path}'", "not a benchmark", "--out")
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.doc"]

    @pytest.mark.slow
    def test_a_folder_of_another_recipe(self, mini: Path, tmp_path: Path, whole: Path) -> None:
        shutil.copytree(whole, tmp_path / "out")
        before = tree(tmp_path / "out")
        said = self.refused(mini, tmp_path / "out", config=whole.parent / "tiny.yaml", lr=0.07)
        assert says(said, f"'{tmp_path / 'out'}'", "lr: 0.05 there, 0.07 now", "--out")
        assert tree(tmp_path / "out") == before
        said = self.refused(mini, tmp_path / "out", config=whole.parent / "tiny.yaml", guard=True)
        assert "(guard: False there, True now)" in said


class TestSettings:
    def plan(self, mini: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Plan:
        """What would be run, with no run."""
        plans: list[Plan] = []
        monkeypatch.setattr("cdtrans.studies.benchmark._run_all", lambda plan, jobs, screen: plans.append(plan) or [])
        bench("office31", mini, allow_incomplete=True, screen=Screen(quiet=True), **how)
        return plans[0]

    def test_all_tasks_with_the_first_seed_come_first(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = self.plan(mini, monkeypatch, out=tmp_path / "out").runs()
        assert [run.name for run in runs[:7]] == [*(f"{task.name} seed 1234" for task in OFFICE31.tasks), "A>D seed 1"]
        assert len(runs) == 18
        assert runs[1].folder == tmp_path / "out" / "A-W" / "seed-1234"

    def test_several_methods_are_run_in_their_order_with_a_stage_1_for_each_start(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        how = {"method": "dann,cotraining,cdtrans", "tasks": "A>W,D>W", "seeds": "2", "out": tmp_path / "out"}
        plan = self.plan(mini, monkeypatch, start="authors", **how)
        runs = plan.runs()
        assert [run.name for run in runs[:7]] == [
            *("cotraining A>W seed 1234", "cotraining D>W seed 1234", "cdtrans A>W seed 1234", "cdtrans D>W seed 1234"),
            *("dann A>W seed 1234", "dann D>W seed 1234", "cotraining A>W seed 1"),
        ]
        peers = [[p.relative_to(plan.out).as_posix() for p in run.peers] for run in (runs[0], runs[4])]
        assert peers[0] == ["cotraining/A-D/seed-1234", "cotraining/A-W/seed-1234"]
        assert peers[1] == [f"{method}/{task}/seed-1234" for method in ("cdtrans", "dann") for task in ("A-D", "A-W")]
        assert [recipe.config.recipe for recipe in plan.recipes] == ["best", "authors", "authors"]

    def test_a_comparison_from_the_authors_start_has_a_quarter_of_their_stage_2(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unless the user says otherwise; the methods of the best recipe keep theirs."""

        def schedule(config: Config) -> list[int]:
            return [config.epochs, config.warmup_epochs, config.rebuild_every]

        file = tmp_path / "settings.yaml"
        file.write_text("rebuild_every: 5\n")
        how = {"method": "cotraining,dann", "start": "authors"}
        plan = self.plan(mini, monkeypatch, out=tmp_path / "a", **how)
        assert [schedule(recipe.config) for recipe in plan.recipes] == [[10, 1, 1], [10, 10, 3]]
        assert plan.recipes[1].config.source_epochs == 10
        assert schedule(plan.shared) == [10, 10, 3]
        plan = self.plan(mini, monkeypatch, out=tmp_path / "b", epochs=40, config=file, **how)
        assert schedule(plan.recipes[1].config) == [40, 10, 5]
        plan = self.plan(mini, monkeypatch, out=tmp_path / "c", method="dann")
        assert schedule(plan.recipes[0].config) == [40, 10, 10], "one method is as its authors' scripts"

    @pytest.mark.parametrize(("method", "epochs"), [("cotraining", 10), ("instant", 1)])
    def test_a_method_of_the_best_recipe_has_it_also_by_itself(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, epochs: int
    ) -> None:
        (recipe,) = self.plan(mini, monkeypatch, method=method, out=tmp_path / "out").recipes
        assert [recipe.config.recipe, recipe.config.source_fit, recipe.config.epochs] == ["best", "probe", epochs]
        assert not any(flag.startswith("--preset") for flag in recipe.flags)

    def test_the_best_start_is_the_best_recipe_with_another_method(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = {"method": "instant,dann", "start": "best", "epochs": 7, "out": tmp_path / "out"}
        instant, dann = self.plan(mini, monkeypatch, **given).recipes
        assert [instant.config.source_fit, instant.config.epochs, instant.config.effort] == ["probe", 1, "instant"]
        assert [dann.config.source_fit, dann.config.epochs, dann.config.optimizer] == ["probe", 7, "adamw"]
        assert {"--recipe=best", "--method=dann", "--epochs=7"} <= set(dann.flags)
        assert not any(flag.startswith("--preset") for flag in dann.flags)

    @pytest.mark.parametrize("start", ["authors", "best"])
    def test_a_file_s_backbone_wins_over_the_preset_s(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
    ) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("backbone: vit_tiny_patch16_224\n")
        given = {"method": "mcc,dann", "start": start, "config": file, "out": tmp_path / "out"}
        plan = self.plan(mini, monkeypatch, **given)
        assert {recipe.config.backbone for recipe in plan.recipes} == {plan.shared.backbone} == {"vit_tiny_patch16_224"}
        assert not any(flag.startswith("--backbone") for flag in plan.recipes[0].flags)

    @pytest.mark.parametrize(
        ("backbone", "preset", "name"),
        [
            ("deit_small", "office31-deit-small", "deit_small_distilled_patch16_224.fb_in1k"),
            ("deit_base", "office31-deit-base", "deit_base_distilled_patch16_224.fb_in1k"),
            ("vit_small_patch14_dinov2.lvd142m", "office31-deit-small", "vit_small_patch14_dinov2.lvd142m"),
        ],
    )
    def test_a_backbone_is_a_preset_or_a_name(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: str, preset: str, name: str
    ) -> None:
        (recipe,) = self.plan(mini, monkeypatch, backbone=backbone, out=tmp_path / "out").recipes
        assert f"--preset={preset}" in recipe.flags
        assert recipe.config == make_config(read_recipe(preset), {"backbone": name, "guard": False, "report": False})
        assert (f"--backbone={name}" in recipe.flags) == (backbone == name)

    def test_settings_reach_adapt_and_the_device_also_eval(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights = tmp_path / "w.safetensors"
        save_file({"a": torch.zeros(1)}, weights)
        settings = {"weights": str(weights), "pretrained": False, "detach_teacher": True, "lr": 0.01, "device": "cpu"}
        plan = self.plan(mini, monkeypatch, out=tmp_path / "out", force=True, **settings)
        run = plan.runs()[0]
        for flag in (f"--weights={weights}", "--no-pretrained", "--detach-teacher", "--lr=0.01", "--device=cpu"):
            assert flag in run.adapt
        assert "--force" in run.adapt
        assert run.score[-4:] == ("--device", "cpu", "--max-bad", "0.05")
        assert run.adapt[:3] == ("adapt", str(mini / "amazon" / "images"), str(mini / "dslr" / "images"))

    def test_the_default_folder_is_named_after_both(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.plan(mini, monkeypatch, backbone="deit_base").out == Path("runs/office31-deit_base")

    def test_the_lists_that_are_written_give_the_same_domain(
        self, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = shutil.copytree(mini, tmp_path / "data")
        names = {"mug": 9, "pen": 4, "ruler": 6}
        images = sorted((data / "dslr").rglob("*.png"), key=lambda p: p.name)
        listed = "".join(f"{p.relative_to(data).as_posix()} {names[p.parent.name]}\n" for p in images)
        (data / "dslr.txt").write_text(listed)
        plan = self.plan(data, monkeypatch, out=tmp_path / "out")
        domain = find_benchmark(OFFICE31, data, OFFICE31.tasks, allow_incomplete=True).domains["dslr"].images
        assert scan_labelled(tmp_path / "out" / "data" / "dslr.labelled.txt", data) == domain
        unlabelled = scan_unlabelled(tmp_path / "out" / "data" / "dslr.unlabelled.txt", data)
        assert unlabelled.paths == domain.paths
        assert domain.classes == ("pen", "ruler", "mug")
        assert plan.runs()[0].adapt[2] == str(tmp_path / "out" / "data" / "dslr.unlabelled.txt")


class TestSeeds:
    def test_a_number_and_a_list(self) -> None:
        assert parse_seeds("3") == (1234, 1, 2)
        assert parse_seeds("1") == (1234,)
        assert parse_seeds("1234,1") == (1234, 1)
        assert parse_seeds("7,") == (7,)
        assert parse_seeds(" 4 , 5 ") == (4, 5)
        assert Config().seed == parse_seeds("1")[0]

    def test_numbers_without_end_are_refused(self) -> None:
        for text in ("9" * 5000, f"1,{'9' * 5000}", "1000000000000"):
            with error_says("--seeds"):
                parse_seeds(text)

    @given(st.integers(1, 100))
    def test_as_many_as_asked_for_and_all_different(self, count: int) -> None:
        assert len(set(parse_seeds(str(count)))) == count

    @given(st.lists(st.integers(0, 10**9), min_size=2, unique=True))
    def test_a_list_is_taken_as_it_is(self, seeds: list[int]) -> None:
        assert parse_seeds(",".join(map(str, seeds))) == tuple(seeds)

    @given(st.text())
    def test_any_other_text_is_refused_in_a_sentence(self, text: str) -> None:
        with suppress(CdtransError):
            assert all(seed >= 0 for seed in parse_seeds(text))


class TestResults:
    def scored(self, folder: Path, **told: Any) -> Path:
        run = folder / "S-R" / "seed-1"
        run.mkdir(parents=True)
        values = {"accuracy": 0.9, "class_mean_accuracy": 0.5, "images": 10, "classes": ["bus", "car"]}
        values["per_class"] = {"bus": 0.4, "car": 0.6}
        (run / SCORED).write_text(json.dumps(values | told))
        (run / "result.json").write_text('{"chosen_epoch": 1, "chosen_model": "adapted"}')
        (run / "config.yaml").write_text("backbone: vit\n")
        (run / "environment.json").write_text('{"device": "cpu: x"}')
        (folder / "S-R" / "seed-1.sessions.json").write_text('[{"seconds": 10, "jobs": 1}, {"seconds": 30, "jobs": 3}]')
        return folder

    def test_visda_s_best_epoch_is_the_best_by_class_mean(self, tmp_path: Path) -> None:
        """And never epoch 0, which is the model before adaptation."""
        history = {
            "accuracy_by_epoch": [0.1, 0.9, 0.2, 0.3],
            "class_mean_accuracy_by_epoch": [0.9, 0.3, 0.8, 0.4],
            "per_class_by_epoch": [[0.9, 0.9], [0.3, 0.3], [0.7, 0.9], [0.4, None]],
        }
        result = read_run(VISDA2017, VISDA2017.tasks[0], 1, self.scored(tmp_path, **history))
        assert result is not None
        assert result.scores == {"source_only": 0.9, "last_epoch": 0.4, "label_free": 0.5, "best_by_labels": 0.8}
        assert result.epochs == {"label_free": 1, "best_by_labels": 2}
        assert result.per_class["best_by_labels"] == {"bus": 0.7, "car": 0.9}
        assert result.per_class["last_epoch"] == {"bus": 0.4, "car": None}
        assert (result.seconds, result.device_seconds) == (40, 20)
        assert result.curve == history["class_mean_accuracy_by_epoch"]
        assert result.peak_memory is None, "on a CPU it is not known"

    def test_peak_memory_is_the_most_of_all_sessions(self, tmp_path: Path) -> None:
        folder = self.scored(tmp_path)
        lines = [{"stage": "check"}, *({"stage": "session", "peak_memory": n} for n in (3, 9, 5))]
        (folder / "S-R" / "seed-1" / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = read_run(VISDA2017, VISDA2017.tasks[0], 1, folder)
        assert result is not None
        assert result.peak_memory == 9

    def test_a_run_without_history_has_only_its_choice(self, tmp_path: Path) -> None:
        result = read_run(VISDA2017, VISDA2017.tasks[0], 1, self.scored(tmp_path))
        assert result is not None
        assert result.scores == {"label_free": 0.5}

    def test_a_run_that_ended_before_stage_2_has_no_last_epoch(self, tmp_path: Path) -> None:
        history = {"class_mean_accuracy_by_epoch": [0.9], "per_class_by_epoch": [[0.9, 0.9]]}
        result = read_run(VISDA2017, VISDA2017.tasks[0], 1, self.scored(tmp_path, **history))
        assert result is not None
        assert result.scores == {"source_only": 0.9, "label_free": 0.5}
        assert result.epochs == {"label_free": 1}

    def test_a_run_that_is_not_scored_is_none(self, tmp_path: Path) -> None:
        assert read_run(VISDA2017, VISDA2017.tasks[0], 2, self.scored(tmp_path)) is None
