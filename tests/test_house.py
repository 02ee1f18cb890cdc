"""The house rules of docs/architecture.md that can be read off the code: comments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    file for folder in ("src", "tests", "research", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))
]
HALF_A_PHRASE = r"\W*(?i:of|that|whose|which|what)\b"


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


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
