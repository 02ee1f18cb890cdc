"""The labels that a run stores: the questions that were asked, and the answers so far."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cdtrans.measure.labels import Answer, Answers, Part, settled_part
from cdtrans.measure.target import FinishedTarget
from cdtrans.record.files import atomic, intact
from cdtrans.record.run_folder import ANSWERS
from cdtrans.record.shapes import require

QUESTIONS = "ask/questions.json"  # in the run folder


class Question(NamedTuple):
    """An image to label."""

    image: int  # its index in the target
    part: Part


def read_parts(target: FinishedTarget) -> dict[int, Part]:
    """The part of every image that was asked for."""
    return {index: entry["part"] for index, entry in _entries(target, QUESTIONS, "images")}


def read_answers(target: FinishedTarget) -> Answers:
    """The answers so far. An image that was answered for the informative part may have been drawn for the random part
    since."""
    parts = read_parts(target)
    entries = _entries(target, ANSWERS, "labels")
    return {
        index: Answer(entry["label"], settled_part(parts.get(index, ""), entry["part"])) for index, entry in entries
    }


def write_questions(target: FinishedTarget, parts: dict[int, Part], *, seed: int, budget: int) -> None:
    images = [_identity(target, index) | {"part": part} for index, part in parts.items()]
    _write(target, QUESTIONS, {"seed": seed, "budget": budget, "images": images})


def write_answers(target: FinishedTarget, answers: Answers, result: dict[str, Any], *, calibrated: bool) -> Path:
    """`calibrated`: whether these or earlier answers have calibrated the adapted model."""
    labels = [_identity(target, i) | {"label": a.label, "part": a.part} for i, a in sorted(answers.items())]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return _write(target, ANSWERS, {"date": date, "calibrated": calibrated, "result": result, "labels": labels})


def _identity(target: FinishedTarget, index: int) -> dict[str, Any]:
    return {"path": target.paths[index], "digest": target.digests[index]}


def _entries(target: FinishedTarget, name: str, key: str) -> list[tuple[int, dict[str, Any]]]:
    """The entries of a file with the index of their images; none if there is no such file."""
    file = target.run / name
    if not file.exists():
        return []
    with intact(file, "move it away and run the command again"):
        entries = json.loads(file.read_text(encoding="utf-8"))[key]
        require(entries, [{"path": str, "digest": str, "part": set(get_args(Part)), "label": str}])
        found = [(target.find(entry["path"], entry["digest"]), entry) for entry in entries]
        return [(index, entry) for index, entry in found if index is not None and entry["part"]]


def _write(target: FinishedTarget, name: str, content: dict[str, Any]) -> Path:
    file = target.run / name
    with atomic(file) as out:
        out.write((json.dumps({"fingerprint": target.fingerprint} | content, indent=2) + "\n").encode())
    return file
