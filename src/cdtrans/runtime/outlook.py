"""How long a run will take: its work is planned, counted and timed in abstract units."""

import math
import time
from collections.abc import Callable

WINDOW = 0.1  # of the run's work: the pace is that of about so much of it, the latest
PRIOR_SECONDS = 10.0  # of work, or less, count as done at the pace that was measured before the run
SAMPLE, SAMPLE_SECONDS = 0.03, 10.0  # the pace is measured after so much of the run's work, or after so long
OUTLIER = 3.0  # a sample moves the pace as if it were at most so many times slower or faster


class Outlook:
    """A run has `ahead` units of work left, of `pace` seconds each, and then `rest` seconds for what has no units.

    The first epoch on a GPU builds kernels and captures a graph. It can take ten times as long as the next one and says
    nothing about it, so a single sample cannot move the pace far."""

    def __init__(
        self, ahead: float, pace: float, *, rest: float = 0.0, wait: Callable[[], None] = lambda: None
    ) -> None:
        self.ahead, self.rest = ahead, rest
        self.wait = wait  # until the device has finished what it was given
        self.planned, self.window = ahead, WINDOW * ahead
        self.units = min(self.window, PRIOR_SECONDS / pace)  # done lately, and how long they took
        self.seconds = self.units * pace
        self.since, self.pending = time.monotonic(), 0.0  # when the last sample was taken, and the units since

    @property
    def pace(self) -> float:
        return self.seconds / self.units

    def did(self, units: float) -> None:
        self.ahead -= units
        self.pending += units
        if self.pending >= SAMPLE * self.planned or time.monotonic() - self.since >= SAMPLE_SECONDS:
            self._take_sample()

    def left(self) -> float:
        """Seconds until the end of the run."""
        return max(self.ahead, 0.0) * self.pace + self.rest

    def _take_sample(self) -> None:
        self.wait()
        now, usual = time.monotonic(), self.pace * self.pending
        took = min(max(now - self.since, usual / OUTLIER), usual * OUTLIER)
        fade = math.exp(-self.pending / self.window)
        self.units, self.seconds = self.units * fade + self.pending, self.seconds * fade + took
        self.since, self.pending = now, 0.0


def clock(seconds: float) -> str:
    """90 -> '1:30'"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_words(seconds: float) -> str:
    """38 -> '40 seconds', 200 -> '3 minutes', 9000 -> '2 hours'; no more exact than such a forecast can be."""
    fives = 5 * max(1, math.ceil(seconds / 5))
    if fives < 120:
        return f"{fives} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{round(seconds / 3600)} hours"
