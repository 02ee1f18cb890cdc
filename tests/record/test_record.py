"""A run folder as typed values: what a finished run holds, what damage is, and that nobody else names its files."""

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdtrans.record import layout
from cdtrans.record.layout import File
from cdtrans.record.record import RunRecord
from run_folders import complete
from support import raises

READERS: dict[File[Any], Callable[[RunRecord], Any]] = {
    layout.CONFIG: lambda run: run.config,
    layout.DATA: lambda run: run.data,
    layout.ENVIRONMENT: lambda run: run.environment,
    layout.IMAGES: lambda run: run.images,
    layout.LOG: lambda run: run.log,
    layout.TIMINGS: lambda run: run.timings,
    layout.ROUND.numbered(1): lambda run: run.rounds,
    layout.PREDICTED.numbered(0): lambda run: run.predictions(0),
    layout.LOGITS: lambda run: run.confidences("source"),
    layout.VIEWS: lambda run: run.views,
    layout.RESULT: lambda run: run.outcome,
    layout.MEASURED: lambda run: run.measured,
    File(f"source/{layout.CARD}", dict): lambda run: run.classes,
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "noise": lambda content: b"\xff\xfe[\x00" * 9,
    "cut": lambda content: content[: len(content) // 2],
    "other": lambda content: b'[{"a": 1}]\nb,c\n1,2\n',
}


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete(shutil.copytree(finished.run, tmp_path_factory.mktemp("record") / "run"), finished.answers)


def test_a_finished_run_is_typed_values(whole: Path) -> None:
    run = RunRecord(whole)
    for read in READERS.values():
        assert read(run) is not None
    assert run.finished
    assert run.measured is not None
    assert run.measured.whole_target
    assert run.model_name() == run.outcome.choice.model == "adapted"
    assert len(run.images.paths["target"]) == len(run.confidences()) == len(run.predictions(run.epochs[-1]).predicted)
    assert {path.name for path in whole.iterdir()} <= {
        file.name.partition("/")[0] for file in layout.RUN_FILES
    } | layout.RESERVED


BY_LINES = (layout.CONFIG, layout.IMAGES, layout.LOG, layout.TIMINGS)  # half of their lines may be right by themselves
DAMAGED = [(file, damage) for file in READERS for damage in DAMAGE if not (damage == "cut" and file in BY_LINES)]


@pytest.mark.parametrize(("file", "damage"), DAMAGED, ids=lambda x: getattr(x, "name", x))
def test_a_damaged_file_is_named(whole: Path, tmp_path: Path, file: File[Any], damage: str) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / file.name).write_bytes(DAMAGE[damage]((run / file.name).read_bytes()))
    with raises("run-damaged") as caught:
        READERS[file](RunRecord(run))
    assert str(run / file.name) in str(caught.value)


MAY_BE_MISSING = (layout.MEASURED, layout.ROUND.numbered(1))


@pytest.mark.parametrize("file", [file for file in READERS if file not in MAY_BE_MISSING], ids=lambda file: file.name)
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, file: File[Any]) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / file.name).unlink()
    unlike = {layout.RESULT: "run-unfinished", File(f"source/{layout.CARD}", dict): "model-missing"}
    with raises(unlike.get(file, "run-damaged")):
        READERS[file](RunRecord(run))


def test_files_that_do_not_belong_together_are_damaged(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    lines = (run / layout.IMAGES.name).read_text().splitlines()
    (run / layout.IMAGES.name).write_text("\n".join(lines[:-1]) + "\n")
    for read in (lambda run: run.views, lambda run: run.confidences(), lambda run: run.predictions(0)):
        with raises("run-damaged"):
            read(RunRecord(run))


def strings(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module, but for its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    said = {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def test_only_the_record_names_the_files_of_a_run() -> None:
    home = Path(__file__).parents[2]
    names = {file.name for file in layout.RUN_FILES} | {layout.CARD}
    names |= {name.rpartition("/")[2] for name in names if "{" not in name}
    names |= {file.name.partition("{")[0] for file in (layout.ROUND, layout.PREDICTED)}
    modules = [file for folder in ("src/cdtrans", "benchmarks", "research") for file in (home / folder).rglob("*.py")]
    found = [
        f"{module.relative_to(home)}:{line}: {text}"
        for module in modules
        if module.parent.name not in ("record", "tests")
        for line, text in strings(module)
        if text in names
    ]
    assert not found, "use the names of cdtrans.record.layout"
