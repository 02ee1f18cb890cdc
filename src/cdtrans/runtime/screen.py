"""What a person watching a run sees: rich bars on a terminal, plain lines elsewhere, nothing when quiet."""

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
    """A piece of work under way: advance it by what was done and say what is worth knowing about it."""

    def advance(self, done: int, note: str = "") -> None: ...


class Screen:
    """`say`, `warn`, show a `result`, `track` a long task. `machine` sends all of it to standard error,
    because standard output then carries one JSON object and nothing else."""

    def __init__(self, *, quiet: bool = False, machine: bool = False) -> None:
        follower = os.environ.get("RANK", "0") != "0"  # of several processes, the first speaks for all
        self.quiet = quiet or follower
        self.console = Console(stderr=machine, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.warnings = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=follower)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text))

    def warn(self, text: str) -> None:
        """A warning is worth reading even when quiet; it goes to standard error."""
        self.warnings.print(Text.assemble(("warning:", "yellow"), f" {text}"))

    def result(self, text: str | RenderableType) -> None:
        """What the user asked for; shown even when quiet."""
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
