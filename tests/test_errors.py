"""Words that help."""

import re
import signal

import pytest

from cdtrans.errors import CdtransError, Interrupted, named, nearest


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("epoch", ["epochs"]),
        ("sourceepochs", ["source_epochs"]),
        ("lr", ["lr"]),
        ("quite something else", ["epochs", "source_epochs", "lr"]),
    ],
)
def test_the_nearest_known_word_or_all_of_them(word: str, expected: list[str]) -> None:
    known = ["epochs", "source_epochs", "lr"]
    named_words = re.findall(r"\w+", nearest(word, known))
    assert [name for name in named_words if name in known] == expected


def test_a_few_names_are_quoted_and_the_others_counted() -> None:
    assert named(["a"]) == "'a'"
    assert named(list("abcde")) == "'a', 'b', 'c', 'd', 'e'"
    assert named(["a\n", *"bcdefg"]) == "'a\\n', 'b', 'c', 'd', 'e' and 2 more"


def test_exit_codes_of_signals_are_the_shell_s() -> None:
    assert Interrupted(signal.SIGINT).exit_code == 130
    assert Interrupted(signal.SIGTERM).exit_code == 143


def test_an_interruption_is_not_a_user_s_error() -> None:
    assert not isinstance(Interrupted(signal.SIGINT), CdtransError)
