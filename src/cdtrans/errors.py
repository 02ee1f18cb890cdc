"""Errors for people: one sentence each, saying what happened, where, and what to do."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

VERDICT_AGAINST = 3  # exit code: adaptation did harm, `check` says stop, a run of `bench` or `ablate` failed
MOST_NAMES = 5  # more names than this make a sentence unreadable
LONGEST, ENDING = 390, 150  # characters of a sentence, and of its end, which says what to do and is kept
# Characters that would move the cursor, set colours, start a false line, or turn the direction of writing: ASCII and C1
# controls, line separators, marks and overrides of direction; and bytes that are no text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CdtransError(Exception):
    """Bad input or a condition the user can act on. The command line prints it as one sentence and exits with 2.
    `code` names the cause for programs and tests and stays the same when the sentence is reworded. `details` are for
    --debug: too long for a sentence."""

    details: str = ""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(shortened(printable(sentence)))
        self.code = code

    def __str__(self) -> str:  # some errors are OSErrors too, which have another
        return str(self.args[0])


class SettingsError(CdtransError, ValueError):
    """A setting, an option of a method or an argument that cannot be used, or two that contradict each other."""


class ArgumentTypeError(SettingsError, TypeError):
    """An argument of a type that the function does not take."""


class DataError(CdtransError, ValueError):
    """Images, lists of images or labels that cannot be used."""


class MissingFileError(DataError, FileNotFoundError):
    """A file or folder of the user's that does not exist."""


class RunError(CdtransError):
    """A run folder, or a model exported from one, that is missing, damaged, unfinished, locked or another run's."""


class DeviceError(CdtransError):
    """A device, process group, disk or network that is missing or refuses."""


class DiskFull(DeviceError):
    """There is no space for a file that must be written."""


class WeightsUnavailable(DeviceError):
    """Pretrained weights that could not be downloaded."""

    def __init__(self, cause: str, advice: str) -> None:
        super().__init__("weights-unavailable", f"{cause}; {advice}")
        self.cause = cause


class MethodError(CdtransError):
    """A fault in a method's own file, or a method that cannot work with this run."""


class Hopeless(CdtransError):
    """Training that cannot continue: values that are not finite, or no pairs left. In stage 2 the guard treats it as
    harm and keeps the source-only model; `cause` is what it then reports."""

    def __init__(self, cause: str, advice: str) -> None:
        super().__init__("training-hopeless", f"{cause}. {advice}")
        self.cause = cause


class PeerLost(DeviceError):
    """A collective operation failed because another rank has ended."""

    def __init__(self) -> None:
        super().__init__("peer-lost", "Another process of this run has ended; see its own message.")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, once the state has been saved."""

    code = "interrupted"

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


def printable(text: str, keep: str = "") -> str:
    """Text with its control characters escaped as Python writes them, such as \\x1b, except for those in `keep`."""
    return CONTROL.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), text)


def shortened(sentence: str) -> str:
    """A sentence that is too long, without its middle."""
    return sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST - ENDING - 5]} ... {sentence[-ENDING:]}"


def closest(word: str, known: list[str]) -> str | None:
    """The known word that a misspelt one probably means."""
    by_case = {name.casefold(): name for name in known}
    return next((by_case[name] for name in get_close_matches(word.casefold(), by_case, n=1, cutoff=0.5)), None)


def nearest(word: str, known: list[str]) -> str:
    """The end of a sentence: the known word that a misspelt one probably means, or all known words."""
    close = closest(word, known)
    return f"did you mean '{close}'?" if close else f"known: {', '.join(known)}."


def named(names: Sequence[str]) -> str:
    """The first names, quoted, and how many more there are."""
    return first_of([repr(name) for name in names])


def first_of(parts: Sequence[str]) -> str:
    """The first parts of an enumeration, and how many more there are."""
    more = f" and {len(parts) - MOST_NAMES} more" if len(parts) > MOST_NAMES else ""
    return ", ".join(parts[:MOST_NAMES]) + more


def counted(number: int, one: str, several: str = "") -> str:
    """'1 image', '2 images'; or with both forms '1 image is', '2 images are'. Thousands have commas."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def ended(text: str) -> str:
    """The text with a full stop, unless it ends with a question mark."""
    return text if text.endswith("?") else f"{text}."
