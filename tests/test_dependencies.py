"""pyproject.toml lists what src/ imports, and nothing else."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn", "typing-extensions": "typing_extensions"}
PARTS = {"triton", "markupsafe"}  # parts of torch (on Linux) and jinja2
ELSEWHERE = {"transformers"}  # imported by a file that is copied into hub folders, and by nothing here
WHERE_NEEDED = {  # by hub folders, `ask`, `check`, `demo`, the report, the paper's figures and scikit-learn users
    "transformers": {"serving/modeling_cdtrans.py"},
    "sklearn": {"sklearn.py", "inputs/digits.py", "measure/ask.py", "trust/probes.py"},
    "matplotlib": {"inputs/digits.py"},
}


@pytest.fixture(scope="module")
def project() -> Any:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def importers() -> dict[str, set[str]]:
    """Each package that is not Python's own, and the files of src/cdtrans that import it."""
    files: dict[str, set[str]] = {}
    package = ROOT / "src" / "cdtrans"
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - {"cdtrans", *sys.stdlib_module_names}:
                files.setdefault(name, set()).add(file.relative_to(package).as_posix())
    return files


def imported_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    return {MODULES.get(name, name) for name in names}


def test_every_dependency_is_imported(project: Any, importers: dict[str, set[str]]) -> None:
    assert imported_names(project["dependencies"]) - importers.keys() == set()


def test_everything_imported_is_a_dependency(project: Any, importers: dict[str, set[str]]) -> None:
    users = [extra for name, extra in project["optional-dependencies"].items() if name not in ("dev", "docs")]
    listed = imported_names(sum(users, project["dependencies"]))
    assert importers.keys() - listed - PARTS - ELSEWHERE == set()


def test_heavy_packages_are_imported_only_where_they_are_needed(importers: dict[str, set[str]]) -> None:
    assert {name: importers[name] for name in WHERE_NEEDED} == WHERE_NEEDED
