"""The one validator: settings and options as people write them, JSON of a run folder, arguments of functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import pytest

from cdtrans.errors import ArgumentTypeError, SettingsError
from cdtrans.schema import Misfit, Range, build, check_value, checked, option


@dataclass(frozen=True)
class Finding:
    subject: str
    share: float | None = None


@dataclass(frozen=True)
class Record:
    name: str
    size: Annotated[int, Range(1, 8)]
    kind: Literal["a", "b"] = "a"
    findings: tuple[Finding, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    place: Path | None = None


@dataclass(frozen=True)
class Options:
    weight: float = option(1.0, "A weight.", minimum=0)
    count: int = option(3, "A number of times.", minimum=1, maximum=9)
    kind: Literal["soft", "hard"] = option("soft", "Kind of labels.")
    trade_off: float | Literal["auto"] = option("auto", "Or a number.", minimum=0)
    file: str | None = option(None, "A file.")


def misfit(call: Any, *args: Any, **how: Any) -> Misfit:
    with pytest.raises(Misfit) as caught:
        call(*args, **how)
    return caught.value


def test_json_becomes_a_dataclass() -> None:
    values = {"name": "n", "size": 8, "findings": [{"subject": "s"}, {"subject": "t", "share": 1}], "place": "a/b"}
    expected = Record("n", 8, findings=(Finding("s"), Finding("t", 1)), place=Path("a/b"))
    assert build(Record, values | {"counts": {"x": 1}}) == Record(**vars(expected) | {"counts": {"x": 1}})
    assert build(Record, {"name": "n", "size": 1, "findings": (Finding("s"),)}).findings == (Finding("s"),)


@pytest.mark.parametrize(
    ("change", "code", "place"),
    [
        *(({"name": 5}, "kind", "name"), ({"size": "8"}, "kind", "size"), ({"size": 9}, "range", "size")),
        *(({"size": True}, "kind", "size"), ({"size": 8.0}, "kind", "size"), ({"kind": "c"}, "choice", "kind")),
        *(({"kind": ["a"]}, "kind", "kind"), ({"findings": 5}, "kind", "findings")),
        *(({"findings": "s"}, "kind", "findings"), ({"findings": [5]}, "kind", "findings[0]")),
        ({"findings": [{"subject": "s"}, {"subject": None}]}, "kind", "findings[1].subject"),
        *(({"findings": [{}]}, "missing", "findings[0].subject"), ({"nmae": 1}, "unknown", "nmae")),
        *(({"findings": [{"subject": "", "share": math.nan}]}, "kind", "findings[0].share"),),
        *(({"findings": [{"subject": "", "share": 10**400}]}, "range", "findings[0].share"),),
        *(({"counts": {"x": "1"}}, "kind", "counts.x"), ({"counts": []}, "kind", "counts")),
        ({"counts": {5: 1}}, "kind", "counts.5"),
    ],
)
def test_json_is_strict_and_the_place_is_named(change: dict[Any, Any], code: str, place: str) -> None:
    error = misfit(build, Record, {"name": "n", "size": 1} | change)
    assert (error.code, error.place) == (code, place)
    assert place in str(error)


def test_a_value_that_is_no_mapping() -> None:
    assert misfit(build, Record, 5).code == "kind"
    assert misfit(build, Record, {"name": "n"}).place == "size"


@pytest.mark.parametrize(
    ("hint", "fits", "fails"),
    [
        (Any, object(), None),
        (object, 5, None),
        (bool, True, 1),
        (None, None, 5),
        (float, 1, True),
        (str | Path, Path("a"), 5),
        (tuple[int, str], (1, "a"), (1,)),
        (list[int], [1], (1, "a")),
        (Sequence[str], ["a"], "a"),
        (Mapping[str, float], {"a": 1.5}, {"a": "1.5"}),
        (str | Path | IO[bytes] | None, object(), None),
        (Options, Options(), {"count": "4"}),
    ],
)
def test_any_type_hint(hint: Any, fits: Any, fails: Any) -> None:
    assert check_value(fits, hint) == fits
    if fails is not None:
        misfit(check_value, fails, hint, "it")


def test_people_write_numbers_as_text() -> None:
    given = build(Options, {"weight": 2, "count": "4", "kind": "hard", "trade_off": "1e-3"}, written=True)
    assert given == Options(2.0, 4, "hard", trade_off=0.001)
    assert type(given.weight) is float
    assert type(given.count) is int
    assert build(Options, {"count": 4.0, "file": Path("a/b")}, written=True) == Options(count=4, file="a/b")


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"wieght": 1}, "unknown", "'weight'?"),
        ({"zzzzzzzz": 1}, "unknown", "weight, count, kind, trade_off"),
        ({True: 1}, "unknown", "'True'"),
        ({"weight": -1}, "range", "at least 0"),
        ({"weight": "heavy"}, "kind", "a number, not 'heavy'"),
        ({"weight": 10**309}, "range", "at most"),
        ({"weight": "inf"}, "kind", "a number"),
        ({"count": 10}, "range", "at most 9"),
        ({"count": 1.5}, "kind", "a whole number"),
        ({"count": True}, "kind", "a whole number"),
        ({"count": 10**5000}, "range", "thousands of digits"),
        ({"count": [10**5000]}, "kind", "thousands of digits"),
        ({"kind": "sotf"}, "choice", "'soft'?"),
        ({"trade_off": "atuo"}, "choice", "'auto'?"),
        ({"trade_off": [1]}, "kind", "a number or auto"),
        ({"file": ""}, "empty", "'file'"),
        ({"file": "a\0b"}, "character", "'file'"),
        ({"file": "\ud800"}, "character", "'file'"),
    ],
)
def test_what_people_write_wrong(values: dict[Any, Any], code: str, words: str) -> None:
    error = misfit(build, Options, values, written=True)
    assert error.code == code
    assert words in str(error)


def test_arguments_of_public_functions() -> None:
    @checked("images")
    def function(run: str | Path, images: str, *, top: int = 1, force: bool = False, **settings: Any) -> Path:
        return Path(run)

    assert function("a", 5, top=2, more=1) == Path("a")  # type: ignore[arg-type]
    for values, name in (({"run": 5}, "run"), ({"run": "a", "top": 1.5}, "top"), ({"run": "a", "force": 1}, "force")):
        with pytest.raises(ArgumentTypeError, match=f"'{name}' must be"):
            function(images="", **values)  # type: ignore[arg-type]
    with pytest.raises(SettingsError) as caught:
        function("a", "", top=10**301)
    assert caught.value.code == "argument-range"
    with pytest.raises(TypeError, match="missing"):
        function("a")  # type: ignore[call-arg]
