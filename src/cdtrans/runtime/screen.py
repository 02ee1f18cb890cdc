"""Output for the user: progress bars on a terminal, plain lines elsewhere, nothing when quiet."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_LINE_SECONDS = 10.0  # without a terminal, a long task prints a line this often


class Task(Protocol):
    """A task in progress: `advance` it by the work done, with an optional note."""

    def advance(self, done: int, note: str = "") -> None: ...


class Screen:
    """`say`, `warn`, show a `result`, `track` a long task. With `machine` everything goes to standard error, because
    standard output is then one JSON object."""

    def __init__(self, *, quiet: bool = False, machine: bool = False) -> None:
        follower = os.environ.get("RANK", "0") != "0"  # of several processes, only rank 0 prints
        self.quiet = quiet or follower
        self.console = Console(stderr=machine, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.warnings = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=follower)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text))

    def warn(self, text: str) -> None:
        """Print a warning to standard error, even when quiet."""
        self.warnings.print(Text.assemble(("warning:", "yellow"), f" {text}"))

    def result(self, text: str | RenderableType) -> None:
        """Print the result of a command, even when quiet."""
        self.console.print(Text(text) if isinstance(text, str) else text)

    @contextmanager
    def track(self, description: str, total: int, done: int = 0) -> Iterator[Task]:
        if self.quiet:
            yield _Silent()
        elif self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            with Progress(*columns, console=self.console, transient=True) as bars:
                yield _Bar(bars, bars.add_task(description, total=total, completed=done, note=""))
        else:
            yield _Lines(self, description, total, done)


class _Silent:
    def advance(self, done: int, note: str = "") -> None:
        pass


class _Bar:
    def __init__(self, bars: Progress, task_id) -> None:  # type: ignore[no-untyped-def]
        self.bars, self.task_id = bars, task_id

    def advance(self, done: int, note: str = "") -> None:
        self.bars.update(self.task_id, advance=done, note=escape(note))


class _Lines:
    def __init__(self, screen: Screen, description: str, total: int, done: int) -> None:
        self.screen, self.description, self.total, self.done = screen, description, total, done
        self.start = self.last = time.monotonic()
        self.done_at_start = done

    def advance(self, done: int, note: str = "") -> None:
        self.done += done
        now = time.monotonic()
        if now - self.last >= PLAIN_LINE_SECONDS:
            self.last = now
            rate = (self.done - self.done_at_start) / (now - self.start)
            left = f", {(self.total - self.done) / rate:.0f} s left" if rate > 0 else ""
            self.screen.say(f"{self.description}: {self.done}/{self.total}{left} {note}".rstrip())
