import io
import time

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cdtrans.errors import printable
from cdtrans.runtime import screen as screen_module
from cdtrans.runtime.screen import Pace, Screen, TrackedTask

EVIL = "\x1b]0;pwned\x07a\nerror: fake\u202egnp.\x9b\udcff"  # a file or class may be called so
SHOWN = r"\x1b]0;pwned\x07a\nerror: fake\u202egnp.\x9b\udcff"
ODD = "[bold]a[/bold] [/] path[0].png a:b:c \\"


def test_plain_text_goes_to_standard_output_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.say(ODD)
    screen.result("x " * 200)
    out, err = capsys.readouterr()
    assert out.splitlines() == [ODD, "x " * 200]  # neither taken for markup nor wrapped
    assert err == ""


def test_warnings_go_to_standard_error_even_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(quiet=True).warn(ODD)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"warning: {ODD}\n"


def test_control_characters_of_names_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    screen, table = Screen(), Table("class", title="t")
    table.add_row(escape(EVIL))
    screen.say(EVIL)
    screen.result(EVIL)
    screen.warn(EVIL)
    screen.result(table)
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [SHOWN, SHOWN]
    assert err == f"warning: {SHOWN}\n"
    assert printable(out, keep="\n") == out


def test_quiet_keeps_results_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=True)
    screen.say("hello")
    with screen.track("work", 2) as task:
        task.advance(2, "note")
    screen.result("42")
    assert capsys.readouterr() == ("42\n", "")


def test_for_a_machine_everything_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(machine=True)
    screen.say("hello")
    screen.result(Table("a", title="t"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "hello" in err


class Clock:
    """The time that `time.monotonic` gives, which the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(screen_module.time, "monotonic", lambda: self.now)

    def steps(self, task: TrackedTask, count: int, *, seconds: float, done: int = 1, note: str = "") -> None:
        for _ in range(count):
            self.now += seconds
            task.advance(done, note)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_a_terminal_a_long_task_breaks_a_silence(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    screen = Screen()
    with screen.track("decode [x]", 100, done=50) as task:
        clock.steps(task, 2, seconds=4.0, done=5, note="7 images/s")
        screen.say("something else")
        clock.steps(task, 1, seconds=4.0, done=5, note="7 images/s")
    # 10 done in 8 s leave 40 for 32 s; then no line within 5 s of another
    assert capsys.readouterr().out.splitlines() == ["decode [x]: 60/100  0:32 left  7 images/s", "something else"]


@pytest.mark.parametrize(
    ("total", "done", "line"), [(5, 0, "losses: 0/5  running x"), (None, 7, "losses: 7  running x")]
)
def test_no_time_is_given_for_a_task_that_has_not_moved_or_has_no_known_end(
    capsys: pytest.CaptureFixture[str], clock: Clock, total: int | None, done: int, line: str
) -> None:
    with Screen().track("losses", total) as task:
        clock.steps(task, 1, seconds=20.0, done=done, note="running x")
    assert capsys.readouterr().out.splitlines() == [line]


def test_on_a_terminal_a_task_is_a_bar_with_its_note() -> None:
    screen, drawn = Screen(), io.StringIO()
    screen.console = Console(file=drawn, force_terminal=True, width=80)
    with screen.track("adaptation 1/4", 1000, done=4) as task:
        task.advance(3, "loss 0.5 [x]  lr 0.00152  1234 images/s")
    for part in ("adaptation 1/4", "7/1000", "loss 0.5 [x]"):
        assert part in drawn.getvalue()


def test_a_bar_does_not_move_for_every_small_step(clock: Clock) -> None:
    places: list[int] = []

    class Bars:
        def update(self, bar: int, *, completed: int, total: int, note: str) -> None:
            places.append(completed)

    task = TrackedTask(Screen(), "decode", 100, 0, Pace())
    task.bars = Bars()
    for _ in range(10):
        task.advance(3)
        clock.now += 0.05
    assert places == [3, 9, 15, 21, 27]


def test_the_time_left_of_a_stage_is_by_the_pace_of_all_its_epochs(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    """The time between two epochs counts; the first steps, which build kernels, do not."""
    screen, pace = Screen(), Pace(untimed=2, stage=" of stage 1")
    with screen.track("source 1/2", 20, pace=pace) as task:
        clock.steps(task, 2, seconds=90.0)
        assert pace.time_left(18) == "", "nothing has been timed"
        clock.steps(task, 8, seconds=1.0)
    clock.now += 4.0
    with screen.track("source 2/2", 20, done=10, pace=pace) as task:
        clock.steps(task, 4, seconds=1.0, note="loss 0.5")
    assert pace.time_left(6) == "0:08 left of stage 1", "12 in 16 s"
    assert pace.time_left(0) == ""
    assert capsys.readouterr().out.splitlines()[-1] == "source 2/2: 11/20  0:13 left of stage 1  loss 0.5"


def test_results_that_come_in_batches_are_timed_by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result of a batch took as long as the whole batch, and the first batch as long as loading too."""
    clock = 0.0
    monkeypatch.setattr("cdtrans.runtime.screen.time.monotonic", lambda: clock)
    pace, left = Pace(batch=4), []
    for seconds in (60.0, 64.0, 68.0):
        clock = seconds
        for _ in range(4):
            pace.advance(1)
            left.append(pace.time_left(10))
    assert left == [""] * 7 + ["0:10 left"] * 5


def test_what_takes_long_without_a_word_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdtrans.runtime.screen.SILENCE_SECONDS", 0.3)
    screen = Screen()
    with screen.working():
        screen.begin("report")
        time.sleep(0.8)
    said = capsys.readouterr().out.splitlines()
    assert 1 <= len(said) <= 8
    assert set(said) <= {"report, 0:00 so far", "report, 0:01 so far"}
    time.sleep(0.5)
    assert not capsys.readouterr().out
