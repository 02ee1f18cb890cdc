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
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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

TRIES = int(os.environ.get("CDTRANS_FUZZ", "0"))
LONGEST_LINE = 400
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**12, 10**400, -2.5, 1e300, math.nan, math.inf, "", "x", "\x1b[2J", "a\nb", "y" * 5000),
    *([], [1], ["a"], {}, {"a": 1}, [[[]]], {"a": {"b": [None]}}, "../..", "\ud800"),
)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def cdtrans(*arguments: object) -> Ended:
    """The command line in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    before, sys.argv = sys.argv, ["cdtrans", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            entry.main()
    finally:
        sys.argv = before
    out.flush()
    return Ended(int(end.value.code or 0), out.buffer.getvalue().decode("utf-8", "replace"), err.getvalue())  # type: ignore[attr-defined]


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

    def run(self, what: object, *arguments: object) -> None:
        ended = cdtrans(*arguments)
        if found := problem(ended):
            self.append((what, found, ended))

    def listed(self) -> str:
        return "\n".join(map(str, self))


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


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # nobody cuts the power
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adapt` ends where it would write its run folder and train."""

    def leave(*anything: Any) -> None:
        raise typer.Exit(0)

    monkeypatch.setattr(RunWriter, "open", leave)


@pytest.fixture(scope="module")
def place(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the finished run and everything that belongs to it."""
    folder = tmp_path_factory.mktemp("fuzz") / "task"
    shutil.copytree(finished.task.folder, folder)
    return folder


def test_settings(place: Path, no_run: None) -> None:
    good = (place / "tiny.yaml").read_bytes()
    problems = Problems()
    for n, rng in tries(25, "settings"):
        (place / "odd.yaml").write_bytes(mutated(good, ".yaml", rng))
        places = (place / "source", place / "target")
        problems.run(n, "adapt", *places, "--config", place / "odd.yaml", "--out", place / "new")
    assert not problems, problems.listed()


def test_lists(place: Path, no_run: None) -> None:
    source = "".join(f"{p.relative_to(place)} {p.parent.name}\n" for p in sorted((place / "source").rglob("*.png")))
    problems = Problems()
    for n, rng in tries(20, "lists"):
        (place / "odd.txt").write_bytes(with_odd_bytes(source.encode(), rng))
        places = (place / "odd.txt", place / "target")
        problems.run(n, "adapt", *places, "--config", place / "tiny.yaml", "--out", place / "new")
    assert not problems, problems.listed()


READERS: dict[str, tuple[tuple[str, ...], ...]] = {  # file of a run -> verbs that read it
    "result.json": (("predict", "one"), ("eval", "key"), ("report",), ("choose", "source"), ("ask",), ("adapt",)),
    "adapted/model.json": (("predict", "one"), ("eval", "key"), ("export",), ("report",)),
    "adapted/model.safetensors": (("predict", "one"),),
    "source/model.json": (
        ("predict", "one", "--model", "source"),
        ("choose", "source"),
        ("report",),
        ("adapt", "--source-model"),
    ),
    "images.csv": (("eval", "key"), ("ask",), ("choose", "source"), ("report",)),
    "predictions/epoch-000.npz": (("eval", "key"), ("answer",)),
    "predictions/epoch-004.npz": (("eval", "key"), ("answer",)),
    "pairs/round-02.npz": (("report",),),
    "logits.npz": (("predict", "one", "--keep", "0.5"), ("choose", "source"), ("report",), ("adapt",)),
    "views.npz": (("ask",), ("answer",), ("eval", "key"), ("report",)),
    "config.yaml": (("adapt",), ("report",), ("ask",)),
    "data.json": (("adapt", "--source-model"), ("report",), ("adapt",)),
    "environment.json": (("report",), ("adapt",)),
    "log.jsonl": (("report",),),
    "timings.jsonl": (("report",),),
    "evaluation.json": (("report",), ("eval", "key")),
    "answers.json": (("ask",), ("answer",), ("report",)),
    "ask/questions.json": (("ask",), ("answer",)),
}


def command(verb: tuple[str, ...], place: Path) -> list[object]:
    run = place / "run"
    match verb:
        case ("predict", "one", *flags):
            return ["predict", run, place / "target" / "00.png", *flags]
        case ("eval", "key"):
            return ["eval", run, place / "answers.txt"]
        case ("export",):
            return ["export", run, "--out", place / "out.safetensors"]
        case ("adapt", "--source-model"):
            places = ["adapt", place / "source", place / "target", "--config", place / "tiny.yaml"]
            return [*places, "--out", place / "new", "--source-model", run]
        case ("adapt",):
            return ["adapt", place / "source", place / "target", "--config", place / "tiny.yaml", "--out", run]
        case ("answer",):
            return ["answer", run, place / "labels.csv"]
        case (name, *rest):
            return [name, run, *rest]
    raise AssertionError(verb)


def test_run_folders(place: Path, no_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, slow in ((page, "embedding"), (gallery, "gallery"), (gallery, "changed"), (gallery, "uncertain")):
        monkeypatch.setattr(module, slow, lambda *anything: page.Missing("It is slow."))
    run, kept = place / "run", place / "kept"
    if not kept.exists():
        (place / "labels.csv").write_text("path,label\n00.png,blue\n01.png,green\n02.png,red\n")
        assert cdtrans("eval", run, place / "answers.txt").code == 0
        assert cdtrans("ask", run).code == 0
        assert cdtrans("answer", run, place / "labels.csv").code == 0
        shutil.copytree(run, kept)
    problems = Problems()
    for n, rng in tries(2 * len(READERS), "run"):
        name = list(READERS)[n % len(READERS)]
        verb = rng.choice(READERS[name])
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        (run / name).write_bytes(mutated((run / name).read_bytes(), Path(name).suffix, rng))
        problems.run((n, name, verb), *command(verb, place))
    assert not problems, problems.listed()


def test_unfinished_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first step after the saved state."""
    run, kept, update, steps = place / "begun", place / "kept-begun", Loop.update, 0

    def stop_at_step(loop: Loop, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 12:  # in stage 2
            raise typer.Exit(0)
        update(loop, *arguments)

    monkeypatch.setattr(Loop, "update", stop_at_step)
    adapt = ["adapt", place / "source", place / "target", "--config", place / "tiny.yaml", "--out", run]
    assert cdtrans(*adapt).code == 0
    shutil.copytree(run, kept)
    problems = Problems()
    for n, rng in tries(12, "begun"):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        file = run / rng.choice(("state/state.pt", "state/state.pt", "source/model.json", "data.json", "config.yaml"))
        if file.suffix == ".pt" and rng.random() < 0.8:
            torch.save(with_odd_value(torch.load(file, weights_only=True), rng), file)
        else:
            file.write_bytes(mutated(file.read_bytes(), file.suffix, rng))
        problems.run((n, file.name), *adapt)
    assert not problems, problems.listed()


def test_exported_files(place: Path) -> None:
    """Damaged metadata, weights or graph, and a flipped bit."""
    names = ["model.safetensors"] + ["model.onnx"] * (find_spec("onnxscript") is not None)
    for name in names:
        assert cdtrans("export", place / "run", "--out", place / name).code == 0
    contents, problems = {name: (place / name).read_bytes() for name in names}, Problems()
    for n, rng in tries(16, "exported"):
        name = rng.choice(names)
        content = bytearray(contents[name])
        content[rng.randrange(min(len(content), 3000))] ^= 1 << rng.randrange(8)
        (place / name).write_bytes(content if rng.random() < 0.5 else with_odd_bytes(contents[name], rng))
        problems.run((n, name), "predict", place / name, place / "target", "--csv", place / "p.csv")
    assert not problems, problems.listed()


def test_finished_parts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of finished parts, a resumed command writes the bytes of an uninterrupted one."""
    monkeypatch.setattr(parts, "PART", 8)
    (place / "target" / "03b.png").write_bytes(b"")
    file, problems = place / "parts.csv", Problems()
    predict = ["predict", place / "run", place / "target", "--csv", file, "--device", "cpu"]
    assert cdtrans(*predict, "--max-bad", "0.1").code == 0
    whole = file.read_bytes()
    for n, rng in tries(10, "parts"):
        assert cdtrans(*predict, "--max-bad", "0").code == 2, "which keeps the parts"
        part = rng.choice(sorted(parts.folder_of(file).glob("*.part")))
        part.write_bytes(with_odd_bytes(part.read_bytes(), rng))
        problems.run((n, part.name), *predict, "--max-bad", "0.1")
        if file.read_bytes() != whole or parts.folder_of(file).exists():
            problems.append((n, part.name, "another table"))
        file.unlink()
    (place / "target" / "03b.png").unlink()
    assert not problems, problems.listed()


def test_the_cache(place: Path, no_run: None) -> None:
    (place / "cache.yaml").write_text(
        yaml.safe_dump(yaml.safe_load((place / "tiny.yaml").read_text()) | {"cache": str(place / "cache")})
    )
    adapt = ["adapt", place / "source", place / "target", "--config", place / "cache.yaml", "--out", place / "new"]
    assert cdtrans(*adapt).code == 0
    shutil.copytree(place / "cache", place / "kept-cache")
    problems = Problems()
    for n, rng in tries(12, "cache"):
        shutil.rmtree(place / "cache")
        shutil.copytree(place / "kept-cache", place / "cache")
        file = rng.choice(sorted((place / "cache").rglob("index.sqlite")))
        file.write_bytes(mutated(file.read_bytes(), file.suffix, rng))
        for words in (["cache", "--cache", place / "cache"], adapt, ["cache", "--clear", "--cache", place / "cache"]):
            problems.run((n, words[0]), *words)
        if list((place / "cache").rglob("index.sqlite")):
            problems.append((n, "not cleared"))
    assert not problems, problems.listed()
