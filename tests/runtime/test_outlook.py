"""How much is left of a run, by a clock that the test moves."""

import pytest

from cdtrans.runtime import outlook as outlook_module
from cdtrans.runtime.outlook import Outlook, clock, in_words


class Clock:
    """Also what is timed: `work` does units at a pace of seconds each, in steps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def work(self, outlook: Outlook, units: float, pace: float, steps: int = 50) -> None:
        for _ in range(steps):
            self.now += pace * units / steps
            outlook.did(units / steps)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    time = Clock()
    monkeypatch.setattr(outlook_module, "time", time)
    return time


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (9.4, "0:09"), (59.6, "1:00"), (90, "1:30"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_the_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "5 seconds"),
        (4.9, "5 seconds"),
        (5.1, "10 seconds"),
        (38, "40 seconds"),
        (115, "115 seconds"),
        (115.1, "2 minutes"),
        (149, "2 minutes"),
        (200, "3 minutes"),
        (119.4 * 60, "119 minutes"),
        (119.6 * 60, "2 hours"),
        (3.4 * 3600, "3 hours"),
        (50 * 3600, "50 hours"),
    ],
)
def test_a_forecast_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_before_anything_is_done_the_measured_pace_is_all_there_is(time: Clock) -> None:
    assert Outlook(2000, 0.05, rest=5).left() == pytest.approx(105)


def test_what_is_done_is_no_longer_left_and_the_rest_still_is(time: Clock) -> None:
    outlook = Outlook(2000, 0.05, rest=5)
    time.work(outlook, 1500, 0.05)
    assert outlook.left() == pytest.approx(30)
    time.work(outlook, 600, 0.05)
    assert outlook.left() == 5, "more was done than planned"


@pytest.mark.parametrize("total", [1000, 1_000_000])
def test_a_wrong_first_measurement_is_soon_corrected(time: Clock, total: int) -> None:
    """In short and long runs: after a fifth of the run, or five minutes."""
    outlook = Outlook(total, 0.02)
    time.work(outlook, min(0.2 * total, 3000), 0.1, steps=300)
    assert outlook.left() == pytest.approx(0.1 * outlook.ahead, rel=0.25)


def test_recent_work_weighs_more(time: Clock) -> None:
    outlook = Outlook(10_000, 0.1)
    time.work(outlook, 5000, 0.1)
    time.work(outlook, 3000, 0.2)
    assert outlook.left() == pytest.approx(2000 * 0.2, rel=0.1)


def test_a_slow_first_epoch_does_not_make_the_forecast_absurd(time: Clock) -> None:
    """As on a GPU, which builds kernels and captures a graph in it: 7 s, and then 0.6 s for each of 9 more."""
    outlook = Outlook(10 * 1000, 0.6 / 1000)
    time.now += 6.4
    time.work(outlook, 1000, 0.6 / 1000, steps=30)
    assert 5 < outlook.left() < 9
    time.work(outlook, 1000, 0.6 / 1000, steps=30)
    assert outlook.left() == pytest.approx(8 * 0.6, rel=0.2)


def test_the_device_is_waited_for_now_and_then_before_the_clock_is_read(time: Clock) -> None:
    """A GPU is given work long before it has done it."""
    waited = []

    def wait() -> None:
        waited.append(time.now)
        time.now = 100.0 + 0.1 * (10_000 - outlook.ahead)

    outlook = Outlook(10_000, 0.02, wait=wait)
    for _ in range(1000):
        outlook.did(4)
    assert 5 <= len(waited) <= 20
    assert outlook.left() == pytest.approx(6000 * 0.1, rel=0.1)
