"""`--source-model RUN`: stage 1 of another run instead of one's own, and what is refused."""

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import cdtrans
from commands import Ended, warm
from support import raises
from tiny_task import QUICK, Task, after_stage_1, computed, draw, log_lines, make_target, make_task, tree

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), source_epochs=2, epochs=2)


@pytest.fixture(scope="module")
def first(task: Task) -> Path:
    """The run that stage 1 is taken from."""
    return finished(task, task.folder / "first")


@pytest.fixture(scope="module")
def second(task: Task, first: Path) -> Path:
    """The same run, but for its stage 1."""
    return finished(task, task.folder / "second", "--source-model", str(first))


def adapt(task: Task, out: Path, *flags: str, **how: object) -> Ended:
    return warm().run(task.adapt(out, *flags), task.folder / "logs", **how)


def finished(task: Task, out: Path, *flags: str) -> Path:
    ended = adapt(task, out, *flags)
    assert ended.code == 0, ended.err
    return out


class TestTaken:
    def test_all_that_follows_is_the_same_to_the_last_bit(self, first: Path, second: Path) -> None:
        assert computed(second) == computed(first)
        assert "predictions/epoch-000.npz" in computed(second), "the source-only predictions"
        assert after_stage_1(second) == after_stage_1(first)

    def test_nothing_is_trained_and_the_log_says_so(self, first: Path, second: Path) -> None:
        lines = log_lines(second)
        took = {"run": str(first), "epochs": 2, "weights": "none: trained from scratch"}
        assert lines[0] == {"event": "source_model", **took}
        assert not [line for line in lines if line.get("stage") == "source"]

    def test_the_card_says_how_the_model_was_trained_whatever_the_flags_of_this_run(
        self, task: Task, first: Path, second: Path, tmp_path: Path
    ) -> None:
        """The model may itself be taken from a run; its place is stored absolute."""
        place = Path(*[".."] * len(Path.cwd().parts[1:])) / second.relative_to("/")
        out = finished(task, tmp_path / "out", f"--source-model={place}", "--source-epochs=9", "--weights=nothing.pth")
        assert computed(out) == computed(first)
        assert yaml.safe_load((out / "config.yaml").read_text())["source_model"] == str(second)

    def test_another_target_has_no_part_in_stage_1(self, task: Task, first: Path, tmp_path: Path) -> None:
        """Else it could not be shared: training it anew beside the other target gives the same bytes."""
        other = replace(task, target=make_target(tmp_path / "other", each=5))
        draw(other.target / "deeper" / "odd.png", 1, seed=77, shift=3.0)
        anew = finished(other, tmp_path / "anew")
        taken = finished(other, tmp_path / "taken", "--source-model", str(first))
        assert tree(anew / "source") == tree(first / "source")
        assert computed(taken) == computed(anew)
        assert computed(taken)["predictions.csv"] != computed(first)["predictions.csv"]


class TestAlone:
    def test_of_a_run_in_stage_2_that_is_then_deleted(self, task: Task, first: Path, tmp_path: Path) -> None:
        run, out = tmp_path / "run", tmp_path / "out"
        flags = ("--source-model", str(run))
        assert adapt(task, run, crash={"name": "epoch-001.npz", "when": "before"}).code == -signal.SIGKILL
        assert not (run / "result.json").exists()
        killed = adapt(task, out, *flags, crash={"name": "source", "when": "before"})
        assert killed.code == -signal.SIGKILL
        assert adapt(task, out, *flags, crash={"name": "source", "when": "after"}).code == -signal.SIGKILL
        shutil.rmtree(run)
        killed = adapt(task, out, *flags, crash={"name": "epoch-001.npz", "when": "after"})
        assert killed.code == -signal.SIGKILL, killed.err
        assert computed(finished(task, out, *flags)) == computed(first)
        assert after_stage_1(out) == after_stage_1(first)
        assert [line["event"] for line in log_lines(out)].count("source_model") == 1
        for verb in (["predict", str(out), str(task.target)], ["report", str(out)]):
            assert warm().run(verb, tmp_path / "logs").code == 0

    def test_a_run_goes_on_with_the_stage_1_that_it_began_with(self, task: Task, first: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        adapt(task, out, crash={"name": "state.pt", "when": "after", "nth": 2})
        ended = adapt(task, out, "--source-model", str(first))
        assert ended.code == 2
        assert f"source_model: None there, {first} now" in ended.err


def fewer_classes(task: Task) -> None:
    shutil.rmtree(task.source / "green")


def another_name(task: Task) -> None:
    (task.source / "green").rename(task.source / "lime")


def another_image(task: Task) -> None:
    draw(task.source / "red" / "99.png", 2, seed=99)


class TestRefused:
    """Before anything is written."""

    @staticmethod
    def refused(task: Task, out: Path, model: Path, code: str, **settings: Any) -> None:
        with raises(code):
            cdtrans.adapt(
                task.source, task.target, out=out, config=task.config, source_model=str(model), quiet=True, **settings
            )
        assert not out.exists()

    @pytest.mark.parametrize(
        ("change", "settings", "code"),
        [
            (fewer_classes, {}, "other-network"),
            (another_name, {}, "other-network"),
            (another_image, {}, "other-source"),
            (lambda task: None, {"neck": "none"}, "other-network"),
            (lambda task: None, {"crop": 8}, "other-network"),
            (lambda task: None, {"backbone": "deit_tiny_patch16_224"}, "other-network"),
            (lambda task: None, {"holdout": 0.25}, "other-source"),
        ],
    )
    def test_what_does_not_fit(
        self, first: Path, tmp_path: Path, change: Callable[[Task], None], settings: dict[str, Any], code: str
    ) -> None:
        task = make_task(tmp_path / "task", **QUICK)
        change(task)
        self.refused(task, tmp_path / "out", first, code, **settings)

    @pytest.mark.parametrize("place", ["nowhere", "source", "unfinished"])
    def test_a_place_without_a_finished_stage_1(self, task: Task, tmp_path: Path, place: str) -> None:
        adapt(task, task.folder / "unfinished", crash={"name": "state.pt", "when": "after", "nth": 2})
        self.refused(task, tmp_path / "out", task.folder / place, "no-stage-1")

    def test_one_that_does_not_tell_its_images(self, task: Task, first: Path, tmp_path: Path) -> None:
        run = shutil.copytree(first, tmp_path / "run")
        (run / "data.json").unlink()
        self.refused(task, tmp_path / "out", run, "run-damaged")

    def test_held_out_images_are_never_ones_that_the_model_knows(self, task: Task, tmp_path: Path) -> None:
        """The same share with the same seed is the same split; with another seed it is not."""
        run = finished(task, tmp_path / "run", "--holdout", "0.25")
        taken = ("--holdout", "0.25", "--source-model", str(run))
        assert computed(finished(task, tmp_path / "same", *taken)) == computed(run)
        self.refused(task, tmp_path / "other", run, "other-source", holdout=0.25, seed=7)

    def test_without_held_out_images_the_seed_is_stage_2_s_own(self, task: Task, first: Path, tmp_path: Path) -> None:
        out = finished(task, tmp_path / "out", "--seed", "7", "--source-model", str(first))
        assert tree(out / "source") == tree(first / "source")
        assert computed(out)["adapted/model.safetensors"] != computed(first)["adapted/model.safetensors"]
