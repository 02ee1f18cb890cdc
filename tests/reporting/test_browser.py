"""The page in a real browser, opened from the disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdtrans.record.record import RunRecord
from cdtrans.reporting.page import write_report
from cdtrans.runtime.screen import Screen
from support import says

DESK, PHONE = 1280, 390
VISIBLE = """() => [...document.querySelectorAll('img, .planes svg')].map(image => {
    const box = image.getBoundingClientRect();
    const loaded = image.tagName === 'svg' || image.complete && image.naturalWidth > 0;
    return loaded && box.width > 20 && box.height > 20
        && box.left >= 0 && box.right <= document.documentElement.clientWidth && image.checkVisibility();
})"""


@pytest.fixture
def opened(browser: Any, full: Path) -> Iterator[Any]:
    """opened(width=..., ...) -> the page, its sections unfolded; it must ask nobody for anything and complain about
    nothing."""
    contexts, requests, messages = [], [], []

    def open_page(width: int = DESK, *, unfolded: bool = True, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto((full / "report.html").as_uri())
        if unfolded:
            page.evaluate("for (const part of document.querySelectorAll('.part, .more')) part.open = true")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert {url for url in requests if not url.startswith("data:")} == {(full / "report.html").as_uri()}


def shown(page: Any) -> list[dict[str, str]]:
    visible = "[...document.querySelectorAll('.pair')].filter(pair => pair.checkVisibility())"
    return page.evaluate(f"{visible}.map(pair => ({{...pair.dataset}}))")


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_image_is_visible_and_nothing_sticks_out(opened: Any, width: int, scheme: str) -> None:
    page = opened(width, color_scheme=scheme)
    visible = page.evaluate(VISIBLE)
    assert len(visible) > 50
    assert all(visible)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_ticks_of_the_estimate_stand_where_they_say(opened: Any, width: int) -> None:
    places = opened(width).evaluate("""[...document.querySelectorAll('.scale span')].map(tick => {
        const band = document.querySelector('.band').getBoundingClientRect(), box = tick.getBoundingClientRect();
        return [parseFloat(tick.textContent), 100 * ((box.left + box.right) / 2 - band.left) / band.width];
    })""")
    assert [value for value, _ in places] == [0, 25, 50, 75, 100]
    assert all(abs(value - place) < 0.5 for value, place in places[1:-1])


def test_every_image_of_the_sample_is_a_point_on_its_planes(opened: Any) -> None:
    planes = opened().evaluate("""[...document.querySelectorAll('.planes svg')].map(plane => {
        const frame = plane.getBoundingClientRect();
        return [...plane.querySelectorAll('circle')].map(circle => {
            const box = circle.getBoundingClientRect(), style = getComputedStyle(circle);
            const inside = box.left >= frame.left && box.right <= frame.right
                && box.top >= frame.top && box.bottom <= frame.bottom;
            const ring = circle.closest('.rings') !== null;
            return [inside && box.width > 2, ring, ring ? style.stroke : style.fill];
        });
    })""")
    assert [len(plane) for plane in planes] == [24 + 21] * 4
    assert all(visible for plane in planes for visible, _, _ in plane)
    assert [sum(ring for _, ring, _ in plane) for plane in planes] == [24] * 4
    colours = [[{c for _, ring, c in plane if ring == kind} for kind in (True, False)] for plane in planes]
    assert colours[0] == colours[1] == [{"rgb(59, 130, 196)"}, {"rgb(224, 118, 47)"}], "the two domains"
    assert all(len(rings) == 3 and len(dots) > 1 for rings, dots in colours[2:]), "the three classes"


def test_the_legend_names_the_colours_of_the_points(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    colour = "[...document.querySelectorAll('.planes')][1].querySelectorAll('.rings circle')"
    drawn = page.evaluate(f"[...new Set([...{colour}].map(c => getComputedStyle(c).stroke))]")
    legend = page.evaluate("""Object.fromEntries([...document.querySelectorAll('.legend li')].map(item =>
        [item.checkVisibility() && item.textContent, getComputedStyle(item.firstElementChild).backgroundColor]))""")
    assert list(legend) == ["blue", "green", "red"]
    assert sorted(legend.values()) == sorted(drawn)
    assert legend["blue"] == "rgb(31, 119, 180)", "the first class has the first colour, as .k0"


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_words_can_be_read_on_their_ground(opened: Any, width: int) -> None:
    """No text is cut off or smaller than what a person reads."""
    sizes = opened(width).evaluate(
        "[...document.querySelectorAll('p, td, th, dt, dd, figcaption, li, label, h1, h2')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 11


def test_the_filter_by_mouse(opened: Any) -> None:
    page = opened()
    everything = shown(page)
    assert page.locator("#shown").inner_text() == f"{len(everything)} of {len(everything)} pairs"
    page.get_by_role("radio", name="rejected").click()
    rejected = shown(page)
    assert rejected == [p for p in everything if p["state"] == "rejected"]
    assert 0 < len(rejected) < len(everything)
    page.get_by_role("combobox", name="Round").select_option("round 2")
    page.get_by_role("combobox", name="Class").select_option("red")
    both = shown(page)
    assert both == [p for p in rejected if p["round"] == "2" and "red" in p["class"].split("\t")]
    assert 0 < len(both) < len(rejected)
    assert page.locator("#shown").inner_text() == f"{len(both)} of {len(everything)} pairs"
    page.get_by_role("radio", name="all").click()
    assert len(shown(page)) > len(both)


def test_the_keyboard_reaches_everything_and_shows_where_it_is(opened: Any) -> None:
    page = opened(unfolded=False)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the sections"
    assert page.locator(".skip").bounding_box()["x"] > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#changed"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("nav a[href='#scores']").focus()
    assert not page.locator("#scores table").is_visible()
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash === '#scores'")  # a busy machine takes a moment
    page.locator("#scores table").wait_for(state="visible")
    page.locator(".measures summary").focus()
    measured = page.locator(".measures table")
    assert not measured.is_visible()
    page.keyboard.press("Enter")
    assert measured.is_visible()


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_answer_and_what_changed_are_on_the_first_screens(opened: Any, width: int) -> None:
    page = opened(width, unfolded=False, java_script_enabled=False)
    answer, changed, evidence = (page.locator(f"#{name}").bounding_box() for name in ("answer", "changed", "evidence"))
    assert answer["y"] < 200
    assert answer["y"] < changed["y"] < evidence["y"]
    assert changed["y"] < (900 if width == DESK else 1300)
    assert page.locator("#changed img").first.is_visible()
    assert not page.locator("#gallery .pair").first.is_visible(), "folded"
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_without_scripts_everything_is_there_but_the_filter(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("#answer").is_visible()
    assert says(page.locator("#answer").inner_text(), "right on")
    assert says(page.locator("header").inner_text(), "better")
    assert page.locator("section").count() == 14
    assert all(section.is_visible() for section in page.locator("section").all())
    assert page.locator(".pair").count() == sum(pair.is_visible() for pair in page.locator(".pair").all()) > 20
    assert not page.locator("#filter").is_visible()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_phone_shows_the_first_of_long_lists_of_words_until_asked_for_all(opened: Any, scripts: bool) -> None:
    """Images are never folded away."""
    page = opened(PHONE, java_script_enabled=scripts)
    settings = page.locator("#settings dl:nth-of-type(1) > div").all()
    assert [item.is_visible() for item in settings] == [n < 6 for n in range(len(settings))]
    assert len(settings) > 20
    page.locator("#settings .fold summary").first.focus()
    page.keyboard.press("Enter")
    assert all(item.is_visible() for item in settings)


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_nothing_is_folded_on_paper_or_on_a_desk(opened: Any, width: int) -> None:
    page = opened(width)
    last = page.locator("#settings dl:nth-of-type(1) > div").last
    if width == PHONE:
        assert not last.is_visible()
        page.emulate_media(media="print")
    assert last.is_visible()
    assert not any(fold.is_visible() for fold in page.locator(".fold").all())


def test_on_paper_it_is_light_and_has_no_controls(opened: Any) -> None:
    page = opened(color_scheme="dark", unfolded=False)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#filter").is_visible()
    assert not page.locator("nav").is_visible()
    assert all(page.evaluate(VISIBLE))


def test_a_click_takes_the_whole_path_of_an_image(opened: Any, full: Path) -> None:
    page, paths = opened(PHONE), RunRecord(full).images.paths
    files = page.locator(".file")
    paths_shown = [file.inner_text() for file in files.all()]
    assert set(paths_shown) <= {*paths["source"], *paths["target"]}
    images = page.locator(".pair").count() * 2 + page.locator(".look").count()
    assert len(paths_shown) == images > 50
    for n in (0, 1, len(paths_shown) - 1):
        files.nth(n).click()
        assert page.evaluate("getSelection().toString()") == paths_shown[n]


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_very_long_class_names_stay_on_the_page(browser: Any, run: Path, width: int) -> None:
    names = [f"{word}_" * 20 for word in ("blue", "Donaudampfschifffahrt")] + ["x" * 120]
    for file in (run / "adapted" / "model.json", run / "source" / "model.json", run / "evaluation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(write_report(RunRecord(run), Screen(quiet=True)).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.close()
