"""The documentation: links lead somewhere, and the commands that it shows exist with these flags."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cdtrans.cli.app import build_program

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"```.*?```", flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs name the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        link = "".join(target)
        if "://" not in link:
            place, _, anchor = link.partition("#")
            file = (page.parent / place).resolve() if place else page
            assert file.exists(), link
            assert not anchor or anchor in anchors(file), link


def commands(page: Path) -> list[list[str]]:
    """The lines of code that begin with `cdtrans`, without comments, as words."""
    lines = re.findall(r"^    (?:torchrun .* -m )?(cdtrans .*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_commands_exist_with_their_flags(page: Path) -> None:
    program: Any = typer.main.get_command(build_program())
    for _, verb, *words in commands(page):
        if verb == "VERB" or verb.startswith("--"):
            continue
        command = program.commands[verb]
        if getattr(command, "commands", None) and words[0] in command.commands:
            command = command.commands[words[0]]
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known | {"--help"}, f"{verb}: {flags - known}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    assert "layer_decay" in reference
    assert "--budget" in reference
    assert "with-labels" not in reference, "it is hidden"
