"""The result of a check: a subject, a state, a statement and advice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cdtrans.errors import DataError

State = Literal["ok", "warning", "stop"]
LISTED = "'cdtrans check --json' lists them"  # names the command, because `adapt` prints the advice too
GRAVITY: tuple[State, ...] = ("ok", "warning", "stop")


@dataclass(frozen=True)
class Finding:
    """`stop`: a run would be pointless or its result wrong. `warning`: worth a look before a run."""

    state: State
    subject: str
    statement: str  # a sentence without its full stop
    advice: str = ""  # what to do, a sentence; empty if nothing is wrong
    details: dict[str, Any] = field(default_factory=dict)  # every name and number, for --json

    def summary(self) -> dict[str, Any]:
        """The promised keys of a finding in `check --json`."""
        return {
            "state": self.state,
            "subject": self.subject,
            "found": self.statement,
            "advice": self.advice,
            "details": self.details,
        }


def gravest(findings: Sequence[Finding]) -> State:
    return max((f.state for f in findings), key=GRAVITY.index, default="ok")


def graded(value: float, *, warning: float, stop: float = float("inf")) -> State:
    """The state of a share or ratio that should be small."""
    return "stop" if value > stop else "warning" if value > warning else "ok"


def refuse(findings: Sequence[Finding]) -> None:
    """Raise an error with the first reason to stop."""
    stops = [f for f in findings if f.state == "stop"]
    if stops:
        more = f" ({len(stops) - 1} more: see 'cdtrans check')" if len(stops) > 1 else ""
        sentence = f"{stops[0].statement}{more}. {stops[0].advice} To continue anyway, use --force."
        raise DataError("data-refused", sentence)
