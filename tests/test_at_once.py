"""What is wrong with a command is told before torch, timm and scikit-learn are imported, which takes seconds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cdtrans.config import Config
from tiny_task import TINY, Ended, draw, make_source, make_target

SLOW = ("torch", "timm", "torchvision", "sklearn", "matplotlib", "scipy")
# The command line in a process of its own, and then on standard output which of the slow ones it has imported.
LOOK = f"""
import sys, cdtrans.cli
try:
    cdtrans.cli.main()
finally:
    print([name for name in {SLOW} if name in sys.modules])
"""

Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run("eval", ...) -> how that ended, in a folder with the images and run folders that the cases name."""
    make_source(tmp_path / "source", each=2)
    make_target(tmp_path / "target", each=1)
    for name in ("empty", "other", "begun", "finished"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "letter.txt").write_text("Dear all,")
    places = {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "begun" / "config.yaml").write_text(yaml.safe_dump(Config(**TINY | places).to_dict()))
    (tmp_path / "finished" / "result.json").write_text(json.dumps({"chosen_epoch": 1, "chosen_model": "adapted"}))
    draw(tmp_path / "one.png", 0, seed=0)

    def run(*arguments: str) -> Ended:
        command = [sys.executable, "-c", LOOK, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("adapt nowhere target", "'nowhere' does not exist: check the path."),
        ("adapt source empty", "No image lies in 'empty' or below it"),
        ("adapt source source", "Source and target are the same, 'source'"),
        ("adapt source target --preset digit", "Unknown preset 'digit': did you mean 'digits'?"),
        ("adapt source target --epochs 0", "The setting 'epochs' must be at least 1, not 0."),
        ("adapt source target --neck xyz", "'xyz' is not a value of 'neck': known: batchnorm, none"),
        ("adapt source target --config no.yaml", "The configuration 'no.yaml' cannot be read"),
        ("adapt source target --pairing ground_truth", "'--pairing ground_truth' needs an answer key"),
        ("adapt source target --crop 64 --resize 32", "Images resized to 32 cannot be cropped to 64"),
        (
            "adapt source target --loss-source none --loss-source-target none --loss-target none",
            "Without any loss there is nothing to learn in stage 2",
        ),
        ("adapt source target --self-training rpll --loss-target none", "trains without pairs, by losses of its own"),
        ("adapt source target --out other", "'other' exists and is not a run folder; choose another --out."),
        (
            "adapt source target --config tiny.yaml --out begun --epochs 9 --precision auto",
            "'begun' holds another run (epochs: 4 there, 9 now); choose another --out to start a new one.",
        ),
        ("adapt source target --source-model nowhere", "nowhere' has no finished stage 1"),
        ("check source nowhere", "'nowhere' does not exist: check the path."),
        ("check source target --crop 64 --resize 32", "Images resized to 32 cannot be cropped to 64"),
        ("eval nowhere source", "The run folder 'nowhere' does not exist; make one with 'cdtrans adapt"),
        ("eval begun source", "'begun' holds no finished run"),
        ("eval finished nowhere", "The answer key cannot be used: 'nowhere' does not exist"),
        ("eval finished source --model choosen", "Unknown model 'choosen': did you mean 'chosen'?"),
        ("predict nowhere target", "The run folder 'nowhere' does not exist"),
        ("predict finished nowhere", "'nowhere' does not exist: check the path."),
        ("predict finished empty", "No image lies in 'empty' or below it"),
        ("predict finished target --model last", "The run in 'finished' has no last model"),
        ("predict finished target --csv other", "'other' is not a file that the predictions could replace"),
        ("predict finished target --csv one.png/p.csv", "'one.png' is not a writable folder"),
        ("report nowhere", "The run folder 'nowhere' does not exist"),
        ("report begun", "'begun' holds no finished run"),
    ],
)
def test_what_is_wrong_is_told_without_torch(run: Run, tmp_path: Path, command: str, sentence: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = run(*command.split())
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert sentence.replace("'one.png'", f"'{tmp_path / 'one.png'}'") in ended.err
    assert ended.out.splitlines()[-1] == "[]"
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_right_goes_on_to_import_it(run: Run, tmp_path: Path) -> None:
    """So that the cases above are wrong in the one respect that they name; an unknown device is torch's to tell."""
    for command in (
        "adapt source target --config tiny.yaml --out begun --device warp",
        "adapt source target --config tiny.yaml --out new --device warp",
        "check source target --config tiny.yaml --device warp",
    ):
        ended = run(*command.split())
        assert (ended.code, ended.err) == (2, "error: Unknown device 'warp'; use cpu, cuda or cuda:N.\n"), command
        assert "torch" in ended.out.splitlines()[-1]
    for command in ("eval finished source", "predict finished target"):
        ended = run(*command.split())
        assert "'finished/adapted' holds no finished model" in ended.err
        assert "torch" in ended.out.splitlines()[-1]
    assert not (tmp_path / "new").exists()
