"""Each finding: when it is silent, warns or stops, and its details."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cdtrans.inputs.images import THUMBNAIL as SIDE, Header, Traces
from cdtrans.trust import preflight
from cdtrans.trust.preflight import Finding, examine, examine_target, gravest, refuse
from support import raises, says


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def traces(name: str, thumbnails: np.ndarray, digests: list[str] | None = None) -> Traces:
    paths = [f"{name}-{n}.png" for n in range(len(thumbnails))]
    return Traces(paths, digests or [f"{name}-{n}" for n in range(len(thumbnails))], thumbnails)


def classes(*counts: int) -> dict[str, int]:
    return {f"class-{k}": count for k, count in enumerate(counts)}


def subject(findings: list[Finding], name: str) -> Finding:
    (finding,) = [f for f in findings if f.subject == name]
    return finding


SOURCE = traces("s", noise(20))
TARGET = traces("t", noise(12, seed=1))


def examined(source: Traces, target: Traces) -> list[Finding]:
    """Two classes of ten source images."""
    return examine(source, [0] * 10 + [1] * 10, classes(10, 10), target)


def test_nothing_is_wrong_with_two_sets_of_different_images() -> None:
    findings = examined(SOURCE, TARGET)
    assert {f.state for f in findings} == {"ok"}, findings
    assert not any(f.advice for f in findings)
    assert [f.subject for f in findings] == [
        "classes",
        "balance",
        "target size",
        "copies in the source",
        "labels of copies",
        "copies across domains",
        "blank images, source",
        "blank images, target",
        "greyscale",
    ]


BAD = {f"{n}.png": "truncated" for n in range(7)}


class TestFiles:
    def test_unreadable_files_are_listed_and_the_first_are_named(self) -> None:
        finding = preflight.unreadable("target", BAD, 140, 0.05)
        assert finding.state == "warning"
        assert says(finding.statement, "7 of 140 target files", "'0.png' (truncated)", "'4.png' (truncated)", "2 more")
        assert "'5.png'" not in finding.statement
        assert finding.details["unreadable"] == BAD
        assert preflight.unreadable("source", {}, 7, 0.05).state == "ok"

    @pytest.mark.parametrize(
        ("total", "max_bad", "state"), [(139, 0.05, "stop"), (140, 0.05, "warning"), (7, 1, "stop")]
    )
    def test_too_many_is_what_adapt_would_refuse(self, total: int, max_bad: float, state: str) -> None:
        assert preflight.unreadable("source", BAD, total, max_bad).state == state

    def test_endings_of_ignored_files_are_counted_and_the_first_files_named(self) -> None:
        paths = [*(f"{n}.heic" for n in range(5)), "x.HEIC", "scan", "odd.a b\nc"]
        finding = preflight.ignored("target", paths)
        assert finding.state == "warning"
        assert says(finding.statement, "8 target files", "(6 '.heic', 1 without, 1 '.a b\\nc')", "and 3 more")
        assert finding.details == {"files": paths}
        none = preflight.ignored("source", ())
        assert (none.state, none.advice, none.details) == ("ok", "", {"files": []})


class TestClasses:
    def test_few_classes_are_counted_one_by_one_and_many_in_short(self) -> None:
        assert says(preflight.class_sizes(classes(5, 9)).statement, "2 classes", "'class-0' 5, 'class-1' 9")
        assert says(preflight.class_sizes(classes(*range(5, 18))).statement, "13 classes", "5 to 17 images")
        assert preflight.class_sizes(classes(*range(5, 18))).details["images"]["class-12"] == 17

    def test_a_small_class_is_a_warning_and_an_empty_one_a_stop(self) -> None:
        small, empty = preflight.class_sizes(classes(9, 4, 1)), preflight.class_sizes(classes(9, 0, 1))
        assert (small.state, empty.state) == ("warning", "stop")
        assert says(small.statement, "'class-1', 'class-2'")
        assert says(empty.statement, "'class-1'")

    @pytest.mark.parametrize(("counts", "state"), [((5, 50), "ok"), ((5, 51), "warning"), ((0, 5, 51), "warning")])
    def test_balance(self, counts: tuple[int, ...], state: str) -> None:
        finding = preflight.class_balance(classes(*counts))
        assert finding.state == state
        assert finding.details == {"largest_to_smallest": counts[-1] / 5}

    @pytest.mark.parametrize(("distinct", "state"), [(1, "warning"), (2, "ok")])
    def test_fewer_different_targets_than_classes(self, distinct: int, state: str) -> None:
        target = TARGET._replace(digests=[str(n % distinct) for n in range(12)])
        assert preflight.target_size(2, target).state == state


class TestCopies:
    def test_in_the_source(self) -> None:
        doubled = SOURCE._replace(digests=["s-0", "s-0", "s-0", *SOURCE.digests[3:]])
        finding = subject(examined(doubled, TARGET), "copies in the source")
        assert finding.state == "ok"  # a tenth
        assert finding.details == {"exact": 2, "near": 0, "groups": [["s-0.png", "s-1.png", "s-2.png"]]}
        thumbnails = SOURCE.thumbnails.copy()
        thumbnails[9] = thumbnails[8]
        finding = subject(examined(doubled._replace(thumbnails=thumbnails), TARGET), "copies in the source")
        assert finding.state == "warning"
        assert (finding.details["exact"], finding.details["near"]) == (2, 1)

    def test_under_two_labels(self) -> None:
        thumbnails = SOURCE.thumbnails.copy()
        thumbnails[12] = thumbnails[2]
        doubled = SOURCE._replace(digests=[*SOURCE.digests[:19], "s-0"], thumbnails=thumbnails)
        finding = subject(examined(doubled, TARGET), "labels of copies")
        assert finding.state == "warning"
        assert finding.details == {
            "exact": [{"s-0.png": "class-0", "s-19.png": "class-1"}],
            "near": [{"s-2.png": "class-0", "s-12.png": "class-1"}],
        }

    def test_a_quarter_of_contradicted_labels_is_a_stop(self) -> None:
        for copied, state in ((2, "warning"), (3, "stop")):
            doubled = SOURCE._replace(digests=[*SOURCE.digests[:-copied], *SOURCE.digests[:copied]])
            assert subject(examined(doubled, TARGET), "labels of copies").state == state

    @pytest.mark.parametrize(("copied", "state"), [(0, "ok"), (1, "warning"), (6, "warning"), (7, "stop")])
    def test_across_the_domains(self, copied: int, state: str) -> None:
        target = TARGET._replace(digests=[*SOURCE.digests[:copied], *TARGET.digests[copied:]])
        finding = subject(examined(SOURCE, target), "copies across domains")
        assert finding.state == state
        assert finding.details["exact"] == [{"target": f"t-{n}.png", "source": f"s-{n}.png"} for n in range(copied)]
        assert finding.details["near"] == []

    def test_near_copies_across_the_domains_never_stop(self) -> None:
        """They may be what two cameras saw of one thing."""
        finding = subject(examined(SOURCE, traces("t", SOURCE.thumbnails[::-1])), "copies across domains")
        assert finding.state == "warning"
        assert len(finding.details["near"]) == 20


class TestPixels:
    @pytest.mark.parametrize(("blank", "state"), [(0, "ok"), (1, "ok"), (2, "warning"), (51, "stop")])
    def test_blank_images(self, blank: int, state: str) -> None:
        thumbnails = noise(100)
        thumbnails[:blank] = 250 + thumbnails[:blank] % 3
        finding = preflight.blank_images("target", traces("t", thumbnails))
        assert finding.state == state
        assert finding.details["images"] == [f"t-{n}.png" for n in range(blank)]
        assert bool(finding.advice) == (state != "ok")

    @pytest.mark.parametrize(("grey", "state"), [(25, "ok"), (26, "warning"), (100, "warning")])
    def test_greyscale_in_one_domain(self, grey: int, state: str) -> None:
        """Stored in three channels, with what JPEG adds to them."""
        coloured, mixed = noise(100), noise(100, seed=1)
        mixed[:grey] = mixed[:grey, :, :, :1] // 2 + np.array([0, 1, 2], np.uint8)
        for finding in (preflight.colour(coloured, mixed), preflight.colour(mixed, coloured)):
            assert finding.state == state
            assert f"{grey}%" in finding.statement
        assert preflight.colour(mixed, mixed).state == "ok"


class TestHeaders:
    def test_sizes(self) -> None:
        odd = [Header(55, 300, False), Header(300, 1201, False)]
        plain = [Header(300, 200, False), Header(56, 56, False), Header(200, 800, False)]
        paths = [str(n) for n in range(40)]
        finding = preflight.image_sizes("source", paths, [*odd, *plain, *plain[:1] * 35], crop=224)
        assert (finding.state, finding.advice) == ("ok", "")  # a twentieth
        assert finding.details == {"median": [300, 200], "tiny": ["0"], "thin": ["0", "1"]}
        finding = preflight.image_sizes("source", paths, [*odd, *plain, *odd[:1] * 35], crop=224)
        assert finding.state == "warning"
        assert (len(finding.details["tiny"]), len(finding.details["thin"])) == (36, 37)

    def test_transparency_in_one_domain(self) -> None:
        clear, solid = [Header(9, 9, True)] * 4, [Header(9, 9, False)] * 4
        assert preflight.transparency(clear, solid).state == "warning"
        assert preflight.transparency(clear, clear).state == "ok"
        assert preflight.transparency(solid, solid[:3] + clear[:1]).details == {"source": 0.0, "target": 0.25}


def test_the_layout_of_the_source() -> None:
    assert preflight.layout([]).state == "ok"
    finding = preflight.layout([("One thing", "Do this."), ("Another", "Do that.")])
    assert (finding.state, finding.statement, finding.advice) == ("warning", "One thing. Another", "Do this. Do that.")


class TestFindings:
    @given(st.lists(st.sampled_from(["ok", "warning", "stop"])))
    def test_the_gravest_decides(self, states: list[str]) -> None:
        expected = next((s for s in ("stop", "warning") if s in states), "ok")
        assert gravest([Finding(s, "x", "y") for s in states]) == expected  # type: ignore[arg-type]

    def test_refusal(self) -> None:
        refuse([Finding("ok", "a", "b"), Finding("warning", "a", "b")])
        for stops in (1, 2):
            with raises("data-refused") as caught:
                refuse([Finding("ok", "a", "b"), *[Finding("stop", "a", "It is so", "Change it.")] * stops])
            assert says(str(caught.value), "It is so", "Change it")


def test_a_target_without_a_source_is_looked_at_too() -> None:
    assert [f.state for f in examine_target(2, TARGET)] == ["ok", "ok"]
    blank = traces("t", np.zeros((12, SIDE, SIDE, 3), np.uint8), ["same"] * 12)
    assert [f.state for f in examine_target(2, blank)] == ["warning", "stop"]
