"""Mistakes in a command are told before torch, timm and scikit-learn are imported, which takes seconds."""

import re
from pathlib import Path

import pytest
import yaml

import cdtrans
from cdtrans.config import Config
from cdtrans.record.layout import RESULT
from cdtrans.record.run import rewrite
from commands import Ended, cold, warm
from run_folders import outcome
from support import says
from tiny_task import TINY, draw, make_source, make_target

pytestmark = pytest.mark.slow  # processes: seconds in all

SLOW = ("torch", "timm", "torchvision", "sklearn", "matplotlib", "scipy")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the images and run folders that the cases name."""
    here = tmp_path / "here"
    make_source(here / "source", each=2)
    make_target(here / "target", each=1)
    for name in ("empty", "other", "begun", "finished"):
        (here / name).mkdir()
    (here / "other" / "letter.txt").write_text("Dear all,")
    places = {"source": str(here / "source"), "target": str(here / "target")}
    (here / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (here / "begun" / "config.yaml").write_text(yaml.safe_dump(Config(**TINY | places).to_dict()))
    rewrite(here / "finished", RESULT, outcome())
    draw(here / "one.png", 0, seed=0)
    return here


def forked(here: Path, command: str) -> Ended:
    """In a process of its own, which need not start Python anew."""
    return cold().run(command.split(), here.parent / "logs", folder=here, look_for=SLOW)


WRONG = [
    ("adapt nowhere target", ["nowhere'", "not exist"]),
    ("adapt source empty", ["no image", "empty'"]),
    ("adapt source source", ["the same", "source'"]),
    ("adapt source target --recipe digit", ["recipe 'digit'", "'digits'?"]),
    ("adapt source target --epochs 0", ["'epochs'", "at least 1"]),
    ("adapt source target --neck xyz", ["'xyz'", "'neck'", "batchnorm, none"]),
    ("adapt source target --config no.yaml", ["'no.yaml'", "cannot be read"]),
    ("adapt source target --method ground_truth", ["'ground_truth'", "target labels"]),
    ("adapt source target --method rpl", ["'rpl'", "'rpll'?"]),
    ("adapt source target --method no.py:Mine", ["no file", "no.py'", "method"]),
    ("adapt source target --method cdtrans --set pairin=two_way", ["'pairin'", "'pairing'?"]),
    ("adapt source target --set pairing", ["--set", "KEY=VALUE"]),
    ("methods rpl", ["'rpl'", "'rpll'?"]),
    ("adapt source target --crop 64 --resize 32", ["--crop 64", "--resize 32"]),
    ("adapt source target --loss-source none --loss-source-target none --loss-target none", ["loss", "stage 2"]),
    ("adapt source target --out other", ["'other'", "not a run folder", "--out"]),
    (
        "adapt source target --config tiny.yaml --out begun --epochs 9 --precision auto",
        ["'begun'", "(epochs: 4 there, 9 now)", "--out"],
    ),
    ("adapt source target --device gpu", ["device 'gpu'", "cpu, cuda, cuda:N or mps"]),
    ("check source target --device tpu", ["device 'tpu'"]),
    ("eval finished source --device cuda:x", ["device 'cuda:x'"]),
    ("adapt source target --device cuda:200", ["device 'cuda:200'", "cuda:N"]),
    ("check source target --device cuda:99999999999999999999", ["device 'cuda:99999999999999999999'"]),
    ("predict finished target --device cuda:01", ["device 'cuda:01'"]),
    ("adapt source target --weights no.safetensors", ["no.safetensors'", "--weights"]),
    ("check source target --weights other", ["other'", "--weights"]),
    ("adapt source target --source-model nowhere", ["nowhere'", "no finished stage 1"]),
    ("check source nowhere", ["nowhere'", "not exist"]),
    ("eval nowhere source", ["run folder 'nowhere'", "not exist", "cdtrans adapt"]),
    ("eval begun source", ["'begun'", "no finished run"]),
    ("eval finished nowhere", ["nowhere'", "not exist"]),
    ("eval finished source --model choosen", ["'model'", "'choosen'", "'chosen'?"]),
    ("predict nowhere target", ["run folder 'nowhere'", "not exist"]),
    ("predict finished nowhere", ["nowhere'", "not exist"]),
    ("predict finished empty", ["no image", "empty'"]),
    ("predict finished target --model last", ["'finished'", "no last model"]),
    ("predict finished target --csv other", ["'other'", "not a file", "--csv"]),
    ("predict finished target --csv one.png/p.csv", ["one.png'", "not a writable folder"]),
    ("export nowhere", ["run folder 'nowhere'", "not exist"]),
    ("export finished --out model.pt", ["'model.pt'", ".onnx", ".safetensors"]),
    ("export finished --model last", ["'finished'", "no last model"]),
    ("report nowhere", ["run folder 'nowhere'", "not exist"]),
    ("report begun", ["'begun'", "no finished run"]),
]


@pytest.mark.parametrize(("command", "words"), WRONG)
def test_what_is_wrong_is_told_without_torch(here: Path, command: str, words: list[str]) -> None:
    before = sorted(here.rglob("*"))
    ended = forked(here, command)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert says(ended.err, *words)
    assert ended.out.splitlines()[-1] == "[]"
    assert sorted(here.rglob("*")) == before


NO_SUCH_DEVICE = ["error: ", "device 'cuda:99'", "GPUs: "]
RIGHT = [
    ("adapt source target --config tiny.yaml --out begun --device cuda:99", NO_SUCH_DEVICE),
    ("adapt source target --config tiny.yaml --out new --device cuda:99", NO_SUCH_DEVICE),
    ("check source target --config tiny.yaml --device cuda:99", NO_SUCH_DEVICE),
    (
        "adapt source target --config tiny.yaml --out new --method rpll --loss-target none",
        ["error: ", "'rpll'", "no option 'loss_target'"],
    ),
    ("eval finished source", ["'finished/adapted'", "no finished model"]),
    ("predict finished target", ["'finished/adapted'", "no finished model"]),
]


@pytest.mark.parametrize(("command", "words"), RIGHT)
def test_what_is_right_goes_on_to_import_it(here: Path, command: str, words: list[str]) -> None:
    """So that the cases above are wrong in the one respect that they name; whether a device is here is torch's to
    tell."""
    ended = cold().run(command.split(), here.parent / "logs", folder=here, without=["torch"])
    assert "import of torch halted" in ended.err
    ended = warm().run(command.split(), here.parent / "logs", folder=here)
    assert ended.code == 2
    assert says(ended.err, *words)
    assert ended.err.count("\n") == 1
    assert not (here / "new").exists()


def test_a_whole_run_with_its_report_needs_neither_scikit_learn_nor_matplotlib(here: Path) -> None:
    """Their import takes longer than an epoch of Office-31 on a GPU, and would hold up training if done meanwhile."""
    command = "adapt source target --config tiny.yaml --out new --device cpu --no-guard --force --report"
    ended = forked(here, command)
    assert ended.code == 0, ended.err
    assert (here / "new" / "report.html").exists()
    assert not {"sklearn", "scipy", "matplotlib"} & set(re.findall(r"\w+", ended.out.splitlines()[-1]))


def test_completion_finds_the_public_names_and_they_are_there() -> None:
    assert {*dir(cdtrans)} - {"__version__"} == {*cdtrans.__all__}
    assert all(getattr(cdtrans, name).__name__ == name for name in cdtrans.__all__)
