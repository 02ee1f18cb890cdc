"""Output for the user: progress bars on a terminal, plain lines elsewhere, nothing when quiet, tables in a notebook."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape as html_escape
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from cdtrans.errors import printable
from cdtrans.runtime.ranks import launched_rank

SILENCE_SECONDS = 5.0  # without a terminal, a long task prints a line after so long without any other
WATCH_SECONDS = 0.2  # between two looks at how long it has been silent
BAR_SECONDS = 0.1  # on a terminal, its bar moves this often: a move costs more than the work on a small image
SHOWN = 20  # rows of a table in a notebook; the result has the others
TIMED_SECONDS = 1.0  # a shorter measurement is no forecast


class Terminal(Console):
    """rich's console, with two changes: a closed pipe does not end the program with exit code 1, and control characters
    in table cells are escaped."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render_str(self, text: str, **how: Any) -> Text:  # type: ignore[override]
        return super().render_str(printable(text, keep="\n"), **how)


class Pace:
    """The pace of a task, or of the epochs of a stage: all that happens between two steps, such as planning and saving,
    counts as part of the second one. The first `untimed` steps do not count. Steps that come in batches of so many are
    timed by whole batches after the first."""

    def __init__(self, *, untimed: int = 0, batch: int = 1, stage: str = "") -> None:
        self.untimed, self.batch, self.stage = (untimed if batch == 1 else batch), batch, stage
        self.start = self.measured = time.monotonic()
        self.done = self.timed = 0

    def advance(self, done: int) -> None:
        if self.untimed:
            self.untimed, self.start = self.untimed - 1, time.monotonic()
            return
        self.done += done
        if self.done % self.batch == 0:
            self.timed, self.measured = self.done, time.monotonic()

    def time_left(self, ahead: int) -> str:
        """'1:30 left'; empty until the pace has been measured."""
        seconds = self.measured - self.start
        known = self.timed and ahead > 0 and seconds >= TIMED_SECONDS
        return f"{clock(ahead * seconds / self.timed)} left{self.stage}" if known else ""


class Screen:
    """`say`, `warn`, show a `result`, `track` a long task. With `machine` everything goes to standard error, because
    standard output is then one JSON object."""

    def __init__(self, *, quiet: bool = False, machine: bool = False) -> None:
        follower = launched_rank() != 0
        self.quiet = quiet or follower
        self.console = Terminal(stderr=machine, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.warnings = Terminal(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=follower)
        self.spoke = time.monotonic()
        self.steps: dict[str, int] = {}  # training steps of every stage of a run, as far as they are known
        self.begin("loading")

    def begin(self, work: str) -> None:
        """Name what is under way from now on, for `working`."""
        self.work, self.began = work, time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Without a terminal, say what is under way whenever nothing else has been said for a while."""
        if self.quiet or self.console.is_terminal:
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_SECONDS):
                if time.monotonic() - self.spoke >= SILENCE_SECONDS - WATCH_SECONDS:
                    self.say(f"{self.work}, {clock(time.monotonic() - self.began)} so far")

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

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
        self, description: str, total: int | None, done: int = 0, *, pace: Pace | None = None, stage: str = ""
    ) -> Iterator["TrackedTask"]:
        """`total` is None if it is not known. The time left is by the task's own pace, or by one that is given. The bar
        of a `stage` is that of the whole run."""
        self.begin(description)
        task = TrackedTask(self, description, total, done, pace or Pace())
        if stage and total:
            self.steps[stage] = total
            at, steps = list(self.steps).index(stage), list(self.steps.values())
            task.before, task.after = sum(steps[:at]), sum(steps[at + 1 :])
        if self.quiet or not self.console.is_terminal:
            yield task
            return
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[note]}"),
        ]
        with Progress(*columns, console=self.console, transient=True) as bars:
            task.bars, task.bar = bars, bars.add_task(description, note="", **task.place())
            yield task


class TrackedTask:
    """`advance` it by the work done, with an optional note."""

    def __init__(self, screen: Screen, description: str, total: int | None, done: int, pace: Pace) -> None:
        self.screen, self.description, self.total, self.done, self.pace = screen, description, total, done, pace
        self.bars: Progress | None = None
        self.bar = TaskID(0)
        self.before = self.after = 0  # steps of a run's other stages
        self.next = 0.0

    def place(self) -> dict[str, Any]:
        """The place of the bar."""
        total = None if self.total is None else self.before + self.total + self.after
        return {"completed": self.before + self.done, "total": total}

    def advance(self, done: int, note: str = "") -> None:
        self.done += done
        self.pace.advance(done)
        of_total = "" if self.total is None else f"/{self.total}"
        self.screen.work = f"{self.description}: {self.done}{of_total}"
        now = time.monotonic()
        left = "" if self.total is None else self.pace.time_left(self.total - self.done)
        note = "  ".join(part for part in (left, note) if part)
        if self.bars is not None and now >= self.next:
            self.next = now + BAR_SECONDS
            self.bars.update(self.bar, note=escape(note), **self.place())
        elif self.bars is None and not self.screen.quiet and now - self.screen.spoke >= SILENCE_SECONDS:
            self.screen.say(f"{self.screen.work}  {note}".rstrip())


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
