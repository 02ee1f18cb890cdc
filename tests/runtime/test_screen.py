import io

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cdtrans.errors import printable
from cdtrans.runtime import screen as screen_module
from cdtrans.runtime.outlook import Outlook
from cdtrans.runtime.screen import Screen

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


def test_without_a_terminal_a_long_task_prints_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    with Screen().track("decode [x]", 100, done=50) as task:
        for _ in range(5):
            now += 4.0
            task.advance(5, "7 images/s")
    # 15 done in 12 s leave 35 for 28 s; lines come no closer than 10 s
    assert capsys.readouterr().out.splitlines() == ["decode [x]: 65/100, 28 s left 7 images/s"]


def test_of_a_task_that_has_not_moved_it_does_not_say_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    with Screen().track("losses", 5) as task:
        now += 20.0
        task.advance(0, "running x")
    assert capsys.readouterr().out.splitlines() == ["losses: 0/5 running x"]


def test_without_a_terminal_a_short_task_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().track("decode", 3) as task:
        for _ in range(3):
            task.advance(1)
    assert capsys.readouterr().out == ""


def test_on_a_terminal_a_task_is_a_bar_with_its_note() -> None:
    screen = Screen()
    drawn = io.StringIO()
    screen.console = Console(file=drawn, force_terminal=True, width=120)
    with screen.track("adaptation 1/4", 10, done=4) as task:
        task.advance(3, "loss 0.5 [x]")
    assert "adaptation 1/4" in drawn.getvalue()
    assert "7/10" in drawn.getvalue()
    assert "loss 0.5 [x]" in drawn.getvalue()


def test_a_bar_does_not_move_for_every_small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    moves: list[int] = []

    class Bars:
        def update(self, task_id: int, advance: int, note: str) -> None:
            moves.append(advance)

    bar = screen_module._Bar(Bars(), 0)
    for _ in range(10):
        bar.advance(3)
        now += 0.05
    assert moves == [3, 6, 6, 6, 6]


def test_a_task_without_a_known_end_says_how_far_it_is(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    with Screen().track("counting images", None) as task:
        now += 20.0
        task.advance(7000)
    assert capsys.readouterr().out.splitlines() == ["counting images: 7000"]


# In a run


def test_a_part_of_a_run_counts_its_work_and_says_how_much_is_left_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    screen = Screen()
    screen.outlook = Outlook(1000, 0.2)
    with screen.track("adaptation 1/4", 100, done=50, work=6.0) as task:
        for _ in range(3):
            now += 6.0
            task.advance(5, "loss 0.5")
    assert screen.outlook.ahead == 1000 - 3 * 5 * 6
    assert capsys.readouterr().out.splitlines() == ["adaptation 1/4: 60/100 run: 3:08 left  loss 0.5"]  # 940 * 0.2 s


def test_on_a_terminal_the_bar_of_a_part_has_no_time_of_its_own() -> None:
    screen = Screen()
    for work in (0.0, 1.0):
        drawn = io.StringIO()
        screen.console = Console(file=drawn, force_terminal=True, width=120)
        screen.outlook = Outlook(600, 0.2)
        with screen.track("encoding target", 10, work=work) as task:
            task.advance(0)
        assert ("run: 2:00 left" in drawn.getvalue()) == bool(work)
        assert ("-:--:--" in drawn.getvalue()) == (not work), "rich's own, unknown"


def test_other_tasks_of_a_run_speak_of_themselves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now)
    screen = Screen()
    screen.outlook = Outlook(1000, 0.2)
    with screen.track("report", 10) as task:
        now += 12.0
        task.advance(6)
    assert screen.outlook.ahead == 1000
    assert capsys.readouterr().out.splitlines() == ["report: 6/10, 8 s left"]


def test_the_work_ahead_can_be_corrected() -> None:
    screen = Screen()
    screen.expect(600)
    assert screen.time_left() == "", "there is no run"
    screen.outlook = Outlook(1000, 0.2)
    screen.expect(600)
    assert screen.time_left() == "2:00 left"
