"""Words that help."""

import re
import signal

import pytest

from cdtrans.errors import LONGEST, CdtransError, Interrupted, counted, named, nearest, printable


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("epoch", ["epochs"]),
        ("sourceepochs", ["source_epochs"]),
        ("lr", ["lr"]),
        ("LR", ["lr"]),
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


def test_an_error_is_one_line_without_control_characters() -> None:
    assert str(CdtransError("'a\nerror: fake\x1b[2J\u202e' is bad.")) == r"'a\nerror: fake\x1b[2J\u202e' is bad."
    assert (
        printable("Ünïcode — 猫 \u00a0 🐈\u200d⬛") == "Ünïcode — 猫 \u00a0 🐈\u200d⬛"
    )  # not all that is odd is dangerous


def test_an_endless_sentence_keeps_its_begin_and_its_advice() -> None:
    sentence = str(CdtransError(f"The label '{'x' * 10_000_000}' is too long; give a shorter one."))
    assert len(sentence) == LONGEST
    assert sentence.startswith("The label 'xxx")
    assert sentence.endswith("xxx' is too long; give a shorter one.")


def test_one_is_singular() -> None:
    assert [counted(n, "image") for n in (0, 1, 2, 1200)] == ["0 images", "1 image", "2 images", "1,200 images"]
    assert [counted(n, "class is", "classes are") for n in (1, 2)] == ["1 class is", "2 classes are"]
