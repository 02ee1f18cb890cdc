"""Every verb as a process of its own, started from an empty folder as a new user would."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commands import Ended, warm
from support import says
from tiny_task import Task, make_task

pytestmark = pytest.mark.slow

CDTRANS = [str(Path(sys.executable).with_name("cdtrans"))]
MODULE = [sys.executable, "-m", "cdtrans"]
BUFFERED = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def run(command: list[str], *arguments: object, cwd: Path, **environment: str) -> Ended:
    proxies = [k for k in os.environ if k.lower().endswith("_proxy")]
    variables = {k: v for k, v in os.environ.items() if k not in proxies} | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def only_object(text: str) -> dict:
    assert text.count("\n") == 1
    assert text.endswith("\n")
    return json.loads(text)


def assert_sentence(text: str) -> None:
    assert text.startswith("error: ")
    assert text.count("\n") == 1


def test_help_is_there_at_once(empty: Path) -> None:
    """It must not wait for torch, which takes seconds."""
    ended = run(CDTRANS, "--help", cwd=empty)
    assert ended.code == 0
    assert ended.err == ""
    slow = ("torch", "timm", "sklearn", "scipy", "matplotlib")
    for words in (["--help"], ["adapt", "--help"], ["eval", "a", "b"], ["adapt", "a", "b"]):
        look = f"import sys; from cdtrans.cli.app import run_program; sys.argv = ['cdtrans', *{words}]\n"
        look += f"try: run_program()\nfinally: print([m for m in {slow} if m in sys.modules])"
        assert run([sys.executable, "-c", look], cwd=empty).out.splitlines()[-1] == "[]"
    look = "import sys, typer; from cdtrans.cli.app import build_program; typer.main.get_command(build_program())\n"
    look += f"print([m for m in {slow} if m in sys.modules])"
    assert run([sys.executable, "-c", look], cwd=empty).out == "[]\n", "the flags of every verb are known without them"
    assert list(empty.iterdir()) == []


def test_the_module_is_the_command(empty: Path) -> None:
    assert run(MODULE, "--help", cwd=empty) == run(CDTRANS, "--help", cwd=empty)
    ended = run(MODULE, "adapt", "--bogus", cwd=empty)
    assert ended.code == 2
    assert_sentence(ended.err)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Ended]:
    """The first command of the README, with relative paths, a YAML file and a flag that wins over it."""
    task = make_task(tmp_path_factory.mktemp("adapted") / "here")
    return task, run(CDTRANS, *COMMAND, cwd=task.folder)


COMMAND = ("adapt", "source", "target", "--config", "tiny.yaml", "--epochs", "1", "--lr", "0.02", "--json")


def test_adapt_then_eval_then_predict(adapted: tuple[Task, Ended]) -> None:
    """The three commands of the README."""
    task, ended = adapted
    here = task.folder
    assert ended.code == 0, ended.err
    told = only_object(ended.out)
    assert told.items() >= {"run": "runs/adapt", "chosen_epoch": 1, "harm": False, "estimate": None}.items()
    assert says(ended.err, "source: 24 images", "3 classes", "target: 21 images")
    config = yaml.safe_load((here / "runs/adapt/config.yaml").read_text())
    assert (config["epochs"], config["source_epochs"], config["batch_size"]) == (1, 3, 8)
    assert config["source"] == str(task.source)

    answers = here / "answers.txt"
    answers.write_text("".join(f"target/{n:02}.png {('blue', 'green', 'red')[n % 3]}\n" for n in range(21)))
    scored = run(CDTRANS, "eval", "runs/adapt", "answers.txt", "--json", cwd=here)
    assert scored.code == 0, scored.err
    values = only_object(scored.out)
    assert values.keys() >= {"accuracy", "class_mean_accuracy", "source_only_accuracy"}
    assert 0 <= values["accuracy"] <= 1

    predicted = run(CDTRANS, "predict", "runs/adapt", "target", "--csv", "p.csv", cwd=here)
    assert predicted.code == 0, predicted.err
    assert says(predicted.out, "adapted, epoch 1", "p.csv", "21 images")
    rows = list(csv.DictReader((here / "p.csv").open(newline="")))
    assert [row["path"] for row in rows] == [f"target/{n:02}.png" for n in range(21)]
    right = [row["label"] == ("blue", "green", "red")[n % 3] for n, row in enumerate(rows)]
    assert sum(right) / 21 == pytest.approx(values["accuracy"])
    made = {"runs", "source", "target", "tiny.yaml", "cache", "answers.txt", "p.csv"}
    assert {p.name for p in here.iterdir()} == made


def test_without_a_network_both_ways_out_are_named(tmp_path: Path, empty: Path) -> None:
    task = make_task(tmp_path / "task")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    ended = run(CDTRANS, "adapt", task.source, task.target, "--device", "cpu", cwd=empty, **nowhere)
    assert ended.code == 2
    error = ended.err.splitlines()[-1]
    assert says(error, "error: ", "'deit_small_distilled_patch16_224.fb_in1k'", "downloaded")
    assert says(error, "--weights", "--no-pretrained")
    assert "Traceback" not in ended.err
    assert list(empty.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(finished, tmp_path: Path, empty: Path) -> None:
    """As in `cdtrans predict RUN IMAGES | head -1`, with more to say than a pipe holds."""
    (tmp_path / "list.txt").write_text("00.png\n" * 4000)
    command = [*CDTRANS, "predict", finished.run, tmp_path / "list.txt", "--root", finished.task.target, "--quiet"]
    with subprocess.Popen(command, cwd=empty, env=BUFFERED, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"path,label,probability\r\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("words", [["cache"], ["cache", "--json"]], ids=["table", "json"])
def test_a_reader_that_is_not_there_is_no_error(words: list[str], empty: Path) -> None:
    """Python must not complain about output that is still buffered at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([*CDTRANS, *words], cwd=empty, env=BUFFERED, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


def test_ctrl_c_before_the_first_part_is_predicted_leaves_nothing_behind(finished, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("00.png\n" * 20000)
    file = tmp_path / "new" / "p.csv"
    command = ["predict", finished.run, tmp_path / "list.txt", "--root", finished.task.target, "--csv", file]
    process = warm().start([str(word) for word in command], tmp_path / "logs")
    assert process.wait_until(lambda: file.parent.exists() and any(file.parent.iterdir()))
    process.send(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 130
    assert says(ended.err, "error: interrupted")
    assert ended.err.count("\n") == 1
    assert list(file.parent.iterdir()) == []


def test_quiet_prints_the_result_alone(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    ended = warm().run(task.adapt(tmp_path / "out", "--quiet"), tmp_path / "logs")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("\n") == 1
    assert says(ended.out, str(tmp_path / "out"), "epoch")
