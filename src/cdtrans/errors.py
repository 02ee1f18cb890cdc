"""The one error that users see: a sentence that says what is wrong, where, and what to do."""

from collections.abc import Sequence
from difflib import get_close_matches

HARM = 3  # exit code of a run whose adaptation did harm
NAMED = 5  # more names than this make a sentence unreadable


class CdtransError(Exception):
    """Bad input or a condition the user can act on. The command line prints it as one sentence and exits with 2."""

    details: str = ""  # more lines, shown with --debug


class Hopeless(CdtransError):
    """Training that cannot go on: numbers that are not finite, or no pairs left. In stage 2 the guard takes it for
    harm, and the source-only model stands."""


class WeightsUnavailable(CdtransError):
    """Pretrained weights that could not be downloaded."""


class DiskFull(CdtransError):
    """There is no room for what must be written."""


class Interrupted(Exception):
    """Ctrl-C or a request of the system to end. The state has been saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


def nearest(word: str, known: list[str]) -> str:
    """What a misspelt word may have meant, or what there is to choose from."""
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}."


def named(names: Sequence[str]) -> str:
    """The first names, quoted, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more
