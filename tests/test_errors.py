"""Words that help."""

import re
import signal

import pytest

from cdtrans.errors import (
    LONGEST,
    ArgumentTypeError,
    CdtransError,
    DataError,
    DeviceError,
    DiskFull,
    Hopeless,
    Interrupted,
    MissingFileError,
    PeerLost,
    SettingsError,
    WeightsUnavailable,
    counted,
    named,
    nearest,
    printable,
)


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


def test_an_interruption_is_no_error_and_has_the_exit_code_of_the_shell() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        assert Interrupted(number).exit_code == code
    assert not issubclass(Interrupted, Exception), "no handler of errors may take it for one"


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (SettingsError("c", "It is so."), (CdtransError, ValueError)),
        (ArgumentTypeError("c", "It is so."), (SettingsError, TypeError)),
        (DataError("c", "It is so."), (CdtransError, ValueError)),
        (MissingFileError("c", "It is so."), (DataError, FileNotFoundError)),
        (DiskFull("c", "It is so."), (DeviceError,)),
        (WeightsUnavailable("It is", "do so."), (DeviceError,)),
        (PeerLost(), (DeviceError,)),
        (Hopeless("It is", "Do so."), (CdtransError,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_what_python_users_expect(error: CdtransError, kinds: tuple[type, ...]) -> None:
    assert isinstance(error, kinds[0])
    assert all(isinstance(error, kind) for kind in kinds)
    assert error.code
    assert str(error).endswith(".")


def test_an_error_is_one_line_without_control_characters() -> None:
    assert str(CdtransError("c", "'a\nerror: fake\x1b[2J\u202e' is bad.")) == r"'a\nerror: fake\x1b[2J\u202e' is bad."
    assert (
        printable("Ünïcode — 猫 \u00a0 🐈\u200d⬛") == "Ünïcode — 猫 \u00a0 🐈\u200d⬛"
    )  # not all that is odd is dangerous


def test_an_endless_sentence_keeps_its_begin_and_its_advice() -> None:
    sentence = str(CdtransError("c", f"The label '{'x' * 10_000_000}' is too long; give a shorter one."))
    assert len(sentence) == LONGEST
    assert sentence.startswith("The label 'xxx")
    assert sentence.endswith("xxx' is too long; give a shorter one.")


def test_one_is_singular() -> None:
    assert [counted(n, "image") for n in (0, 1, 2, 1200)] == ["0 images", "1 image", "2 images", "1,200 images"]
    assert [counted(n, "class is", "classes are") for n in (1, 2)] == ["1 class is", "2 classes are"]
