"""The house rules of docs/architecture.md that can be read off the code: names and comments."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
FILES = [
    file for folder in ("src", "tests", "research", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = {".".join(file.relative_to(SRC).with_suffix("").parts): file for file in FILES if file.is_relative_to(SRC)}
HALF_A_PHRASE = r"\W*(?i:of|that|whose|which|what)\b"


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def definitions(module: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each public name that a module defines, and whether it is a constant."""
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, False
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((name.id, True) for name in ast.walk(target) if isinstance(name, ast.Name))


def imported_names(module: ast.Module) -> Iterator[str]:
    """The full name of everything that a module takes from others: imported itself, or by the name of its module."""
    modules = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def names_of_several_modules(sources: dict[str, str]) -> dict[str, list[str]]:
    parsed = {name: ast.parse(source) for name, source in sources.items()}
    imported = {name for module in parsed.values() for name in imported_names(module)}
    places, shared = defaultdict(set), set()
    for module, tree in parsed.items():
        for name, constant in definitions(tree):
            if not name.startswith("_"):
                places[name].add(module)
                shared |= {name} if not constant or f"{module}.{name}" in imported else set()
    return {name: sorted(places[name]) for name in sorted(shared) if len(places[name]) > 1}


def test_a_public_name_is_defined_in_one_module() -> None:
    assert names_of_several_modules({name: read(file) for name, file in MODULES.items()}) == {}


@pytest.mark.parametrize(
    ("a", "b", "user", "shared"),
    [
        ("class Row: pass", "def Row(): pass", "", ["Row"]),
        ("SIDE = 1", "SIDE = 2", "", []),
        ("SIDE = 1", "SIDE = 2", "from a import SIDE", ["SIDE"]),
        ("SIDE, TOP = 1, 2", "SIDE: int = 2", "def f():\n from x import b\n b.SIDE", ["SIDE"]),
        ("T = TypeVar('T')", "T = TypeVar('T')", "from a import T", []),
        ("def _row(): pass", "def _row(): pass", "from a import _row", []),
    ],
)
def test_names_of_several_modules_are_found(a: str, b: str, user: str, shared: list[str]) -> None:
    assert list(names_of_several_modules({"a": a, "x.b": b, "user": user})) == shared


def phrases(source: str) -> Iterator[str]:
    """The docstrings, and the comments behind code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            yield token.string


def half_phrases(source: str) -> list[str]:
    possible = re.search(f'[#"]{HALF_A_PHRASE}', source)  # most files need not be parsed
    return [phrase for phrase in phrases(source) if re.match(HALF_A_PHRASE, phrase)] if possible else []


def test_comments_and_docstrings_stand_alone() -> None:
    found = {str(file.relative_to(ROOT)): half_phrases(read(file)) for file in FILES}
    assert {file: halves for file, halves in found.items() if halves} == {}


def test_half_a_phrase_is_found() -> None:
    source = '"""Of a tensor."""\n# that is fine on a line of its own\nx = 1  # Which was 2\ny = "# of"  # offset\n'
    assert half_phrases(source) == ["Of a tensor.", "# Which was 2"]
