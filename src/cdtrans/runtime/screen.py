"""Output for the user: progress bars on a terminal, plain lines elsewhere, nothing when quiet."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from cdtrans.errors import printable
from cdtrans.runtime.outlook import Outlook, clock
from cdtrans.runtime.ranks import launched_rank

PLAIN_LINE_SECONDS = 10.0  # without a terminal, a long task prints a line this often
BAR_SECONDS = 0.1  # on a terminal, its bar moves this often: a move costs more than the work on a small image


class Task(Protocol):
    """A task in progress: `advance` it by the work done, with an optional note."""

    def advance(self, done: int, note: str = "") -> None: ...


class Terminal(Console):
    """rich's console, with two changes: a closed pipe does not end the program with exit code 1, and control characters
    in table cells are escaped."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render_str(self, text: str, **how: Any) -> Text:  # type: ignore[override]
        return super().render_str(printable(text, keep="\n"), **how)


class Screen:
    """`say`, `warn`, show a `result`, `track` a long task. With `machine` everything goes to standard error, because
    standard output is then one JSON object.

    During a run it has the run's `outlook`. Tasks that are part of the run's work then show the time left of the whole
    run; other tasks show their own."""

    outlook: Outlook | None = None

    def __init__(self, *, quiet: bool = False, machine: bool = False) -> None:
        follower = launched_rank() != 0
        self.quiet = quiet or follower
        self.console = Terminal(stderr=machine, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.warnings = Terminal(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=follower)

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            self.console.print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Print a warning to standard error, even when quiet."""
        self.warnings.print(Text.assemble(("warning:", "yellow"), f" {printable(text)}"))

    def result(self, text: str | RenderableType) -> None:
        """Print the result of a command, even when quiet."""
        self.console.print(Text(printable(text)) if isinstance(text, str) else text)

    def expect(self, units: float) -> None:
        """Set how much work the run has left, once it is known."""
        if self.outlook is not None:
            self.outlook.ahead = units

    def time_left(self) -> str:
        """The time left of the whole run, '1:30 left'; empty outside a run."""
        return "" if self.outlook is None else f"{clock(self.outlook.left())} left"

    @contextmanager
    def track(self, description: str, total: int | None, done: int = 0, *, work: float = 0.0) -> Iterator[Task]:
        """`total` is None if it is not known. `work` is the run's work in one of `total`, in units of its outlook."""
        outlook = self.outlook if work else None
        if self.quiet:
            yield _Silent()
        elif self.console.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
            if outlook is None:
                columns.append(TimeRemainingColumn())
            columns.append(TextColumn("{task.fields[note]}"))
            with Progress(*columns, console=self.console, transient=True) as bars:
                bar = _Bar(bars, bars.add_task(description, total=total, completed=done, note=""))
                yield bar if outlook is None else _Part(bar, outlook, work)
        else:
            lines = _Lines(self, description, total, done, timed=outlook is None)
            yield lines if outlook is None else _Part(lines, outlook, work)


class _Silent:
    def advance(self, done: int, note: str = "") -> None:
        pass


class _Part:
    """A task that is part of a run: its work is counted, and its note shows the time left of the run."""

    def __init__(self, task: Task, outlook: Outlook, work: float) -> None:
        self.task, self.outlook, self.work = task, outlook, work

    def advance(self, done: int, note: str = "") -> None:
        self.outlook.did(done * self.work)
        self.task.advance(done, f"run: {clock(self.outlook.left())} left  {note}".rstrip())


class _Bar:
    def __init__(self, bars: Progress, task_id) -> None:  # type: ignore[no-untyped-def]
        self.bars, self.task_id = bars, task_id
        self.done, self.next = 0, 0.0

    def advance(self, done: int, note: str = "") -> None:
        self.done += done
        now = time.monotonic()
        if now >= self.next:
            self.bars.update(self.task_id, advance=self.done, note=escape(note))
            self.done, self.next = 0, now + BAR_SECONDS


class _Lines:
    def __init__(self, screen: Screen, description: str, total: int | None, done: int, *, timed: bool) -> None:
        self.screen, self.description, self.total, self.done = screen, description, total, done
        self.start = self.last = time.monotonic()
        self.done_at_start, self.timed = done, timed  # timed: says how much is left of this task

    def advance(self, done: int, note: str = "") -> None:
        self.done += done
        now = time.monotonic()
        if now - self.last >= PLAIN_LINE_SECONDS:
            self.last = now
            rate = (self.done - self.done_at_start) / (now - self.start)
            left = ""
            if self.total is not None:
                ahead = f", {(self.total - self.done) / rate:.0f} s left" if self.timed and rate > 0 else ""
                left = f"/{self.total}{ahead}"
            self.screen.say(f"{self.description}: {self.done}{left} {note}".rstrip())
