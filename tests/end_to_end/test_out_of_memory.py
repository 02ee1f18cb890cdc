"""A whole run on a GPU with too little memory, for which a limit of images at once stands in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdtrans.run.pipeline import adapt
from cdtrans.training.loop import Loop
from support import error_says, small_gpu
from tiny_task import Task, log_lines, make_task, tree

pytestmark = pytest.mark.slow

MOST = 6  # images; stage 1 has 8 in a batch, stage 2 three branches of 8 pairs, and encoding 24 or 21


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    short = {"source_epochs": 2, "epochs": 2, "rebuild_every": 1}
    return make_task(tmp_path_factory.mktemp("task"), drop_path=0.3, **short)


def run(task: Task, out: Path) -> Path:
    return adapt(source=task.source, target=task.target, out=out, config=task.config).run


def stopped(task: Task, out: Path, saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends after its state has been saved so often."""
    save = Loop.save

    def stops(self: Loop) -> None:
        nonlocal saves
        save(self)
        saves -= 1
        if saves == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "save", stops)
        with pytest.raises(KeyboardInterrupt):
            run(task, out)


def test_it_ends_with_the_same_model_and_resumes_to_the_same_bytes(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(task, tmp_path / "whole")
    capsys.readouterr()
    small_gpu(monkeypatch, MOST)
    limited = run(task, tmp_path / "limited")
    said = [line for line in capsys.readouterr().out.splitlines() if "too little memory" in line]
    batches = [line.partition(" at once")[0].removeprefix("The GPU has too little memory ") for line in said]
    encoding = ["to encode 21 images", "to encode 10 images"]  # for the evidence, and in stage 2
    assert batches == ["for 8 images", *encoding, *encoding, "for 8 pairs", "for 8 pairs"]

    for model in ("source", "adapted", "last"):
        ours, theirs = (load_file(folder / model / "model.safetensors") for folder in (limited, whole))
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(log_lines(limited), log_lines(whole), strict=True):
        numbers = {key: value for key, value in b.items() if isinstance(value, float)}
        assert {key: a[key] for key in numbers} == pytest.approx(numbers, abs=1e-3)

    for saves in (4, 13):  # in the middle of both stages
        out = tmp_path / str(saves)
        stopped(task, out, saves, monkeypatch)
        capsys.readouterr()
        state = torch.load(out / "state" / "state.pt", weights_only=True)
        expected = {"source": 2, "adaptation": 4}[state["stage"]] if (state["epoch"], state["step"]) > (1, 0) else 1
        assert state["parts"]["memory"] == {"parts": expected, "recompute_blocks": False}
        run(task, out)
        assert tree(out) == tree(limited), saves
        again = "for 8 pairs at once" in capsys.readouterr().out
        assert again == (state["stage"] == "source" or expected == 1), "what is remembered is not said again"


def test_with_nothing_left_to_try_it_is_one_sentence(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_gpu(monkeypatch, 0)
    with error_says("too little memory", "one image at a time", "--backbone"):
        run(task, tmp_path / "run")
