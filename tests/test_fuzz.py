"""Damaged files of every kind that a verb reads: settings, lists, model cards, run folders, the cache. Whatever is in
them, a verb ends with 0, 2 or 3 and at most one short sentence, never with an internal error or a traceback.

CDTRANS_FUZZ=1000 tries so many mutations of each kind instead of a few."""

import io
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import typer
import yaml

from cdtrans.cli import app as entry
from cdtrans.record.run import RunWriter
from cdtrans.reporting import gallery, page
from cdtrans.serving import parts
from cdtrans.training.loop import Loop
from commands import Ended

TRIES = int(os.environ.get("CDTRANS_FUZZ", "0"))
LONGEST_LINE = 400
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**12, 10**400, -2.5, 1e300, math.nan, math.inf, "", "x", "\x1b[2J", "a\nb", "y" * 5000),
    *([], [1], ["a"], {}, {"a": 1}, [[[]]], {"a": {"b": [None]}}, "../..", "\ud800"),
)


def problem(ended: Ended) -> str:
    """The faults in how a verb ended, or nothing."""
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    wrong = {
        "exit code": ended.code not in (0, 2, 3),
        "internal error": "Internal error" in ended.err,
        "traceback": "Traceback" in ended.err,
        "not one sentence": len(errors) != (ended.code == 2),
        "too long": any(len(line) >= LONGEST_LINE for line in errors),
        "control characters": "\x1b" in ended.err + ended.out,
    }
    return ", ".join(name for name, is_wrong in wrong.items() if is_wrong)


class Problems(list[tuple[Any, ...]]):
    """Every problem that was found, so that one run shows all."""

    def __init__(self, capsys: pytest.CaptureFixture) -> None:
        self.capsys = capsys

    def ended(self, *arguments: object) -> Ended:
        """The command line in this process."""
        with mock.patch.object(sys, "argv", ["cdtrans", *map(str, arguments)]), pytest.raises(SystemExit) as end:
            entry.run_program()
        return Ended(int(end.value.code or 0), *self.capsys.readouterr())

    def run(self, what: object, *arguments: object) -> None:
        ended = self.ended(*arguments)
        if found := problem(ended):
            self.append((what, found, ended))


@pytest.fixture
def problems(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Problems]:
    monkeypatch.setenv("COLUMNS", "200")
    problems = Problems(capsys)
    yield problems
    assert not problems, "\n".join(map(str, problems))


def with_odd_value(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON-like value in which one part is odd, missing or too much."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {rng.choice(["", "x", "path"]): rng.choice(ODD)}
            case _:
                return value | {key: with_odd_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        odd = [with_odd_value(value[place], rng)] * rng.choice((0, 1, 1, 1, 2))
        return [*value[:place], *odd, *value[place + 1 :]]
    return rng.choice(ODD)


def with_odd_bytes(content: bytes, rng: random.Random) -> bytes:
    """A copy that is cut, overwritten, lengthened, or something else altogether."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    lines = content.splitlines(keepends=True) or [b""]
    line = rng.randrange(len(lines))
    return rng.choice(
        [
            *(content[:a], content[:a] + content[b:], b"", b"\0" * len(content), rng.randbytes(200)),
            content[:a] + rng.randbytes(b - a) + content[b:],
            content[:a] + rng.choice((b"\0", b"\xff", b"\n", b"\r", b'"', b",", b"[", b"9" * 5000)) + content[a:],
            b"".join([*lines[:line], lines[line], lines[line], *lines[line + 1 :]]),
            b"".join(lines[:line] + lines[line + 1 :]),
            b"[" * 5000,
        ]
    )


def mutated(content: bytes, suffix: str, rng: random.Random) -> bytes:
    """Mostly of the right format with odd content, so that the damage is found late."""
    if rng.random() < 0.7:
        if suffix == ".json":
            return dumped(with_odd_value(json.loads(content), rng))
        if suffix == ".jsonl":
            lines = content.splitlines()
            place = rng.randrange(len(lines))
            lines[place] = dumped(with_odd_value(json.loads(lines[place]), rng))
            return b"\n".join(lines) + b"\n"
        if suffix == ".yaml":
            return yaml.safe_dump(with_odd_value(yaml.safe_load(content), rng)).encode("utf-8", "surrogatepass")
        if suffix == ".npz":
            with np.load(io.BytesIO(content)) as arrays:
                return packed(with_odd_arrays({name: arrays[name] for name in arrays.files}, rng))
        if suffix == ".csv":
            rows = [line.split(b",") for line in content.splitlines()]
            row = rng.choice(rows)
            row[rng.randrange(len(row))] = rng.choice(
                (b"", b"-1", b"x", b"1e300", b'"', b"\x1b[2J", b"9" * 5000, b"99")
            )
            return b"\r\n".join(b",".join(row) for row in rows) + b"\r\n"
    return with_odd_bytes(content, rng)


def dumped(value: Any) -> bytes:
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(4300)


def with_odd_arrays(arrays: dict[str, np.ndarray], rng: random.Random) -> dict[str, np.ndarray]:
    name = rng.choice(list(arrays))
    x = arrays.pop(name)
    odd = (
        x[:1],
        x[:0],
        x.astype(str),
        x[None],
        -x.astype(np.float64) * np.nan,
        x.astype(np.int64) + 10**6,
        -x - 1 if x.dtype != bool else x,
    )
    return arrays | ({name: rng.choice(odd)} if rng.random() < 0.85 else {})


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def tries(few: int, kind: str) -> Iterator[tuple[int, random.Random]]:
    first = int(os.environ.get("CDTRANS_FUZZ_FIRST", "0"))
    for n in range(first, first + (TRIES or few)):
        yield n, random.Random(f"{kind} {n}")


def restored(folder: Path, few: int, kind: str) -> Iterator[tuple[int, random.Random]]:
    """Tries, each with the folder as it was at the beginning."""
    kept = folder.with_name(f"kept-{folder.name}")
    shutil.copytree(folder, kept)
    for chance in tries(few, kind):
        yield chance
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adapt` ends where it would write its run folder and train."""

    def leave(*anything: Any) -> None:
        raise typer.Exit(0)

    monkeypatch.setattr(RunWriter, "open", leave)


@pytest.fixture(scope="module")
def copied(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the finished run and everything that belongs to it."""
    folder = tmp_path_factory.mktemp("fuzz") / "task"
    shutil.copytree(finished.task.folder, folder)
    return folder


@pytest.fixture
def place(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(copied)
    return copied


def test_settings(place: Path, no_run: None, problems: Problems) -> None:
    good = (place / "tiny.yaml").read_bytes()
    for n, rng in tries(25, "settings"):
        (place / "odd.yaml").write_bytes(mutated(good, ".yaml", rng))
        problems.run(n, "adapt", "source", "target", "--config", "odd.yaml", "--out", "new")


def test_lists(place: Path, no_run: None, problems: Problems) -> None:
    source = "".join(f"{p.relative_to(place)} {p.parent.name}\n" for p in sorted((place / "source").rglob("*.png")))
    for n, rng in tries(20, "lists"):
        (place / "odd.txt").write_bytes(with_odd_bytes(source.encode(), rng))
        problems.run(n, "adapt", "odd.txt", "target", "--config", "tiny.yaml", "--out", "new")


PREDICT, EVAL, ASK, ANSWER = "predict run target/00.png", "eval run answers.txt", "ask run", "answer run labels.csv"
REPORT, CHOOSE, EXPORT = "report run", "choose run source", "export run --out out.safetensors"
RESUME = "adapt source target --config tiny.yaml --out run"
REUSE = "adapt source target --config tiny.yaml --out new --source-model run"
READERS = {  # file of a run -> commands that read it
    "result.json": (PREDICT, EVAL, REPORT, CHOOSE, ASK, RESUME),
    "adapted/model.json": (PREDICT, EVAL, EXPORT, REPORT),
    "adapted/model.safetensors": (PREDICT,),
    "source/model.json": (f"{PREDICT} --model source", CHOOSE, REPORT, REUSE),
    "images.csv": (EVAL, ASK, CHOOSE, REPORT),
    "predictions/epoch-000.npz": (EVAL, ANSWER),
    "predictions/epoch-004.npz": (EVAL, ANSWER),
    "pairs/round-02.npz": (REPORT,),
    "logits.npz": (f"{PREDICT} --keep 0.5", CHOOSE, REPORT, RESUME),
    "views.npz": (ASK, ANSWER, EVAL, REPORT),
    "config.yaml": (RESUME, REPORT, ASK),
    "data.json": (REUSE, REPORT, RESUME),
    "environment.json": (REPORT, RESUME),
    "log.jsonl": (REPORT,),
    "timings.jsonl": (REPORT,),
    "evaluation.json": (REPORT, EVAL),
    "answers.json": (ASK, ANSWER, REPORT),
    "ask/questions.json": (ASK, ANSWER),
}


def test_run_folders(place: Path, no_run: None, problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, slow in ((page, "embedding"), (gallery, "gallery"), (gallery, "changed"), (gallery, "uncertain")):
        monkeypatch.setattr(module, slow, lambda *anything: page.Missing("It is slow."))
    (place / "labels.csv").write_text("path,label\n00.png,blue\n01.png,green\n02.png,red\n")
    for command in (EVAL, ASK, ANSWER):
        assert problems.ended(*command.split()).code == 0
    for n, rng in restored(place / "run", 2 * len(READERS), "run"):
        name = list(READERS)[n % len(READERS)]
        command, file = rng.choice(READERS[name]), place / "run" / name
        file.write_bytes(mutated(file.read_bytes(), file.suffix, rng))
        problems.run((n, name, command), *command.split())


def test_unfinished_runs(place: Path, problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first step after the saved state."""
    run, update, steps = place / "begun", Loop.update, 0

    def stop_at_step(loop: Loop, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 12:  # in stage 2
            raise typer.Exit(0)
        update(loop, *arguments)

    monkeypatch.setattr(Loop, "update", stop_at_step)
    adapt = ["adapt", "source", "target", "--config", "tiny.yaml", "--out", run]
    assert problems.ended(*adapt).code == 0
    for n, rng in restored(run, 12, "begun"):
        file = run / rng.choice(("state/state.pt", "state/state.pt", "source/model.json", "data.json", "config.yaml"))
        if file.suffix == ".pt" and rng.random() < 0.8:
            torch.save(with_odd_value(torch.load(file, weights_only=True), rng), file)
        else:
            file.write_bytes(mutated(file.read_bytes(), file.suffix, rng))
        problems.run((n, file.name), *adapt)


def test_exported_files(place: Path, problems: Problems) -> None:
    """Damaged metadata, weights or graph, and a flipped bit."""
    names = ["model.safetensors"] + ["model.onnx"] * (find_spec("onnxscript") is not None)
    for name in names:
        assert problems.ended("export", "run", "--out", name).code == 0
    contents = {name: (place / name).read_bytes() for name in names}
    for n, rng in tries(16, "exported"):
        name = rng.choice(names)
        content = bytearray(contents[name])
        content[rng.randrange(min(len(content), 3000))] ^= 1 << rng.randrange(8)
        (place / name).write_bytes(content if rng.random() < 0.5 else with_odd_bytes(contents[name], rng))
        problems.run((n, name), "predict", name, "target", "--csv", "p.csv")


def test_finished_parts(place: Path, problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of finished parts, a resumed command writes the bytes of an uninterrupted one."""
    monkeypatch.setattr(parts, "PART", 8)
    (place / "target" / "03b.png").write_bytes(b"")
    file = place / "parts.csv"
    predict = ["predict", "run", "target", "--csv", "parts.csv", "--device", "cpu", "--max-bad"]
    assert problems.ended(*predict, "0.1").code == 0
    whole = file.read_bytes()
    for n, rng in tries(10, "parts"):
        assert problems.ended(*predict, "0").code == 2, "which keeps the parts"
        part = rng.choice(sorted(parts.folder_of(file).glob("*.part")))
        part.write_bytes(with_odd_bytes(part.read_bytes(), rng))
        problems.run((n, part.name), *predict, "0.1")
        if file.read_bytes() != whole or parts.folder_of(file).exists():
            problems.append((n, part.name, "another table"))
        file.unlink()
    (place / "target" / "03b.png").unlink()


def test_the_cache(place: Path, no_run: None, problems: Problems) -> None:
    adapt = ["adapt", "source", "target", "--config", "tiny.yaml", "--out", "new", "--cache", "cache"]
    assert problems.ended(*adapt).code == 0
    for n, rng in restored(place / "cache", 12, "cache"):
        file = rng.choice(sorted((place / "cache").rglob("index.sqlite")))
        file.write_bytes(mutated(file.read_bytes(), file.suffix, rng))
        for words in (["cache", "--cache", "cache"], adapt, ["cache", "--clear", "--cache", "cache"]):
            problems.run((n, words[0]), *words)
        if list((place / "cache").rglob("index.sqlite")):
            problems.append((n, "not cleared"))
