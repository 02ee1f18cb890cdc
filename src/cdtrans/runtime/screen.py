"""Output for the user: progress bars on a terminal, plain lines elsewhere, nothing when quiet, tables in a notebook."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape as html_escape
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from cdtrans.errors import printable
from cdtrans.runtime.ranks import launched_rank

SILENCE_SECONDS = 5.0  # without a terminal, a long task prints a line after so long without any other
BAR_SECONDS = 0.1  # on a terminal, its bar moves this often: a move costs more than the work on a small image
WARM_UP = 5  # first steps of a kind that are not timed: they load libraries, build kernels and capture graphs
SHOWN = 20  # rows of a table in a notebook; the result has the others
TIMED_SECONDS = 1.0  # a shorter measurement is no forecast


class Terminal(Console):
    """rich's console, with two changes: a closed pipe does not end the program with exit code 1, and control characters
    in table cells are escaped."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render_str(self, text: str, **how: Any) -> Text:  # type: ignore[override]
        return super().render_str(printable(text, keep="\n"), **how)


class Work:
    """The work of a whole run by kind: 'source' and 'adaptation', the steps of its stages, and 'encoding'. The unit is
    one image that passes the backbone forward.

    The time left is the work ahead at the measured pace of its kind. Whatever happens between two steps, such as
    planning and saving, counts as part of the second one."""

    def __init__(self) -> None:
        self.done = 0.0
        self.ahead: dict[str, float] = {}
        self.timed: dict[str, tuple[int, float, float]] = {}  # kind -> steps, timed units, seconds
        self.last = time.monotonic()

    @property
    def total(self) -> float:
        return self.done + sum(self.ahead.values())

    def expect(self, **ahead: float) -> None:
        """Set how much work of these kinds is ahead."""
        self.ahead |= ahead

    def did(self, kind: str, units: float) -> None:
        now = time.monotonic()
        steps, timed, seconds = self.timed.get(kind, (0, 0.0, 0.0))
        if steps >= WARM_UP:
            timed, seconds = timed + units, seconds + now - self.last
        self.timed[kind], self.last = (steps + (units > 0), timed, seconds), now
        self.done += units
        self.ahead[kind] = max(self.ahead[kind] - units, 0.0)

    def time_left(self) -> str:
        """'1:30 left'; of stage 1 alone until stage 2 has begun; empty until the pace has been measured."""
        paces = {kind: s / units for kind, (_, units, s) in self.timed.items() if units and s >= TIMED_SECONDS}
        stages = [kind for kind in ("source", "adaptation") if self.ahead.get(kind)]
        if not stages or stages[0] not in paces:
            return ""
        if stages[-1] not in paces:
            return f"{clock(self.ahead['source'] * paces['source'])} left of stage 1"
        usual = paces[stages[-1]]  # also of encoding, until that has been measured
        return f"{clock(sum(units * paces.get(kind, usual) for kind, units in self.ahead.items()))} left"


class Screen:
    """`say`, `warn`, show a `result`, `track` a long task. With `machine` everything goes to standard error, because
    standard output is then one JSON object. During a run, `work` is the run's."""

    def __init__(self, *, quiet: bool = False, machine: bool = False) -> None:
        follower = launched_rank() != 0
        self.quiet = quiet or follower
        self.console = Terminal(stderr=machine, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.warnings = Terminal(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.work = Work()
        self.spoke = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        self.spoke = time.monotonic()
        if not self.quiet:
            self.console.print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Print a warning to standard error, even when quiet."""
        self.warnings.print(Text.assemble(("warning:", "yellow"), f" {printable(text)}"))

    def result(self, text: str | RenderableType) -> None:
        """Print the result of a command, even when quiet."""
        self.console.print(Text(printable(text)) if isinstance(text, str) else text)

    @contextmanager
    def track(
        self, description: str, total: int | None, done: int = 0, *, kind: str = "", units: float = 1.0
    ) -> Iterator["Task"]:
        """`total` is None if it is not known. A task of a `kind` that the run's work has ahead moves the bar of the
        whole run; `units` is the work in one of `total`."""
        task = Task(self, description, total, done, kind if kind in self.work.ahead else "", units)
        if self.quiet or not self.console.is_terminal:
            yield task
            return
        own: list[ProgressColumn] = [MofNCompleteColumn(), TimeRemainingColumn()]
        run: list[ProgressColumn] = [TextColumn("{task.percentage:>3.0f}%")]
        columns = [TextColumn("{task.description}"), BarColumn(), *(run if task.kind else own)]
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True) as bars:
            task.show_on(bars)
            yield task


class Task:
    """A task in progress: `advance` it by the work done, with an optional note."""

    def __init__(self, screen: Screen, description: str, total: int | None, done: int, kind: str, units: float) -> None:
        self.screen, self.description, self.total, self.done = screen, description, total, done
        self.kind, self.units = kind, units
        self.start, self.done_at_start, self.next = time.monotonic(), done, 0.0
        self.bars: Progress | None = None

    def show_on(self, bars: Progress) -> None:
        self.bars, self.bar = bars, bars.add_task(self.description, note="", **self._place())

    def advance(self, done: int, note: str = "") -> None:
        self.done += done
        if self.kind:
            self.screen.work.did(self.kind, done * self.units)
        now = time.monotonic()
        if self.bars is not None and now >= self.next:
            self.next = now + BAR_SECONDS
            self.bars.update(self.bar, note=escape(self._with_time(note)), **self._place())
        elif self.bars is None and not self.screen.quiet and now - self.screen.spoke >= SILENCE_SECONDS:
            of_total = "" if self.total is None else f"/{self.total}"
            self.screen.say(f"{self.description}: {self.done}{of_total}  {self._with_time(note, now)}".rstrip())

    def _place(self) -> dict[str, Any]:
        work = self.screen.work
        if self.kind:
            return {"completed": work.done, "total": work.total}
        return {"completed": self.done, "total": self.total}

    def _with_time(self, note: str, now: float | None = None) -> str:
        """The note, with the time left: of the run, or without a terminal of this task."""
        left = self.screen.work.time_left() if self.kind else ""
        done = self.done - self.done_at_start
        if not self.kind and now is not None and self.total is not None and done:
            left = f"{clock((self.total - self.done) * (now - self.start) / done)} left"
        return "  ".join(part for part in (left, note) if part)


def clock(seconds: float) -> str:
    """90 -> '1:30'"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *after: str) -> str:
    """A title, a table of the first rows, and sentences below it; empty ones are left out."""
    more = f"The first {SHOWN} of {len(rows)} rows." if len(rows) > SHOWN else ""
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows[:SHOWN])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    below = "".join(f"<p>{_cell(text)}</p>" for text in (more, *after) if text)
    return f"<div><p><b>{_cell(title)}</b></p>{table}{below}</div>"


def _cell(text: str) -> str:
    """File names may hold bytes that are not text, and control characters."""
    return html_escape(printable(text.encode("utf-8", "backslashreplace").decode()))
