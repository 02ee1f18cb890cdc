"""The page as a file: whole, self-contained, small, and there whatever the run folder lacks."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdtrans.reporting import embedding, gallery, page, sections, target_labels
from cdtrans.reporting.page import write_report
from cdtrans.reporting.pictures import SIDE, jpeg
from cdtrans.reporting.record import read_record
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import confidences
from support import error_says, says

QUIET = Screen(quiet=True)
SECTIONS = ["changed", "evidence", "keep", "classes", "labels"]  # the answer is above them
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
    return Parsed(write_report(run, QUIET).read_text(encoding="utf-8"))


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


def test_the_answer_comes_first(run: Path) -> None:
    """Measured with labels if there are any, else estimated."""

    def first() -> str:
        text = write_report(run, QUIET).read_text(encoding="utf-8")
        return re.sub(r"<[^>]+>", "", text[text.index("<h1") : text.index("<nav")])

    evaluation = json.loads((run / "evaluation.json").read_text())
    assert says(first(), f"right on {evaluation['accuracy']:.0%} of the target", "new images like these", "points by")
    evaluation |= {"whole_target": False, "comparison": {"better": "source", "sentence": "The labels say so."}}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    assert says(first(), "21 labelled target images", "The labels say so.", f"cdtrans choose {run} source")
    (run / "evaluation.json").unlink()
    assert says(first(), "estimated to be right", f"cdtrans ask {run}")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k != "estimate"}))
    assert says(first(), "the accuracy", "is unknown")


def test_a_source_only_model_that_sees_one_class_is_named(run: Path) -> None:
    names = [*"abcdefg"]
    for file in (run / "adapted" / "model.json", run / "source" / "model.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    data = json.loads((run / "data.json").read_text())
    data["source"]["classes"] = dict.fromkeys(names, 3)
    (run / "data.json").write_text(json.dumps(data))
    np.savez(run / "predictions" / "epoch-000.npz", predicted=np.array([1] * 20 + [0]))
    page = written(run)
    assert says(page.sections["evidence"], "source-only model puts 95%", "one class, b")
    assert page.sections["classes"].count("!") == 2, "the mark and its meaning"


def test_nothing_comes_from_elsewhere(parsed: Parsed, full: Path) -> None:
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action"):
            value = attributes.get(name) or ""
            assert value.startswith(("data:", "#")) or not value, (tag, name, value[:60])
    text = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "", (full / "report.html").read_text())
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_every_picture_has_words(parsed: Parsed) -> None:
    pictures = [a for tag, a in parsed.elements if tag == "img"]
    assert len(pictures) > 50
    assert all(a["alt"] for a in pictures)
    assert all(a.get("aria-label") for tag, a in parsed.elements if tag == "svg")
    assert all(a.get("scope") for tag, a in parsed.elements if tag == "th" if a)
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_answer_key_is_marked_as_such(parsed: Parsed, full: Path) -> None:
    accuracy = json.loads((full / "evaluation.json").read_text())["accuracy"]
    assert "uses target labels" in parsed.sections["labels"]
    assert f"{accuracy:.0%}" in parsed.sections["labels"]
    for name in SECTIONS:
        assert name == "labels" or "True accuracy" not in parsed.sections[name]


def test_what_is_expected_of_the_surest_labels(parsed: Parsed, full: Path, stopped_run: Path) -> None:
    text, sure = parsed.sections["keep"], np.sort(confidences(full))[::-1]
    assert f"all{sure.mean():.0%}" in text
    assert f"the most confident 81%{sure[:17].mean():.0%}" in text, "17 of 21 images"
    assert "unknown without labels" in written(stopped_run).sections["keep"]


def test_equal_folders_have_equal_pages(full: Path) -> None:
    before = (full / "report.html").read_bytes()
    assert write_report(full, QUIET) == full / "report.html"
    assert (full / "report.html").read_bytes() == before


def test_vanished_images_are_told(run: Path, tmp_path: Path) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(source|target): /.*", rf"\1: {tmp_path}/nowhere", config))
    text = write_report(run, QUIET).read_text(encoding="utf-8")
    told = re.search(r"(\d+) of the image files .* missing", text)
    assert told
    assert int(told[1]) > 20
    assert text.count("file is missing") > 50
    assert 'class="pair"' in text


def test_a_folder_that_does_not_fit_itself_spoils_one_section(run: Path) -> None:
    wrong = np.array([999])
    np.savez(run / "pairs" / "round-02.npz", source=wrong, target=wrong, source_labels=wrong, target_labels=wrong)
    texts = written(run).sections
    assert says(texts["gallery"], "cannot be shown", "IndexError")
    assert "sure" in texts["changed"]


def test_harm_is_told_first(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    finding = {"name": "vanished classes", "found": 0.3, "limit": 0.7, "sentence": "of 3 classes 1 is left"}
    measured = finding | {"what": "share of the predicted classes that are left", "healthy": "above", "harm": True}
    fine = measured | {"what": "<share> kept", "found": 0.95, "harm": False}
    guard = {"verdict": "harm", "paragraph": "The guard judges harm.", "findings": [finding]}
    guard["measures"] = [measured, fine]
    assert 'class="band"' in write_report(run, QUIET).read_text(encoding="utf-8")
    result |= {
        "chosen_model": "source",
        "chosen_epoch": 0,
        "guard": guard,
        "estimate": result["estimate"] | {"harm": True},
    }
    (run / "result.json").write_text(json.dumps(result))
    text = write_report(run, QUIET).read_text(encoding="utf-8")
    assert "harm found" in text
    assert says(text[: text.index("<section")], "judged to do harm", "source-only model")
    evidence = text[text.index('id="evidence"') : text.index('id="classes"')]
    assert "<li>vanished classes: of 3 classes 1 is left</li>" in evidence
    assert f"cdtrans choose {run} adapted" in evidence
    assert says(evidence, "guard", "measure", "1 of 2")
    bad, good = re.findall(r'<td class="(value[^"]*)">(.*?)</td><td class="value">(.*?)</td>', evidence)
    assert bad == ("value bad", "30.0%", "above 70.0%")
    assert good == ("value", "95.0%", "above 70.0%")
    assert "&lt;share&gt; kept" in evidence
    assert "(not used)" in Parsed(text).sections["scores"]
    assert "The guard judges harm." in text
    assert 'class="band"' not in text, "no range after harm"


def test_a_stopped_run_shows_what_there_is(stopped_run: Path) -> None:
    page = written(stopped_run)
    texts = page.sections
    assert "source-only model alone" in texts["scores"]
    assert "Consensus" in texts["scores"]
    assert "change" not in texts["scores"]
    assert "before the first epoch" in texts["epochs"]
    assert "source-only model" in texts["classes"]
    assert "after" not in texts["classes"]
    assert "no prediction changed" in texts["changed"]
    assert "sure" in texts["uncertain"]
    assert says(texts["gallery"], "source-only model", "no adapted")
    assert "selected model" in texts["labels"]
    assert "by adaptation" not in texts["labels"]
    charts = [a["aria-label"] for tag, a in page.elements if tag == "svg"]
    assert not [words for words in charts if "over the epochs" in words], "no curve of a single dot"


def test_no_points_by_adaptation_where_it_was_refused(run: Path) -> None:
    assert "by adaptation" in written(run).sections["labels"]
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"chosen_model": "source", "chosen_epoch": 0}))
    texts = written(run).sections
    assert "by adaptation" not in texts["labels"]
    assert "adapted model," in texts["gallery"], "what was refused can be looked at"


def test_shares_have_their_unit(parsed: Parsed, full: Path) -> None:
    rows = sections.histogram(read_record(full)).rows
    for row in rows:
        for share in (row.source, row.before, row.after):
            assert f"{share:.1%}" in parsed.sections["classes"]


@pytest.mark.parametrize(("held", "words"), [(0, "3 classes</small>"), (1200, "1,200 more")])
def test_held_out_images_are_counted_at_the_top(run: Path, held: int, words: str) -> None:
    data = json.loads((run / "data.json").read_text())
    data["source"]["held_out"] = held
    (run / "data.json").write_text(json.dumps(data))
    text = write_report(run, QUIET).read_text(encoding="utf-8")
    assert words in text[: text.index("<section")]


def test_names_are_text_and_not_markup(run: Path) -> None:
    names = ["<script>alert(1)</script>", '"quoted" & more', "caf\udce9"]
    for file in (run / "adapted" / "model.json", run / "source" / "model.json", run / "evaluation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    text = write_report(run, QUIET).read_bytes().decode("utf-8")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "caf\\udce9" in text
    assert len([tag for tag, _ in Parsed(text).elements if tag == "script"]) == 1


def test_control_characters_of_names_are_not_in_the_page(run: Path) -> None:
    for model in ("adapted", "source"):
        card = run / model / "model.json"
        card.write_text(card.read_text().replace('"red"', r'"r\u001b[31med\u202e"'))
    text = write_report(run, QUIET).read_text()
    assert r"r\x1b[31med\u202e" in text
    assert not set("\x1b\u202e") & set(text)


def test_the_largest_page_is_small_enough(full: Path) -> None:
    """Every picture of noise, which JPEG can do nothing about."""
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    picture = len(jpeg(Image.fromarray(noise)))
    count = 3 * gallery.PAIRS + 3 * gallery.LOOKS
    plots = 5 * 720 * 720 * 4 // 3 // 4  # four planes and a matrix, an eighth of a byte a pixel and channel
    assert count * picture + plots + (full / "report.html").stat().st_size < LARGEST


def test_a_full_disk_leaves_the_old_page(full: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with error_says("disk is full", "report.html'"):
        write_report(run, QUIET)
    assert (run / "report.html").read_bytes() == (full / "report.html").read_bytes()
    assert not list(run.glob(".report*"))


def test_settings_are_written_as_in_yaml() -> None:
    assert [page.plain(v) for v in (None, True, {}, {"a": 1, "b": False}, 0.5, "x")] == [
        "none",
        "true",
        "none",
        "a: 1, b: false",
        "0.5",
        "x",
    ]
    assert page.signed(-0.25, 1) == "−0.2"
    assert page.percent(0.255, 1) == "25.5%"
    assert page.breakable("a_b/c<d") == "a_<wbr>b/<wbr>c&lt;d"


def test_many_classes_fit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are cut, a matrix becomes a picture, colours repeat and are listed on demand, and the page says so."""
    assert ("details", {"class": "legend", "open": None}) in written(run).elements
    monkeypatch.setattr(embedding.Embedding, "LISTED", 2)
    monkeypatch.setattr(embedding.Embedding, "COLOURS", 2)
    monkeypatch.setattr(sections, "SHOWN_CLASSES", 2)
    monkeypatch.setattr(target_labels, "TABLE_CLASSES", 2)
    page = written(run)
    texts = page.sections
    assert ("details", {"class": "legend"}) in page.elements
    assert [a["class"] for tag, a in page.elements if "swatch dot k" in str(a.get("class"))] == [
        f"swatch dot k{n}" for n in (0, 1, 0)
    ]
    assert says(texts["features"], "2 colours", "3 classes")
    assert says(texts["classes"], "2 of 3 classes", "most")
    assert says(texts["pairs"], "2 of 3 classes", "largest")
    assert says(texts["labels"], "accuracy by class")
