"""The two verbs as a shell sees them; neither needs torch."""

from pathlib import Path

import pytest

from commands import Ended, cold
from labelled_runs import fill
from support import says


def verb(run: Path, *arguments: str) -> Ended:
    return cold().run([*arguments], run.parent / "logs", folder=run.parent, look_for=["torch", "sklearn"])


@pytest.mark.slow
def test_ask_and_answer(run: Path) -> None:
    ended = verb(run, "ask", "run", "--budget", "10")
    assert (ended.code, ended.err) == (0, "")
    assert says(ended.out, "6 chosen at random", "run/ask/ask.html", "cdtrans answer run run/ask/labels.csv")
    assert ended.out.splitlines()[-1] == "['sklearn']", "for k-means"
    fill(run / "ask" / "labels.csv", run.parent / "labels.csv")
    ended = verb(run, "answer", "run", "labels.csv")
    assert (ended.code, ended.err) == (0, "")
    assert says(ended.out, "95% interval", "6 random images of 60", "run/answers.json")
    assert ended.out.splitlines()[-1] == "[]", "it is quick"
