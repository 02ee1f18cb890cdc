"""Damages of the files of a study's runs, and the rule for all of them: the run whose file it is may be left out, with
one sentence; every other run keeps its row."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdtrans.studies.results import FinishedRuns
from support import Notes

Rows = dict[str, dict[str, Any]]  # run -> its row


def damages(file: Path) -> Iterator[bytes]:
    """Other contents of a file: empty, cut, binary, JSON of another kind, or JSON that lacks a key or has a wrong
    value."""
    content = file.read_bytes()
    yield from (b"", content[: len(content) // 2], b"\x80\xff\x00{", b"[]", b"null")
    if file.suffix == ".json":
        values = json.loads(content)
        for key in values if isinstance(values, dict) else ():
            yield json.dumps(values | {key: -1}).encode()
            yield json.dumps({name: value for name, value in values.items() if name != key}).encode()


def check_damages(out: Path, run: str, table: Callable[[FinishedRuns], Rows]) -> None:
    """Damage every file of a run in every way and make the table."""
    sound, left_out, folder = table(FinishedRuns(out, Notes())), set(), out / run
    others = {name: row for name, row in sound.items() if name != run}
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".csv", ".json", ".jsonl", ".npz", ".yaml")]
    for file in [*files, folder.with_name(f"{folder.name}.sessions.json")]:
        before = file.read_bytes()
        for damage in damages(file):
            file.write_bytes(damage)
            screen = Notes()
            try:
                rows = table(FinishedRuns(out, screen))
            finally:
                file.write_bytes(before)
            assert {name: row for name, row in rows.items() if name != run} == others, (file, damage)
            assert len(screen.warnings) == (run not in rows), (file, damage, screen.warnings)
            for sentence in screen.warnings:
                assert "\n" not in sentence
                assert str(folder) in sentence
                left_out.add(file.name)
    assert {
        "evaluation.json",
        "result.json",
        "config.yaml",
        "data.json",
        "environment.json",
        "timings.jsonl",
    } <= left_out
    assert table(FinishedRuns(out, Notes())) == sound
