"""The order in which runs start: runs that share stage 1, on processes that only pretend to work."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from cdtrans.config import Config, read_yaml
from cdtrans.runtime import processes
from cdtrans.runtime.screen import Screen
from cdtrans.studies import study
from cdtrans.studies.results import beside, read_sessions, trained_in
from cdtrans.studies.study import ActiveRun, PlannedRun, run_jobs

STEP = 10  # how often a job is asked whether it has ended, in each stage that it pretends
RESOLVED = Config().to_dict() | {"device": "cpu", "crop": 16, "resize": 18, "precision": "fp32"}


@dataclass
class Stage:
    """Pretended runs, and when they were started."""

    out: Path
    fail: dict[str, int] = field(default_factory=dict)  # run -> the stage before which it fails
    started: list[tuple[str, str | None]] = field(default_factory=list)  # run, and the origin of its stage 1
    side_by_side: list[set[str]] = field(default_factory=list)
    logs: bool = True  # whether a run lives long enough to open its log

    def plan(self, *names: str, peers: Sequence[str] | None = None) -> list[PlannedRun]:
        """One source: all runs share."""
        folders = tuple(self.out / name for name in (names if peers is None else peers))
        return [PlannedRun(name, self.out / name, ("adapt",), self.out, RESOLVED, folders) for name in names]

    def begin(self, name: str, source_model: str | None = None, *, stage_1: bool = False) -> None:
        (self.out / name).mkdir(parents=True, exist_ok=True)
        (self.out / name / "config.yaml").write_text(yaml.safe_dump(RESOLVED | {"source_model": source_model}))
        if stage_1:
            (self.out / name / "source").mkdir(exist_ok=True)

    def run(self, runs: list[PlannedRun], side_by_side: int = 1) -> list[str]:
        """The runs that failed."""
        ended: list[ActiveRun] = []
        run_jobs("test", runs, side_by_side, Screen(quiet=True), ended.append)
        return [job.run.name for job in ended if job.failure]

    def origins(self) -> dict[str, str | None]:
        return {run: taken and Path(taken).name for run, taken in self.started}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage, running = Stage(tmp_path), set()

    class Pretended:
        def __init__(self, arguments: tuple[str, ...], out: Path, err: Path, side_by_side: int) -> None:
            verb, *flags = arguments
            self.name, self.scoring, self.asked = err.stem, verb == "eval", 0
            if stage.logs:
                err.touch()
            if self.scoring:
                return
            taken = flags[5] if len(flags) > 4 else None
            assert flags[:4] == ["--config", str(stage.out / f"{self.name}.yaml"), "--out", str(stage.out / self.name)]
            assert taken is None or (Path(taken) / "source").exists(), "started too early"
            stage.started.append((self.name, taken))
            running.add(self.name)
            stage.side_by_side.append(set(running))
            if stage.fail.get(self.name) != 0:
                stage.begin(self.name, taken, stage_1=taken is not None)

        @property
        def exitcode(self) -> int | None:
            if self.scoring:
                if stage.fail.get(self.name) != 3:
                    (stage.out / self.name / "evaluation.json").write_text("{}")
                return 0
            self.asked += 1
            done = self.asked // STEP
            fails = stage.fail.get(self.name)
            if fails is not None and done >= fails:
                running.discard(self.name)
                return 2
            if done >= 1:
                (stage.out / self.name / "source").mkdir(exist_ok=True)
            if done >= 2:
                running.discard(self.name)
                (stage.out / self.name / "result.json").write_text("{}")
                return 0
            return None

        def terminate(self) -> None: ...
        def join(self) -> None: ...

    monkeypatch.setattr(processes, "start_process", Pretended)
    monkeypatch.setattr(study, "POLL_SECONDS", 0.001)
    return stage


@pytest.mark.parametrize(
    ("fail", "side_by_side", "origins"),
    [
        pytest.param({}, 3, {"a": None, "b": "a", "c": "a"}, id="none"),
        pytest.param({"a": 0}, 1, {"a": None, "b": None, "c": "b"}, id="the first at once"),
        pytest.param({"a": 0}, 3, {"a": None, "b": None, "c": "b"}, id="the first at once, side by side"),
        pytest.param({"a": 1}, 1, {"a": None, "b": None, "c": "b"}, id="the first in stage 1"),
        pytest.param({"a": 1}, 3, {"a": None, "b": None, "c": "b"}, id="the first in stage 1, side by side"),
        pytest.param({"a": 2}, 2, {"a": None, "b": "a", "c": "a"}, id="the first after its stage 1, which is good"),
        pytest.param({"a": 3}, 1, {"a": None, "b": "a", "c": "a"}, id="the first without saving its scores"),
    ],
)
def test_the_first_run_that_does_not_fail_before_trains_stage_1(
    stage: Stage, fail: dict[str, int], side_by_side: int, origins: dict[str, str | None]
) -> None:
    stage.fail |= fail
    assert stage.run(stage.plan("a", "b", "c"), side_by_side) == [*fail]
    assert stage.origins() == origins
    if side_by_side == 3 and not fail:
        assert stage.side_by_side == [{"a"}, {"a", "b"}, {"a", "b", "c"}], "they wait for stage 1, not for the end"


def test_only_runs_of_one_source_wait_for_each_other(stage: Stage) -> None:
    assert stage.run(stage.plan("a", "b") + stage.plan("x", "y") + stage.plan("z", peers=()), 2) == []
    assert [name for name, _ in stage.started][:2] == ["a", "x"]
    assert stage.origins() == {"a": None, "b": "a", "x": None, "y": "x", "z": None}


@pytest.mark.parametrize(("stage_1", "origin"), [(True, "a"), (False, None)])
def test_a_run_that_is_not_asked_for_gives_its_stage_1_but_nobody_waits_for_it(
    stage: Stage, stage_1: bool, origin: str | None
) -> None:
    stage.begin("a", stage_1=stage_1)
    assert stage.run(stage.plan("b", peers=("a", "b"))) == []
    assert stage.origins() == {"b": origin}


def test_all_fail_and_nothing_waits_for_ever(stage: Stage) -> None:
    stage.fail |= {"a": 1, "b": 0, "c": 1}
    assert stage.run(stage.plan("a", "b", "c"), 2) == ["a", "b", "c"]
    stage.started.clear()
    stage.fail.clear()
    assert stage.run(stage.plan("a", "b", "c"), 2) == []
    assert stage.origins() == {"a": None, "c": None, "b": "a"} or stage.origins() == {"a": None, "c": None, "b": "c"}


def test_a_run_that_has_begun_goes_on_as_it_began_and_the_others_wait_for_it(stage: Stage) -> None:
    """Whatever its place: it cannot be told of another stage 1 any more."""
    stage.begin("c")
    assert stage.run(stage.plan("a", "b", "c"), 1) == []
    assert stage.origins() == {"a": "c", "b": "a", "c": None}
    assert [trained_in(stage.out / name, stage.out) for name in "abc"] == ["c"] * 3


def test_one_that_began_with_another_s_stage_1_keeps_to_it_even_if_that_run_is_gone(stage: Stage) -> None:
    stage.begin("b", "/gone/a", stage_1=True)
    run = stage.plan("a", "b")[1]
    assert run.command()[-2:] == ("--source-model", "/gone/a")


def test_the_device_is_shared_out_among_those_that_ran_and_not_those_that_waited(stage: Stage) -> None:
    begun = time.monotonic()
    stage.run(stage.plan("a", "b"), 4)
    elapsed = time.monotonic() - begun
    first, second = (read_sessions(stage.out / name)[0] for name in ("a", "b"))
    assert 0.52 < first.device_seconds / first.seconds <= 1, "alone in stage 1, at most two after it"
    assert 0.5 <= second.device_seconds / second.seconds <= 1
    whole = first.device_seconds + second.device_seconds
    assert 0.5 * elapsed < whole <= 1.05 * elapsed, "no second is counted twice"


def test_where_stage_1_was_trained_also_through_several_hands(stage: Stage) -> None:
    stage.begin("a")
    stage.begin("b", str(stage.out / "a"))
    stage.begin("c", str(stage.out / "b"))
    stage.begin("d", str(stage.out / "removed"))
    stage.begin("e", "/elsewhere/run")
    origins = {name: trained_in(stage.out / name, stage.out) for name in "abcde"}
    assert origins == {"a": "a", "b": "a", "c": "a", "d": "removed", "e": "/elsewhere/run"}


def test_a_run_reads_the_settings_that_were_planned(stage: Stage) -> None:
    settings = RESOLVED | {"backbone_args": {"init_values": 1e-5}, "root": "/data/\N{GRINNING FACE} \udcff"}
    run = replace(stage.plan("a")[0], settings=settings)
    assert stage.run([run]) == []
    assert read_yaml(beside(run.folder, "yaml")) == settings


def test_a_run_that_was_killed_before_it_opened_its_log_has_failed(stage: Stage) -> None:
    stage.logs, stage.fail["a"] = False, 0
    assert stage.run(stage.plan("a", "b")) == ["a"]


@pytest.mark.parametrize("file", ["a/config.yaml", "a.sessions.json"])
def test_a_damaged_file_of_a_run_that_has_begun_stops_that_run_alone(stage: Stage, file: str) -> None:
    stage.begin("a")
    (stage.out / file).write_text("{")
    assert stage.run(stage.plan("a", peers=("a", "b")) + stage.plan("x")) == ["a"]
    assert stage.origins() == {"x": None}
