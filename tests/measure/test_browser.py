"""The page in a real browser, opened from the disk."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cdtrans
from cdtrans.record.record import RunRecord
from labelled_runs import truth
from run_folders import make_card

pytestmark = pytest.mark.slow

DESK, PHONE = 1200, 390
ASKED = 6


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": DESK, "height": 800}, accept_downloads=True)
    yield made
    made.close()


@pytest.fixture
def page(context: Any, run: Path) -> Iterator[Any]:
    """The page of six images; it must fetch nothing and complain about nothing."""
    file = cdtrans.ask(run, budget=ASKED).folder / "ask.html"
    requests, messages = [], []
    opened = context.new_page()
    opened.on("request", lambda request: requests.append(request.url))
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.goto(file.as_uri())
    yield opened
    assert messages == []
    assert {url for url in requests if not url.startswith(("data:", "blob:"))} == {file.as_uri()}


def paths(run: Path) -> list[str]:
    with open(run / "ask" / "labels.csv", newline="") as lines:
        return [row["path"] for row in csv.DictReader(lines)]


def progress(page: Any) -> str:
    return str(page.locator("#count").inner_text())


def saved(page: Any, tmp_path: Path) -> Path:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save labels.csv").click()
    assert waiting.value.suggested_filename == "labels.csv"
    waiting.value.save_as(tmp_path / "saved.csv")
    return tmp_path / "saved.csv"


def test_every_image_is_labelled_by_mouse_and_the_file_can_be_answered(page: Any, run: Path, tmp_path: Path) -> None:
    assert progress(page) == f"0 of {ASKED}"
    assert not page.locator("#done").is_visible()
    for n, path in enumerate(paths(run)):
        assert page.locator("#title").inner_text() == f"Image {n + 1} of {ASKED}"
        assert page.evaluate("document.getElementById('image').naturalWidth") == 22
        page.locator("#classes").get_by_role("button", name=truth(path)).click()
    assert progress(page) == f"{ASKED} of {ASKED}"
    assert page.locator("#done").is_visible()
    assert "cdtrans answer" in page.locator("#done").inner_text()
    result = cdtrans.answer(run, saved(page, tmp_path))
    assert (result.labelled, result.measured.images) == (ASKED, 4)
    assert all(entry.label == truth(entry.path) for entry in RunRecord(run).answers.labels)


def test_by_keyboard_and_after_a_reload(page: Any, run: Path, tmp_path: Path) -> None:
    page.keyboard.press("2")  # the second class
    page.keyboard.type("RE")
    assert page.locator("#classes button").all_inner_texts() == ["red"]
    page.keyboard.press("Enter")
    page.keyboard.press("?")
    page.keyboard.press("-")
    assert progress(page) == f"4 of {ASKED}"
    page.wait_for_timeout(200)  # Chromium hands localStorage to its main process a moment later
    page.reload()
    assert progress(page) == f"4 of {ASKED}"
    assert page.locator("#title").inner_text() == f"Image 5 of {ASKED}", "the first one that is open"
    page.keyboard.type("blue")  # the whole name needs no Enter
    page.keyboard.press("ArrowLeft")
    assert page.locator("[aria-pressed=true]").inner_text().startswith("blue")
    page.keyboard.press("1")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    with open(saved(page, tmp_path), newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["path"] for row in rows] == paths(run)
    assert [row["label"] for row in rows] == ["green", "red", "unsure", "none of these classes", "blue", ""]


def test_an_answer_can_be_withdrawn_and_escape_clears_what_was_typed(page: Any) -> None:
    page.keyboard.press("1")
    page.get_by_role("button", name="Back").click()
    page.locator("[aria-pressed=true]").click()
    assert progress(page) == f"0 of {ASKED}"
    page.keyboard.type("zebra")
    assert page.locator("#classes button").count() == 0
    page.keyboard.press("Enter")
    assert progress(page) == f"0 of {ASKED}"
    page.keyboard.press("Escape")
    assert page.locator("#classes button").count() == 3


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_in_both_schemes(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == (scheme == "dark")
    assert page.locator("#image").is_visible()
    last = page.locator("#others button").last.bounding_box()
    assert last["y"] + last["height"] < 800, "every answer is reachable without scrolling"


def test_a_tablet_has_no_help_about_keys(browser: Any, run: Path) -> None:
    file = cdtrans.ask(run, budget=2).folder / "ask.html"
    for touch in (False, True):
        context = browser.new_context(viewport={"width": DESK, "height": 800}, has_touch=touch, is_mobile=touch)
        page = context.new_page()
        page.goto(file.as_uri())
        assert (
            page.locator("#label-keys").is_visible()
            == page.locator("#label-keys kbd").first.is_visible()
            == (not touch)
        )
        context.close()


def test_classes_that_are_digits_are_typed_and_not_counted(browser: Any, run: Path) -> None:
    for model in ("source", "adapted"):
        make_card(run / model, ("0", "1", "10"))
    opened = browser.new_page()
    opened.goto((cdtrans.ask(run, budget=2).folder / "ask.html").as_uri())
    opened.keyboard.press("0")
    assert opened.locator("#count").inner_text() == "1 of 2", "only one class begins with it"
    opened.keyboard.press("1")
    assert opened.locator("#count").inner_text() == "1 of 2", "two classes begin with it"
    opened.keyboard.press("Enter")
    assert opened.locator("#count").inner_text() == "2 of 2"
    opened.close()


def test_without_scripts_it_says_what_to_do(browser: Any, run: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto((cdtrans.ask(run, budget=2).folder / "ask.html").as_uri())
    assert "labels.csv" in opened.locator("noscript").inner_text()
    context.close()


class TestThreeSteps:
    """The three steps: classes that occur, images of one of them, labels."""

    @pytest.fixture
    def page(self, context: Any, doubtful: Path) -> Iterator[Any]:
        file = cdtrans.ask(doubtful, budget=ASKED).folder / "ask.html"
        messages: list[str] = []
        opened = context.new_page()
        opened.on("console", lambda message: messages.append(message.text))
        opened.on("pageerror", lambda error: messages.append(str(error)))
        opened.goto(file.as_uri())
        yield opened
        assert messages == []

    def test_by_keyboard_into_one_file_that_can_be_answered(self, page: Any, doubtful: Path, tmp_path: Path) -> None:
        assert page.locator("#title").inner_text() == "Class 1 of 3: red"
        assert page.locator("#target img").count() == 9
        assert page.evaluate("document.querySelector('#target img').naturalWidth") == 22
        assert "From class 3 on you can skip" in page.locator("#about").inner_text()
        page.keyboard.press("n")
        page.keyboard.press("y")
        assert page.locator("#title").inner_text() == "Class 3 of 3: blue"
        assert "You can skip the rest" in page.locator("#safe").inner_text()
        page.keyboard.press("?")
        assert page.locator("#title").inner_text() == "Image 1 of 24"
        assert page.evaluate("document.getElementById('image').naturalWidth") == 22
        for key in "yny?":
            page.keyboard.press(key)
        page.wait_for_timeout(200)
        page.reload()
        assert progress(page) == "4 of 24"
        page.get_by_role("button", name="Skip").click()
        assert progress(page) == f"0 of {ASKED}"
        for _ in range(ASKED):
            page.keyboard.type("gre")
            page.keyboard.press("Enter")
        assert page.locator("#done").is_visible()
        assert "20 questions of earlier steps are open" in page.locator("#through").inner_text()
        with open(saved(page, tmp_path), newline="") as lines:
            rows = list(csv.DictReader(lines))
        assert [(row["label"], row["part"]) for row in rows[:2]] == [("red", "absent"), ("green", "occurs")]
        assert [row["label"] for row in rows[2:7]] == [
            *("one of these classes", "none of these classes", "one of these classes", "unsure", "")
        ]
        assert [row["part"] for row in rows].count("belongs") == 24
        answers = cdtrans.answer(doubtful, tmp_path / "saved.csv").answers
        assert answers.occurs == {"red": False, "green": True}
        assert (len(answers.belongs), len(answers.labels)) == (4, ASKED)
        assert answers.curve is not None

    def test_steps_are_entered_in_any_order_and_answers_withdrawn(self, page: Any) -> None:
        steps = page.locator("#steps")
        steps.get_by_role("button", name="3 Labels").click()
        page.locator("#classes button").first.click()
        steps.get_by_role("button", name="1 Classes").click()
        page.get_by_role("button", name="Yes").click()
        assert progress(page) == "1 of 3"
        page.get_by_role("button", name="Back").click()
        page.locator("[aria-pressed=true]").click()
        assert progress(page) == "0 of 3"
        page.keyboard.type("abc")
        assert progress(page) == "0 of 3", "no class is typed here"

    @pytest.mark.parametrize("width", [DESK, PHONE])
    def test_every_step_fits_the_screen(self, page: Any, width: int) -> None:
        page.set_viewport_size({"width": width, "height": 800})
        for step in range(3):
            assert page.evaluate("document.documentElement.scrollWidth") == width
            last = page.locator("#others button").last.bounding_box()
            assert last["y"] + last["height"] < 800, "every answer is reachable without scrolling"
            if step < 2:
                page.get_by_role("button", name="Skip").click()
