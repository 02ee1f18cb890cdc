"""The page as a file: whole, self-contained, small, and there whatever the run folder lacks."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdtrans.record import wording
from cdtrans.record.layout import MEASURED
from cdtrans.record.outcome import ClassSet, Interval, NoClassCurve, Verdict
from cdtrans.record.record import RunRecord
from cdtrans.record.run import rewrite
from cdtrans.reporting import embedding, gallery, page, sections
from cdtrans.reporting.images import THUMBNAIL_SIDE, jpeg, run_images
from cdtrans.runtime.screen import Screen
from run_folders import change, change_views, refused
from support import raises, says

QUIET = Screen(quiet=True)
SECTIONS = ["changed", "evidence", "keep", "classes", "strangers", "labels"]  # the answer is above them
FOLDED = ["uncertain", "gallery", "scores", "epochs", "pairs", "features", "mislabelled", "settings"]
SECTIONS += FOLDED
LARGEST = 10e6  # bytes


class Parsed(HTMLParser):
    """Elements with their attributes, the text of each section, and whether every element is closed."""

    VOID = ("meta", "link", "img", "input", "wbr", "line", "circle", "rect", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.section = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attributes)["id"]
            self.sections[self.section] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if self.section:
            self.sections[self.section] += data


def written(run: Path) -> Parsed:
    return Parsed(page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parsed(full: Path) -> Parsed:
    return Parsed((full / "report.html").read_text(encoding="utf-8"))


def test_every_section_is_there_and_none_is_missing(parsed: Parsed, full: Path) -> None:
    assert list(parsed.sections) == SECTIONS
    assert 'class="why"' not in (full / "report.html").read_text()
    linked = [a["href"] for tag, a in parsed.elements if tag == "a"]
    assert linked == ["#main", *(f"#{name}" for name in SECTIONS)]


def test_details_are_folded_and_the_answer_is_not(parsed: Parsed, full: Path) -> None:
    folded = [a for tag, a in parsed.elements if tag == "details" and a.get("class") == "part"]
    assert folded == [{"class": "part"}] * len(FOLDED), "closed, all of them"
    text = (full / "report.html").read_text()
    place = [text.index(words) for words in ('id="answer"', 'id="changed"', 'id="evidence"', 'class="part"')]
    assert place == sorted(place)


def test_the_accuracy_comes_first(run: Path) -> None:
    """Measured with labels if there are any, else estimated."""

    def first() -> str:
        text = page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
        return re.sub(r"<[^>]+>", "", text[text.index("<h1") : text.index("<nav")])

    measured = RunRecord(run).evaluation
    assert says(first(), f"right on {measured.accuracy:.0%} of the target", "new images like these", "points by")
    better = replace(measured.comparison, better="source")
    rewrite(run, MEASURED, replace(measured, whole_target=False, comparison=better))
    assert says(first(), "21 labelled target images", "source-only model is better", f"cdtrans choose {run} source")
    (run / "evaluation.json").unlink()
    assert says(first(), "estimated to be right", f"cdtrans ask {run}")
    change(run, estimates={"source": None, "adapted": None})
    assert says(first(), "the accuracy", "is unknown")


def test_the_first_screen_says_the_premise_and_what_was_noticed(run: Path) -> None:
    def first() -> str:
        text = page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
        return re.sub(r"<[^>]+>", "", text[text.index("<h1") : text.index("<nav")])

    (run / "evaluation.json").unlink()
    premised = change(run, verdict=Verdict("better", ()), class_set=ClassSet(total=3))
    assert wording.premise(premised) in first()
    curve = NoClassCurve(0, 1, cut=0.5, share=0.31)
    change(run, class_set=ClassSet(("red",), "noticed", curve=curve, total=3))
    assert says(first(), "1 of your 3 classes seem absent", "red", "--target-classes all", "31%", "Images of no class")
    assert "Classes that seem absent" in written(run).sections["absent"]
    change(run, class_set=ClassSet(("red",), "told", others=False, total=3))
    shown = written(run).sections
    assert "strangers" not in shown
    assert "as you said" in shown["absent"]


def test_labels_that_refute_the_claim_are_the_headline(run: Path) -> None:
    claimed = change(run, verdict=Verdict("better", ()), estimates={"source": None, "adapted": Interval(0.98, 1.0)})
    chosen = RunRecord(run).evaluation.models["adapted"]
    rewrite(run, MEASURED, replace(RunRecord(run).evaluation, whole_target=True))
    text = page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
    heading = text[text.index("<h1") : text.index("</h1>")]
    assert chosen.accuracy < 0.98
    assert says(heading, "Measured", "where the run claimed 98 to 100%", wording.premise(claimed))
    assert "claim refuted" in text
    assert wording.estimate(claimed) not in text
    assert "Labels refute the estimate" in written(run).sections["keep"]


def test_names_of_groups_carry_every_path(run: Path) -> None:
    """A path may hold anything that a file name can."""
    fields = [a for tag, a in written(run).elements if tag == "input" and "data-paths" in a]
    found = gallery.strangers(RunRecord(run), run_images(RunRecord(run))[1])
    assert [json.loads(field["data-paths"]) for field in fields] == [group.paths for group in found.groups]
    assert fields
    assert all("hidden" in field for field in fields), "without scripts they could not be saved"


def test_a_source_only_model_that_sees_one_class_is_named(run: Path) -> None:
    names, data = [*"abcdefg"], json.loads((run / "data.json").read_text())
    for model in ("adapted", "source"):
        file = run / model / "model.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    data["source"]["classes"] = dict.fromkeys(names, 3)
    (run / "data.json").write_text(json.dumps(data))
    change_views(run, target_before=np.array([1] * 20 + [0]))
    parsed = written(run)
    assert says(parsed.sections["evidence"], "source-only model puts 95%", "into the class 'b'")
    assert parsed.sections["classes"].count("!") == 2, "the mark and its meaning"


def test_nothing_comes_from_elsewhere(parsed: Parsed, full: Path) -> None:
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action"):
            value = attributes.get(name) or ""
            assert value.startswith(("data:", "#")) or not value, (tag, name, value[:60])
    text = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "", (full / "report.html").read_text())
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_every_image_has_words(parsed: Parsed) -> None:
    images = [a for tag, a in parsed.elements if tag == "img"]
    assert len(images) > 50
    assert all(a["alt"] for a in images)
    assert all(a.get("aria-label") for tag, a in parsed.elements if tag == "svg")
    assert all(a.get("scope") for tag, a in parsed.elements if tag == "th" if a)
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_section_with_labels_is_marked_as_such(parsed: Parsed, full: Path) -> None:
    accuracy = RunRecord(full).evaluation.accuracy
    assert "uses target labels" in parsed.sections["labels"]
    assert f"{accuracy:.0%}" in parsed.sections["labels"]
    for name in SECTIONS:
        assert name == "labels" or "True accuracy" not in parsed.sections[name]


def test_the_expected_accuracy_of_the_surest_labels(parsed: Parsed, full: Path, stopped_run: Path) -> None:
    text, sure = parsed.sections["keep"], np.sort(RunRecord(full).confidences())[::-1]
    assert f"all{sure.mean():.0%}" in text
    assert f"the most confident 81%{sure[:17].mean():.0%}" in text, "17 of 21 images"
    assert "unknown without labels" in written(stopped_run).sections["keep"]


def test_equal_folders_have_equal_pages(full: Path) -> None:
    before = (full / "report.html").read_bytes()
    assert page.write_report(RunRecord(full), QUIET) == full / "report.html"
    assert (full / "report.html").read_bytes() == before


MAY_LACK = ("evaluation.json", "pairs/round-01.npz")


@pytest.mark.parametrize("damage", [b"PK\3\4 cut short", None])
def test_a_damaged_part_costs_its_sections_and_is_the_reason(run: Path, damage: bytes | None) -> None:
    for name, lost in {
        "views.npz": {"changed", "uncertain", "strangers", "mislabelled", "features", "classes"},
        "logits.npz": {"keep"},
        "timings.jsonl": {"settings"},
        "environment.json": {"settings"},
        "evaluation.json": {"labels"},
        "pairs/round-01.npz": {"gallery", "pairs"},
        "data.json": {"classes"},
        "images.csv": set(SECTIONS) - {"evidence", "labels", "scores", "epochs", "settings"},
    }.items():
        before = (run / name).read_bytes()
        (run / name).unlink() if damage is None else (run / name).write_bytes(damage)
        parsed = written(run)
        damaged = {section for section, text in parsed.sections.items() if f"{run / name}" in text}
        assert damaged == (set() if damage is None and name in MAY_LACK else lost), name
        assert list(parsed.sections) == SECTIONS
        (run / name).write_bytes(before)


def test_a_run_without_a_result_is_refused(run: Path) -> None:
    (run / "result.json").unlink()
    with raises("run-unfinished"):
        page.report(run)


def test_vanished_images_are_counted(run: Path, tmp_path: Path) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(source|target): /.*", rf"\1: {tmp_path}/nowhere", config))
    text = page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
    missing = re.search(r"(\d+) of the image files .* missing", text)
    assert missing
    assert int(missing[1]) > 20
    assert text.count("file is missing") > 50
    assert 'class="pair"' in text


def test_a_folder_that_does_not_fit_itself_spoils_one_section(run: Path) -> None:
    wrong = np.array([999])
    sides = dict.fromkeys(("source", "target", "source_labels", "target_labels"), wrong)
    np.savez(run / "pairs" / "round-02.npz", **sides, kept=np.array([True]))
    texts = written(run).sections
    assert "cannot be shown" in texts["gallery"] or "damaged" in texts["gallery"]
    assert "sure" in texts["changed"]


def test_harm_is_shown_first(run: Path) -> None:
    assert 'class="band"' in page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
    refused(run)
    change(run, estimates={"source": None, "adapted": None})
    outcome = RunRecord(run).outcome
    text = page.write_report(RunRecord(run), QUIET).read_text(encoding="utf-8")
    first = text[: text.index("<section")]
    assert wording.headline(outcome).badge in first
    assert wording.headline(outcome).sentence in first
    evidence = text[text.index('id="evidence"') : text.index('id="classes"')]
    assert f"<li>{wording.findings(outcome)[0]}</li>".replace("'", "&#39;") in evidence
    assert f"cdtrans choose {run} adapted" in evidence
    assert says(evidence, "guard", "measure", "0 of 1")
    (bad,) = re.findall(r'<td class="(value[^"]*)">(.*?)</td><td class="value">(.*?)</td>', evidence)
    assert bad == ("value bad", "1.0%", "above 5.0%")
    assert "(not used)" in Parsed(text).sections["scores"]
    assert wording.opening(outcome) in text
    assert 'class="band"' not in text, "no range"
    assert "by adaptation" not in Parsed(text).sections["labels"]
    assert "adapted model," in Parsed(text).sections["gallery"], "the refused model can be looked at"


def test_a_stopped_run_shows_what_there_is(stopped_run: Path) -> None:
    parsed = written(stopped_run)
    texts = parsed.sections
    assert "source-only model alone" in texts["scores"]
    assert "Consensus" in texts["scores"]
    assert "change" not in texts["scores"]
    assert "before the first epoch" in texts["epochs"]
    assert "source-only model" in texts["classes"]
    assert "after" not in texts["classes"]
    assert "no prediction changed" in texts["changed"]
    assert "sure" in texts["uncertain"]
    assert says(texts["gallery"], "source-only model", "no adapted")
    assert "by adaptation" not in texts["labels"]
    charts = [a["aria-label"] for tag, a in parsed.elements if tag == "svg"]
    assert not [words for words in charts if "over the epochs" in words], "no curve of a single dot"


def test_names_are_text_and_not_markup_or_control_characters(run: Path) -> None:
    names = ["<script>alert(1)</script>", "r\x1b[31med\u202e", "caf\udce9"]
    for file in (run / "adapted" / "model.json", run / "source" / "model.json", run / "evaluation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    text = page.write_report(RunRecord(run), QUIET).read_bytes().decode("utf-8")
    assert "<script>alert" not in text
    assert all(name in text for name in ("&lt;script&gt;alert(1)", r"r\x1b[31med\u202e", r"caf\udce9"))
    assert not set("\x1b\u202e") & set(text)
    assert len([tag for tag, _ in Parsed(text).elements if tag == "script"]) == 1


def test_the_largest_page_is_small_enough(full: Path) -> None:
    """Every image of noise, which JPEG can do nothing about."""
    noise = np.random.default_rng(0).integers(0, 256, (THUMBNAIL_SIDE, THUMBNAIL_SIDE, 3), dtype=np.uint8)
    image = len(jpeg(Image.fromarray(noise)))
    count = 3 * gallery.SHOWN_PAIRS + 3 * gallery.LOOKS
    plots = 4 * 720 * 720 * 4 // 3 // 4  # four planes, an eighth of a byte a pixel and channel
    assert count * image + plots + (full / "report.html").stat().st_size < LARGEST


def test_a_full_disk_leaves_the_old_page(full: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with raises("disk-full"):
        page.write_report(RunRecord(run), QUIET)
    assert (run / "report.html").read_bytes() == (full / "report.html").read_bytes()
    assert not list(run.glob(".report*"))


def test_settings_are_written_as_in_yaml() -> None:
    values = (None, True, {}, {"a": 1, "b": False}, 0.5, "x")
    assert [page.setting(v) for v in values] == ["none", "true", "none", "a: 1, b: false", "0.5", "x"]
    assert page.breakable("a_b/c<d") == "a_<wbr>b/<wbr>c&lt;d"


def test_many_classes_fit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are cut, there is no matrix, colours repeat and are listed on demand, and the page says so."""
    assert ("details", {"class": "legend", "open": None}) in written(run).elements
    monkeypatch.setattr(embedding, "LEGEND_CLASSES", 2)
    monkeypatch.setattr(embedding, "COLOURS", 2)
    monkeypatch.setattr(sections, "SHOWN_CLASSES", 2)
    monkeypatch.setattr(sections, "MATRIX_CLASSES", 2)
    parsed = written(run)
    texts = parsed.sections
    assert ("details", {"class": "legend"}) in parsed.elements
    assert [a["class"] for tag, a in parsed.elements if "swatch dot k" in str(a.get("class"))] == [
        f"swatch dot k{n}" for n in (0, 1, 0)
    ]
    assert says(texts["features"], "2 colours", "3 classes")
    assert says(texts["classes"], "2 of 3 classes", "most")
    assert says(texts["pairs"], "2 of 3 classes", "largest")
    assert says(texts["labels"], "accuracy by class")
