"""The table of costs adds up."""

import pytest

from cdtrans.reporting.costs import costs
from run_folders import record


class TestCosts:
    LINES = (
        {"stage": "source", "epoch": 1, "seconds": 10.0, "images_per_second": 100.0, "at": 1020.0},
        {"stage": "source", "epoch": 2, "seconds": 20.2, "images_per_second": 300.0, "at": 1045.0},
        {"stage": "verdict", "seconds": 0.4, "at": 1089.0},
        {"stage": "session", "seconds": 95.0, "at": 1095.0},
    )

    def test_stages_rest_and_total(self) -> None:
        found = costs(record(timings=list(self.LINES)))
        assert [(c.stage, c.epochs, c.time) for c in found.stages] == [
            ("Stage 1, source", 2, "30.2 s"),
            ("Verdict", 0, "0.4 s"),
        ]
        assert found.stages[0].rate == pytest.approx((10 * 100 + 20.2 * 300) / 30.2)
        assert found.stages[1].rate is None
        assert (found.rest.time, found.total.time) == ("1:04", "1:35")
        assert sum(c.seconds for c in (*found.stages, found.rest)) == pytest.approx(found.total.seconds)
        assert not found.page, "the page is written before its own line is"

    def test_a_page_written_after_its_session_is_added(self) -> None:
        report = {"stage": "report", "seconds": 4.0, "at": 1099.1}
        found = costs(record(timings=[*self.LINES, report]))
        assert (found.stages[-1].stage, found.rest.time, found.total.time) == ("This page", "1:04", "1:39")
        assert found.page

    def test_a_page_that_was_part_of_its_session_is_not_added_twice(self) -> None:
        """As the first versions did it."""
        report = {"stage": "report", "seconds": 4.0, "at": 1094.9}
        found = costs(record(timings=[*self.LINES[:-1], report, self.LINES[-1]]))
        assert (found.rest.time, found.total.time) == ("1:00", "1:35")

    def test_sessions_that_were_interrupted_or_killed_count(self) -> None:
        first = [{"stage": "source", "epoch": 1, "seconds": 7.0, "at": 510.0}]
        killed = costs(record(timings=[*first, *self.LINES]))
        assert (killed.total.time, killed.rest.time) == ("1:42", "1:04")
        interrupted = costs(record(timings=[*first, {"stage": "session", "seconds": 20.0, "at": 515.0}, *self.LINES]))
        assert (interrupted.total.time, interrupted.rest.time) == ("1:55", "1:17")

    def test_without_a_session_s_line_no_total_is_claimed(self) -> None:
        found = costs(record(timings=list(self.LINES[:2])))
        assert (found.rest, found.total) == (None, None)
